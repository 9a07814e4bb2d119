"""Which tables are trained by rows, and that this changes only the cost."""

from collections.abc import Callable
import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import planted
from tests.support.one_client import Client
from tff_partial import phases
from tff_partial import terms
from tff_partial import tiers
from tff_partial.model import keras_models
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.sparse import lookups

layers = tf.keras.layers
optimizers = phases.tff.learning.optimizers

# Prime, so that it can be looked for.
_ROWS = 10007
_BOTH = (tiers.GLOBAL, tiers.LOCAL)
_WORK = [
  Phase(_BOTH, optimizer=sgd(0.1), epochs=2, batch_size=4, measured=True)
]


def _model(
  build: Callable[[], tf.keras.Model], **options: Any
) -> models.PartialModel:
  return keras_models.from_keras(
    build, loss=tf.keras.losses.MeanSquaredError(), **options
  )


class Reads(layers.Layer):
  """Sums up what a table holds of some ids."""

  def __init__(
    self, read: Callable[[Any, tf.Tensor, bool], tf.Tensor], **options: Any
  ):
    super().__init__(**options)
    self._read = read

  def build(self, input_shape: Any) -> None:
    self.table = self.add_weight('table', [_ROWS, 2])
    self.other = self.add_weight('other', [2, 1])

  def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
    found = self._read(self, inputs, training)
    return tf.matmul(tf.reshape(found, [-1, 2]), self.other)[:, 0]


def _reading(
  read: Callable[[Any, tf.Tensor, bool], tf.Tensor], **input_options: Any
) -> models.PartialModel:
  def build() -> tf.keras.Model:
    ids = tf.keras.Input([], dtype=tf.int32)
    return tf.keras.Model(ids, Reads(read, name='reads')(ids))

  return _model(build)


def _looked_up(layer: Any, ids: tf.Tensor, training: bool) -> tf.Tensor:
  del training
  return tf.nn.embedding_lookup(layer.table, ids)


def _asserting(layer: Any, ids: tf.Tensor, training: bool) -> tf.Tensor:
  # Padding, which nobody looks up, is zero.
  with tf.control_dependencies([tf.debugging.assert_positive(ids)]):
    return _looked_up(layer, tf.identity(ids), training)


@pytest.mark.parametrize(
  'read',
  [
    _looked_up,
    _asserting,
    lambda layer, ids, _: tf.gather(layer.table, ids % 7),
    lambda layer, ids, _: (
      tf.gather(layer.table, ids) + tf.gather(layer.table, ids // 2, axis=0)
    ),
  ],
)
def test_a_table_that_is_looked_up_is_trained_by_rows(read):
  assert lookups.Tables(_reading(read), _WORK).names == ('reads/table',)


@pytest.mark.parametrize(
  'read',
  [
    lambda layer, ids, _: (
      _looked_up(layer, ids, _) + tf.reduce_sum(layer.table)
    ),
    lambda layer, ids, training: (
      _looked_up(layer, ids, training)
      + (0.0 if training else tf.reduce_sum(layer.table))
    ),
    lambda layer, ids, _: _looked_up(
      layer, ids + tf.cast(layer.other[0, 0], tf.int32), _
    ),
    lambda layer, ids, _: _looked_up(layer, tf.roll(ids, 1, 0), _),
    lambda layer, ids, _: _looked_up(
      layer, tf.argmax(_looked_up(layer, ids, _), -1), _
    ),
    lambda layer, ids, _: tf.map_fn(
      lambda one: tf.gather(layer.table, one), ids, tf.float32
    ),
  ],
)
def test_a_table_is_trained_as_a_whole_if_ids_do_not_tell_its_rows(read):
  assert lookups.Tables(_reading(read), _WORK).names == ()


def _regularized() -> tf.keras.Model:
  ids = tf.keras.Input([], dtype=tf.int32)
  table = layers.Embedding(9, 2, embeddings_regularizer='l2')(ids)
  return tf.keras.Model(ids, tf.reduce_sum(table, -1))


def _tied() -> tf.keras.Model:
  ids = tf.keras.Input([], dtype=tf.int32)
  table = layers.Embedding(9, 2)
  found = table(ids)
  return tf.keras.Model(
    ids, tf.matmul(found, table.embeddings, transpose_b=True)
  )


@pytest.mark.parametrize('build', [_regularized, _tied])
def test_a_table_that_is_used_otherwise_is_trained_as_a_whole(build):
  model = _model(build)
  assert not model.only_looked_up
  assert lookups.Tables(model, _WORK).names == ()


@pytest.fixture(scope='module', name='model')
def fixture_model():
  return planted.factorization()


@pytest.mark.parametrize(
  'changes',
  [
    {'optimizer': optimizers.build_sgdm(0.1, momentum=0.9)},
    {'optimizer': optimizers.build_adam(0.1)},
    {'terms': (terms.l2(0.1, tiers.GLOBAL),)},
    {'train': (tiers.LOCAL,)},
    {'train': (tiers.PERSONAL,)},
    {'variable_filter': 'user/.*'},
    {'max_steps': 0},
  ],
)
def test_a_table_is_trained_as_a_whole_if_more_than_its_rows_may_move(
  model, changes
):
  (phase,) = _WORK
  assert lookups.Tables(model, [phase]).names == ('items/embeddings',)
  changed = dataclasses.replace(phase, **changes)
  assert lookups.Tables(model, [changed]).names == ()
  # One phase is enough, unless it does not train the table.
  if (
    tiers.GLOBAL in changed.train
    and not changed.variable_filter
    and changed.max_steps
  ):
    assert lookups.Tables(model, [phase, changed]).names == ()


# ---- the same weights --------------------------------------------------------


def _text() -> tf.keras.Model:
  """Texts whose words are looked up in one of two tables, one of them twice."""
  words = tf.keras.Input([3], dtype=tf.int64)
  table = layers.Embedding(_ROWS, 2, mask_zero=True, name='words')
  both = table(words) + table(words // 2)
  both = layers.Dropout(0.3)(layers.LSTM(2, unroll=True)(both))
  first = layers.Embedding(11, 2, name='first')(words[:, 0] % 11)
  return tf.keras.Model(words, layers.Dense(1, name='user')(both + first)[:, 0])


def _without_input() -> tf.keras.Model:
  return tf.keras.Sequential(
    [
      layers.Embedding(_ROWS, 2, name='words'),
      layers.GlobalAveragePooling1D(),
      layers.Dense(1, name='user'),
      layers.Reshape([]),
    ]
  )


_WORDS = tf.TensorSpec([3], tf.int64)
_MODELS: dict[str, Callable[[], models.PartialModel]] = {
  'factorization': planted.factorization,
  'text': lambda: _model(_text, local='user'),
  'without input': lambda: _model(_without_input, local='user', inputs=_WORDS),
  'asserting': lambda: _reading(_asserting),
}


def _fields(model: models.PartialModel, count: int) -> planted.Fields:
  """Examples that look some rows up again and again."""
  draw = np.random.default_rng(count)
  return {
    name: draw.integers(1, largest, [count, *spec.shape]).astype(
      spec.dtype.as_numpy_dtype
    )
    for name, largest in (('x', 9), ('y', 3), ('weight', 3))
    for spec in [model.example_spec[name]]
  }


_IN_TURN = [
  Phase((tiers.LOCAL,), optimizer=optimizers.build_adam(0.1), batch_size=3),
  Phase(
    _BOTH,
    optimizer=sgd(0.1),
    batch_size=4,
    epochs=2,
    shuffle=True,
    measured=True,
  ),
]


def _client(
  model: models.PartialModel, by_rows: bool, jit: bool = False
) -> Client:
  """Trains with tables by rows or as a whole."""
  tables = lookups.Tables(model, _IN_TURN) if by_rows else None
  return Client(model, *_IN_TURN, tables=tables, jit=jit)


@pytest.fixture(scope='module', params=_MODELS, name='pair')
def fixture_pair(request):
  model = _MODELS[request.param]()
  return [_client(model, rows) for rows in (True, False)]


@pytest.mark.slow
def test_rows_end_as_in_the_whole_table(pair):
  by_rows, as_a_whole = pair
  for count in (13, 1, 0):
    fields = _fields(by_rows.model, count)
    done, wanted = by_rows(fields, 16), as_a_whole(fields, 16)
    assert done.changes
    assert not wanted.changes
    planted.assert_same({**vars(done), 'changes': {}}, vars(wanted))


@pytest.mark.slow
def test_xla_makes_the_same_of_rows(pair):
  by_rows, _ = pair
  jitted = _client(by_rows.model, True, jit=True)
  fields = _fields(by_rows.model, 13)
  done, wanted = jitted(fields, 16), by_rows(fields, 16)
  planted.assert_close(done.weights, wanted.weights)
  planted.assert_close(done.changes, wanted.changes)


@pytest.mark.slow
def test_padding_changes_no_row(pair):
  by_rows, _ = pair
  fields = _fields(by_rows.model, 13)
  one, other = by_rows(fields), by_rows(fields, 64)
  planted.assert_same(
    {**vars(one), 'changes': {}}, {**vars(other), 'changes': {}}
  )
  first, *_ = other.changes.values()
  assert not np.any(first.values[13 * 6 :])


# ---- what it costs -----------------------------------------------------------


@pytest.mark.slow
def test_a_client_reads_its_rows_and_no_more_of_a_table():
  def build() -> tf.keras.Model:
    item = tf.keras.Input([], dtype=tf.int32)
    vectors = layers.Embedding(_ROWS, 4, name='items')(item)
    return tf.keras.Model(item, planted.UserVector(name='user')(vectors))

  model = _model(build, local='user')

  def operations(by_rows: bool) -> list[str]:
    """Those of the compiled program that take or make a whole table."""
    train = _client(model, by_rows)

    def sent(*args: Any) -> Any:
      done = train.traced(*args)
      return done['changes'] or done['weights'], done['loss']

    compiled = tf.function(sent, jit_compile=True, autograph=False)
    arguments = train.arguments(_fields(model, 13), 16)
    text = compiled.experimental_get_compiler_ir(*arguments)('optimized_hlo')
    return [
      line.split(' = ')[1].split('(')[0].split(' ')[-1]
      for line in text.splitlines()
      if f'f32[{_ROWS},4]' in line and line.startswith(('  %', '  ROOT %'))
    ]

  assert sorted(operations(by_rows=True)) == ['gather', 'parameter']
  assert len(operations(by_rows=False)) > 10
