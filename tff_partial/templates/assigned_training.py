"""Training and measuring clients that are assigned to a sub-population."""

import dataclasses

from tff_partial import client_state
from tff_partial import evaluation
from tff_partial import phases
from tff_partial.assignments import Assignment
from tff_partial.data import splits
from tff_partial.model import models
from tff_partial.phases import Phase


def work(
  assignment: Assignment, training: phases.Work, on: splits.Part | None = None
) -> phases.Work:
  """Return the work of a client that is assigned a sub-population, then trains.

  Args:
    assignment: How clients are assigned.
    training: The work after the assignment.
    on: The examples of the assignment's phases and choice, if not their own.
  """

  def placed(phases: tuple[Phase, ...]) -> list[Phase]:
    return [dataclasses.replace(p, on=on or p.on) for p in phases]

  assign = assignment.assign
  chosen = [assign._replace(on=on or assign.on)] if assign else []
  return [
    *placed(assignment.before),
    *chosen,
    *training,
    *placed(assignment.after),
  ]


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
  split = split or splits.halves()
  support, _ = split
  return evaluation.build_query_evaluation(
    model,
    client_state=client_state,
    before=work(assignment._replace(after=()), [], support),
    split=split,
  )
