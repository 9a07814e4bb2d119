"""Training and measuring clients that are assigned to a sub-population."""

from typing import Any

from tff_partial import client_state
from tff_partial import evaluation
from tff_partial import phases
from tff_partial.assignments import Assignment
from tff_partial.data import splits
from tff_partial.model import models


def work(
  assignment: Assignment,
  training: phases.Work,
  on: splits.Part = splits.everything(),
) -> phases.Work:
  """Return the work of a client that is assigned a sub-population, then trains.

  Args:
    assignment: How clients are assigned.
    training: The work after the assignment.
    on: The examples of what the assignment does on all of them.
  """
  chosen = [assignment.assign] if assignment.assign else []
  before = [placed(part, on) for part in (*assignment.before, *chosen)]
  return [*before, *training, *(placed(part, on) for part in assignment.after)]


def placed(part: Any, on: splits.Part) -> Any:
  """Return what an assignment does, on other examples if it is on all."""
  everything = splits.everything()
  is_free = getattr(part, 'on', everything) is everything
  return phases.placed(part, on) if is_free else part


def build_evaluation(
  model: models.PartialModel,
  client_state: client_state.ClientState,
  assignment: Assignment,
  *,
  split: splits.Split | None = None,
) -> evaluation.Evaluation:
  """Build an evaluation: assign by the support set, measure on the query set.

  Args:
    model: The model.
    client_state: What clients remember.
    assignment: How clients are assigned their sub-population.
    split: Support and query set; the two halves by default.
  """
  return evaluation.build_query_evaluation(
    model,
    client_state=client_state,
    before=work(assignment._replace(after=()), []),
    split=split,
  )
