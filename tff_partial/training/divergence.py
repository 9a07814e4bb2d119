"""Says that a run has diverged: when, at which client first, and what helps."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial import evaluation
from tff_partial import messages
from tff_partial import processes
from tff_partial.data import cohorts

_REMEDY = (
  'Try a smaller learning rate at the clients or at the server, or clip what '
  'clients send: aggregator=tff_partial.aggregators.robust(), or --clip_norm=1 '
  'on the command line.'
)


class Begun(NamedTuple):
  """What a round began with.

  Attributes:
    state: The server's state.
    kept: What each client remembered.
    cohort: The clients.
  """

  state: Any
  kept: Sequence[Any]
  cohort: cohorts.Cohort


def describe(
  process: processes.PartialProcess,
  number: int,
  rounds: int,
  train: Mapping[str, Any] | None,
  begun: Begun | None,
) -> str:
  """Describe how a run diverged, in a sentence or a few.

  Args:
    process: What was trained.
    number: The last round.
    rounds: How many the run was to have.
    train: That round's training metrics; None where they are not to be told.
    begun: What the round began with, to find the first client that has no
      finite loss or weights; None where it is not to be told.
  """
  told = [f'The run diverged; it ended after round {number} of {rounds}.']
  if train:
    lost = int(train['num_not_finite'])
    size = evaluation.num_measured(train)
    first = None
    if lost and begun is not None:
      first = _first_not_finite(process, begun)
    told.append(
      f'In that round {lost} of {size} clients had no finite loss or weights'
      + ('.' if first is None else f', first {first}.')
    )
    if not lost:
      told[-1] += f' The loss was {float(train["loss"]):.4g}.'
  return ' '.join([*told, _REMEDY])


def _first_not_finite(
  process: processes.PartialProcess, begun: Begun
) -> str | None:
  """The first such client of a round, with its loss; None if it is not known.

  Clients do again what they did, one after the other, and send nothing.
  """
  work = process.work
  if work is None:
    return None
  held = process.initialize.type_signature.result.member.client_work
  sent = collections.OrderedDict(
    (name, tff.types.type_to_tf_tensor_specs(kind))
    for name, kind in tff.structure.iter_elements(held)
    if name == 'server' or name == 'round' and work.follows_rounds
  )

  def look(
    shared: Any, frozen: Any, kept: Any, client: Any, *beside: Any
  ) -> Any:
    result = work.run(shared, frozen, kept, client, *beside)
    loss = [tf.cast(part, tf.float32) for part in result.loss]
    return collections.OrderedDict(
      is_finite=result.is_finite, loss=loss[0] / loss[1]
    )

  looking = messages.for_a_client(look, work, sent)
  weights = process.get_model_weights(begun.state)
  beside = []
  if sent:
    known = begun.state.client_work
    beside = [collections.OrderedDict((name, known[name]) for name in sent)]
  for place, client in enumerate(begun.cohort.client_ids):
    found = looking(weights, begun.kept[place], begun.cohort[place], *beside)
    if not found['is_finite']:
      loss = float(found['loss'])
      what = ' and its weights not finite' if np.isfinite(loss) else ''
      return f'{client!r}, whose loss was {loss:.4g}{what}'
  return None
