"""Training and measuring clients that are assigned to a sub-population."""

from collections.abc import Mapping
import dataclasses
from typing import TypedDict

from tff_partial import client_state
from tff_partial import composition
from tff_partial import evaluation
from tff_partial import phases
from tff_partial.assignments import Assignment
from tff_partial.data import splits
from tff_partial.model import models
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.templates import server_optimizers


class Measuring(TypedDict, total=False):
  """Keyword arguments of `build_evaluation`."""

  split: splits.Split | None
  measure_batch_size: int


def work(
  assignment: Assignment, training: phases.Work, on: splits.Part | None = None
) -> phases.Work:
  """Return the work of a client that is assigned a sub-population, then trains.

  Args:
    assignment: How clients are assigned.
    training: The work after the assignment.
    on: The examples of the assignment's phases, if not their own.
  """

  def placed(phases: tuple[Phase, ...]) -> list[Phase]:
    return [dataclasses.replace(p, on=on or p.on) for p in phases]

  chosen = [assignment.assign] if assignment.assign else []
  return [
    *placed(assignment.before),
    *chosen,
    *training,
    *placed(assignment.after),
  ]


def joining(
  apart: Mapping[str, Optimizer], how: composition.Joining
) -> composition.Joining:
  """Return how the server aggregates, with other optimizers for prototypes.

  Args:
    apart: Regular expression over whole variable names to the optimizer of
      these variables.
    how: How the server aggregates; its optimizer is that of all others.
  """
  rest = how.get('server_optimizer') or sgd(1.0)
  chosen = server_optimizers.by_name(apart, rest)
  return {**how, 'server_optimizer': chosen}


def build_evaluation(
  model: models.PartialModel,
  client_state: client_state.ClientState,
  assignment: Assignment,
  *,
  split: splits.Split | None = None,
  measure_batch_size: int = 100,
) -> evaluation.Evaluation:
  """Build an evaluation: assign by the support set, measure on the query set.

  Args:
    model: The model.
    client_state: What clients remember.
    assignment: How clients are assigned their sub-population.
    split: Support and query set; the two halves by default.
    measure_batch_size: Examples measured at a time; does not change the result.
  """
  support, query = split or splits.halves()
  measure = Phase(
    train=(), on=query, batch_size=measure_batch_size, measured=True
  )
  before = work(assignment._replace(after=()), [], support)
  return evaluation.build_evaluation(
    model, client_state=client_state, work=[*before, measure]
  )
