"""Message of a diverged run: when, at which client first, and a remedy."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial import evaluation
from tff_partial import processes
from tff_partial.client import local_training
from tff_partial.data import cohorts

_REMEDY = (
  'Try a smaller learning rate at the clients or at the server, or clip what '
  'clients send: Aggregation(aggregators.robust()), or --clip_norm=1 on the '
  'command line.'
)


class Begun(NamedTuple):
  """Inputs of a round.

  Attributes:
    state: The server's state.
    kept: The state of each client.
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
  """Describe how a run diverged, in one or more sentences.

  Args:
    process: The trained process.
    number: The last round.
    rounds: Number of rounds of the whole run.
    train: That round's training metrics; None to leave them out.
    begun: The round's inputs, to find the first client without finite loss or
      weights; None to leave it out.
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
  """Return a round's first such client with its loss, or None if unknown.

  Clients repeat their work, one after the other, and send nothing.
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

  def look(shared: Any, frozen: Any, kept: Any, client: Any, sent: Any) -> Any:
    with work.begin(shared, frozen, kept, client, sent) as context:
      result = local_training.run(
        work.work, context, work.tables, sent.get('round')
      )
      loss = [tf.cast(part, tf.float32) for part in result.loss]
      return collections.OrderedDict(
        is_finite=result.is_finite, loss=loss[0] / loss[1]
      )

  looking = work.computation(look, sent)
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
