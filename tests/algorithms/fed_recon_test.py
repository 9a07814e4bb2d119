"""Federated reconstruction agrees with the paper, by hand.

That it agrees with TFF, too, `references_test.py` shows.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import planted
from tff_partial import algorithms
from tff_partial import processes
from tff_partial.composition import Aggregation
from tff_partial.data import splits
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.phases import sgd

layers = tf.keras.layers
optimizers = tff.learning.optimizers
_START = 0.3
_TABLE = 'items/embeddings'
pytestmark = pytest.mark.usefixtures('in_native')


@functools.cache
def _model() -> models.PartialModel:
  return planted.factorization(planted.constant_user(_START))


# ---- by hand -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Setting:
  """Arguments of `build_fed_recon`, and what a client does with them.

  Attributes:
    options: The arguments.
    parts: From the number of examples to the support and the query set.
    reconstruction: Passes over the support set, and steps at most.
    update: Passes over the query set, and steps at most.
  """

  options: dict[str, Any]
  parts: Callable[[int], tuple[list[int], list[int]]]
  reconstruction: tuple[int, int] = (1, 100)
  update: tuple[int, int] = (1, 100)


def _in_halves(count: int) -> tuple[list[int], list[int]]:
  half = max(min(round(count / 2), count - 1), min(count, 1))
  return list(range(half)), list(range(half, count))


def _in_batches_of_3(count: int) -> tuple[list[int], list[int]]:
  places = range(count)
  return [i for i in places if i // 3 % 2 == 0], [
    i for i in places if i // 3 % 2 == 1
  ]


def _all_twice(count: int) -> tuple[list[int], list[int]]:
  return list(range(count)), list(range(count))


_ALIKE = Aggregation(client_weighting=tff.learning.ClientWeighting.UNIFORM)
_SETTINGS = {
  'defaults': Setting({}, _in_halves),
  'epochs and steps': Setting(
    {
      'split': splits.alternating(3),
      'reconstruct': {'epochs': 3, 'max_steps': 4},
      'update': {'epochs': 2, 'max_steps': 3},
    },
    _in_batches_of_3,
    (3, 4),
    (2, 3),
  ),
  'no reconstruction': Setting(
    {'reconstruct': {'max_steps': 0}}, _in_halves, (1, 0)
  ),
  'joint training': Setting(
    {'joint': True, 'update': {'epochs': 2}}, _in_halves, update=(2, 100)
  ),
  'support is query': Setting({'split': splits.same()}, _all_twice),
  'all alike': Setting({'aggregation': _ALIKE}, _in_halves),
  'other rates': Setting(
    {
      'reconstruct': {'optimizer': sgd(0.2)},
      'update': {'optimizer': sgd(0.05)},
      'server_optimizer': sgd(0.5),
    },
    _in_halves,
  ),
}
_COUNTS = {'ann': 7, 'bob': 14, 'cid': 1, 'dot': 2, 'eve': 9}


def _batches(rows: list[int], epochs: int, steps: int) -> Iterator[list[int]]:
  """The rows of each step: batches of 3; an epoch's last may be smaller."""
  cut = [rows[i : i + 3] for i in range(0, len(rows), 3)]
  yield from (cut * epochs)[:steps]


def _client_by_hand(
  setting: Setting, table: np.ndarray, fields: planted.Fields
) -> tuple[np.ndarray, list[float], int]:
  """A client's table after a round, its errors, and how much it weighs."""
  table, user = table.copy(), np.full(planted.NUM_FACTORS, _START)
  rates = {'local': 0.1, 'global': 0.1}
  if 'server_optimizer' in setting.options:
    rates = {'local': 0.2, 'global': 0.05}
  support, query = setting.parts(len(fields['x']))
  for rows in _batches(support, *setting.reconstruction):
    vectors = table[fields['x'][rows]]
    slope = 2 * (vectors @ user - fields['y'][rows]) / len(rows)
    user = user - rates['local'] * slope @ vectors
  errors = []
  for rows in _batches(query, *setting.update):
    vectors = table[fields['x'][rows]]
    error = vectors @ user - fields['y'][rows]
    errors.extend(error)
    slope = 2 * error / len(rows)
    np.add.at(
      table, fields['x'][rows], -rates['global'] * np.outer(slope, user)
    )
    if setting.options.get('joint'):
      user = user - rates['global'] * slope @ vectors
  weight = len(query)
  if 'aggregation' in setting.options:
    weight = int(weight > 0)
  return table, errors, weight


def _build(
  model: models.PartialModel,
  reconstruct: Mapping[str, Any] = {},
  update: Mapping[str, Any] = {},
  **options: Any,
) -> processes.PartialProcess:
  how = {'optimizer': sgd(0.1), 'batch_size': 3}
  return algorithms.build_fed_recon(
    model,
    reconstruct=Phase(**{**how, **reconstruct}),
    update=Phase(batch_size=3, **update),
    **options,
  )


@functools.cache
def _process(name: str) -> processes.PartialProcess:
  """The process of a setting, which several tests look at."""
  return _build(_model(), **_SETTINGS[name].options)


@pytest.mark.slow
@pytest.mark.parametrize('name', _SETTINGS)
def test_two_rounds_by_hand(name):
  setting, process = _SETTINGS[name], _process(name)
  clients = planted.rate(_COUNTS)
  cohort = planted.cohort_of(process, clients)
  state = process.initialize()
  table = planted.global_weights(process, state)[_TABLE].astype(np.float64)
  for _ in range(2):
    output = planted.run(process, cohort, state)
    state = output.state
    worked = [_client_by_hand(setting, table, f) for f in clients.values()]
    weights = np.array([weight for _, _, weight in worked])
    mean = np.einsum('c,cij->ij', weights, [t for t, _, _ in worked])
    rate = 0.5 if 'server_optimizer' in setting.options else 1.0
    table += rate * (mean / weights.sum() - table)
    found = planted.global_weights(process, state)[_TABLE]
    planted.assert_close(found, table, 1e-6)
    errors = np.concatenate([errors for _, errors, _ in worked])
    metrics = planted.train_metrics(output)
    assert metrics['loss'] == pytest.approx(np.mean(errors**2), rel=1e-5)
    assert metrics['rmse'] == pytest.approx(
      np.sqrt(np.mean(errors**2)), rel=1e-5
    )
    queries = [len(setting.parts(count)[1]) for count in _COUNTS.values()]
    assert metrics['num_examples'] == sum(queries)
    assert metrics['num_clients'] == sum(size > 0 for size in queries)
