"""Models that people bring: resumed, personalised, exported, under privacy.

Each kind is a row of a table, of Keras 2 and, where there is one, of Keras 3.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
import tree

from tests.support import planted
import tff_partial
from tff_partial import algorithms
from tff_partial import Exact
from tff_partial import Phase
from tff_partial import sgd
from tff_partial import tiers
from tff_partial.client.client_work import CompositionError
from tff_partial.composition import Aggregation
from tff_partial.dp import clipping
from tff_partial.dp import privacy
from tff_partial.exporting import running
from tff_partial.exporting.errors import ExportError
from tff_partial.model import keras_3
from tff_partial.model import models
from tff_partial.training.errors import ProgramError

try:
  import keras as newest

  KERASES = [tf.keras, newest] if keras_3.module() else [tf.keras]
except ImportError:
  KERASES = [tf.keras]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('in_cohorts')]


_PER = functools.partial(
  algorithms.build_fed_per, training=Phase(optimizer=sgd(0.1), batch_size=4)
)
_RECON = functools.partial(
  algorithms.build_fed_recon,
  reconstruct=Phase(optimizer=sgd(0.1)),
  update=Phase(optimizer=sgd(0.1)),
)


class _Row(NamedTuple):
  """A kind of model, and how it is trained.

  Attributes:
    kind: Of `planted.brought`.
    options: For `from_keras`.
    adapters: Options of `add_lora`, once for each adapter.
    build: Builds the process.
    tolerance: Relative error of predictions, as layers compute.
    refused_by_tflite: What it says of the model, if it cannot have it.
  """

  kind: str = ''
  options: dict[str, Any] = {}
  adapters: tuple[dict[str, Any], ...] = ()
  build: Callable[..., Any] = _PER
  tolerance: float = 1e-5
  refused_by_tflite: str = ''


_SHARED = {'local': None}
ROWS = {
  'outputs': _Row('outputs'),
  'fed_sa': _Row(options=_SHARED, adapters=({'b': 'local'},)),
  'ffa': _Row(options=_SHARED, adapters=({'a': 'frozen'},)),
  'two adapters': _Row(
    options=_SHARED, adapters=({}, {'a': 'local', 'b': 'local', 'name': 'own'})
  ),
  'rebuilt': _Row(options=_SHARED, adapters=({'b': 'local'},), build=_RECON),
  'solved for': _Row(
    options=_SHARED,
    adapters=({'b': 'local', 'where': 'user', 'train': 'items'},),
    build=functools.partial(
      _RECON, reconstruct=Phase(optimizer=Exact(ridge=1.0))
    ),
  ),
  'bfloat16': _Row(
    'mixed_bfloat16', tolerance=0.02, refused_by_tflite='in bfloat16'
  ),
  'float16': _Row(
    'mixed_float16', tolerance=0.005, refused_by_tflite='in float16'
  ),
  'averaged': _Row('normalized', {'state': 'averaged'}),
  'silo_bn': _Row('normalized', {'state': 'local'}),
  'fed_bn': _Row(
    'normalized',
    {'local': ['norm', 'user']},
    refused_by_tflite='operations BroadcastGradientArgs',
  ),
  'frozen': _Row('normalized', {'state': 'frozen'}),
  'strings': _Row('strings'),
  'texts': _Row('texts'),
}
_CLIENTS = planted.rate({'a': 9, 'b': 6, 'c': 11, 'd': 3})


class _Brought(NamedTuple):
  """A row's model, its process, its clients and what one round comes to."""

  row: _Row
  model: models.PartialModel
  process: Any
  clients: Any

  def train(self, rounds: int, **options: Any) -> Any:
    return tff_partial.train(
      self.process,
      self.clients,
      rounds=rounds,
      clients_per_round=3,
      evaluate_every=1,
      **options,
    )

  def inputs(self) -> np.ndarray:
    if self.row.kind in ('strings', 'texts'):
      return np.array(['w3', 'w1', 'w4', 'w1'])
    return np.array([3, 1, 4, 1], np.int32)

  def assert_close(self, found: Any, expected: Any) -> None:
    tf.nest.map_structure(
      lambda a, b: np.testing.assert_allclose(
        np.float32(a), b, self.row.tolerance, self.row.tolerance
      ),
      found,
      expected,
    )


@pytest.fixture(
  scope='module',
  name='brought',
  params=[(of, name) for of in KERASES for name in ROWS],
  ids=lambda param: f'{param[1]}, Keras {2 + (param[0] is not tf.keras)}',
)
def fixture_brought(request) -> _Brought:
  keras, name = request.param
  row = ROWS[name]
  model = planted.brought(keras, row.kind, dropout=0.0, **row.options)
  for options in row.adapters:
    model = tff_partial.add_lora(model, 2, **{'where': 'items', **options})
  process = row.build(model)
  clients = planted.pack(_CLIENTS, process.example_spec)
  return _Brought(row, model, process, clients)


@pytest.fixture(scope='module', name='trained')
def fixture_trained(brought) -> Any:
  return brought.train(3)


def test_a_personal_model_predicts_as_its_client(brought, trained):
  """One that took part, and a new one."""
  if tiers.LOCAL not in brought.model.tiers:
    with pytest.raises(ProgramError, match='trains nothing'):
      tff_partial.personalise(trained, brought.clients, 'a')
    return
  new = planted.pack({'new': _CLIENTS['b']}, brought.process.example_spec)
  x = brought.inputs()
  found = []
  for clients, client in ((brought.clients, 'a'), (new, 'new')):
    own = tff_partial.personalise(trained, clients, client)
    predicted = tff_partial.Predictor(trained, clients).predict(client, x)
    made = own(tf.constant(x))  # Keras 3 predicts for no arrays of strings.
    found.append(tf.nest.map_structure(np.float32, made))
    brought.assert_close(found[-1], predicted)
    assert np.shape(found[-1]) == np.shape(predicted)
  if brought.row.kind == 'strings':  # Keras 3 takes them as tensors.
    (best,) = tff_partial.top_n(own, x, 1)
    assert best.candidate == x[np.argmax(found[-1])]
  first, other = (tf.nest.flatten(each)[-1] for each in found)
  assert np.abs(first - other).max() > 1e-3


def test_a_device_predicts_as_the_personal_model(brought, trained, tmp_path):
  """Of a new client, whose first weights it is given."""
  if brought.row.kind in ('strings', 'texts'):
    pytest.skip('exporting/lookups_test.py')
  process, support = brought.process, {}
  new = planted.pack({'new': _CLIENTS['b']}, process.example_spec)
  (client,) = new.cohort(['new'], planted.client_seeds(['new']))
  weights = dict(trained.best_weights.trainable[tiers.GLOBAL])
  if trained.client_store is not None:
    (first,) = trained.client_store.read(['new'])
    weights.update(first)
  if tiers.LOCAL in brought.model.tiers:
    own = tff_partial.personalise(trained, new, 'new')
    fields = {name: client['examples'][name] for name in 'xy'}
    support = {
      '_'.join(path): running.padded(array[: client['count']], 12)
      for path, array in tree.flatten_with_path(fields)
    }
    support['count'] = client['count']
  else:
    own = brought.model.to_keras(weights)

  def export(format: str) -> Any:
    exported = tff_partial.export(
      brought.model, weights, tmp_path / format, [format], **settings
    )
    return exported.paths[format]

  settings: Any = {'reconstruct': trained, 'num_support': 12}
  paths = [export('saved_model')]
  refused = brought.row.refused_by_tflite
  if brought.row.kind == 'normalized' and keras_3.is_model(own):
    refused = ''  # Its gradients have shapes.
  if refused:
    with pytest.raises(ExportError, match=refused):
      export('tflite')
  else:
    paths.append(export('tflite'))
  x = brought.inputs()
  made = tree.flatten_with_path({'predictions': own.predict(x, verbose=0)})
  expected = {'_'.join(path): value for path, value in made}
  for path in paths:
    device = running.load(path)
    local = device['reconstruct'](**support) if support else {}
    found = device['predict'](x=x, **local)
    brought.assert_close(expected, found)


def test_a_private_update_is_clipped_in_float32_or_refused(brought):
  """That of one client, by hand; noise of another draw differs."""
  cohort = {'a': _CLIENTS['a']}
  moved = []
  for noise in (None, 0.0, 1.0):
    private = privacy.private_mean(
      clipping.FixedClip(0.01),
      noise_multiplier=noise or 0.0,
      clients_per_round=1,
      noise_seed=3,
    )
    aggregation = Aggregation(aggregator=None if noise is None else private)
    if noise and brought.row.options.get('state') == 'averaged':
      with pytest.raises(CompositionError, match="'norm/moving_mean'"):
        brought.row.build(brought.model, aggregation=aggregation)
      return
    process = brought.row.build(brought.model, aggregation=aggregation)
    before, after = planted.before_and_after(process, cohort, 1)
    assert all(value.dtype == np.float32 for value in after.values())
    moved.append(
      np.concatenate([np.ravel(after[n] - before[n]) for n in before])
    )
  plain, clipped, noised = moved
  expected = plain * (0.01 / np.linalg.norm(plain))
  np.testing.assert_allclose(clipped, expected, rtol=0, atol=1e-6)
  assert np.std(noised - clipped) == pytest.approx(0.01, rel=0.5)
