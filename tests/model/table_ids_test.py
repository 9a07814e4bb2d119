"""Which inputs are ids of a table's rows, and that packing knows."""

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tff_partial.data import client_readers
from tff_partial.data import cohorts
from tff_partial.data import examples
from tff_partial.data import id_ranges
from tff_partial.data import packing
from tff_partial.model import keras_models
from tff_partial.model import models

layers = tf.keras.layers


def _model(
  build: Callable[[], tf.keras.Model], **options: Any
) -> models.PartialModel:
  return keras_models.from_keras(
    build, **{'loss': tf.keras.losses.MeanSquaredError(), **options}
  )


# ---- what is found -----------------------------------------------------------


def _functional() -> tf.keras.Model:
  """Looks up in a trained and a frozen table, the latter with floats."""
  item = tf.keras.Input([], dtype=tf.int32, name='item')
  traits = tf.keras.Input([2], name='traits')
  first = layers.Embedding(5, 3, name='first')(traits[:, 0])
  rest = layers.Embedding(6, 3, trainable=False, name='rest')(traits[:, 1:])
  found = layers.Embedding(7, 3, name='items')(item) + first + rest[:, 0]
  return tf.keras.Model(
    {'item': item, 'traits': traits}, layers.Dense(1, name='head')(found)
  )


def _sequential() -> tf.keras.Model:
  return tf.keras.Sequential(
    [
      tf.keras.Input([4], dtype=tf.int64),
      layers.Embedding(9, 2, mask_zero=True, name='words'),
      layers.GlobalAveragePooling1D(),
      layers.Dense(1, name='head'),
    ]
  )


class _Subclassed(tf.keras.Model):
  """Looks up in several ways, and computes some ids."""

  def __init__(self, look_up: Callable[[Any, tf.Tensor], tf.Tensor]):
    super().__init__()
    self.table = self.add_weight('table', [8, 2])
    self.embedding = layers.Embedding(4, 2)
    self.look_up = look_up

  def call(self, inputs: tf.Tensor) -> tf.Tensor:
    found = self.look_up(self, inputs)
    # So that each table is used.
    total = tf.reduce_sum(self.table) + tf.reduce_sum(self.embedding(0))
    return tf.reduce_sum(tf.reshape(found, [-1, 2]), -1) + total


_SUBCLASSED = {'inputs': tf.TensorSpec([], tf.int32)}


def _ranges(model: models.PartialModel) -> dict[str, list[tuple]]:
  return {
    path: [(limits.size, limits.elements) for limits in ranges]
    for path, ranges in model.example_spec.ids.items()
  }


@pytest.mark.parametrize(
  'tiers',
  [
    {'local': 'head'},
    {'local': 'items'},
    {'local': 'first', 'group': 'items', 'num_groups': 2},
  ],
)
def test_tables_of_all_tiers_are_looked_up(tiers):
  assert _ranges(_model(_functional, **tiers)) == {
    'x.item': [(7, None)],
    'x.traits': [(5, (0,)), (6, (1,))],
  }


def test_sequences_of_ids_are_looked_up():
  assert _ranges(_model(_sequential)) == {'x': [(9, None)]}


@pytest.mark.parametrize(
  ('look_up', 'found'),
  [
    (lambda m, ids: tf.nn.embedding_lookup(m.table, ids), [(8, None)]),
    (lambda m, ids: tf.gather(m.table, ids), [(8, None)]),
    (lambda m, ids: tf.gather(m.table, tf.cast(ids, tf.int64)), [(8, None)]),
    (lambda m, ids: tf.gather(m.table, ids[:, None])[:, 0], [(8, None)]),
    (lambda m, ids: m.embedding(tf.reshape(ids, [-1])), [(4, None)]),
    (
      lambda m, ids: tf.gather(m.table, ids) + m.embedding(ids),
      [(8, None), (4, None)],
    ),
    # Computed ids are none of the examples', and may be right.
    (lambda m, ids: tf.gather(m.table, ids - 1), []),
    (lambda m, ids: tf.gather(m.table, ids % 8), []),
    (lambda m, ids: tf.gather(m.table, tf.clip_by_value(ids, 0, 7)), []),
    (lambda m, ids: tf.gather(m.table, tf.maximum(ids, 0)), []),
    (
      lambda m, ids: tf.gather(
        m.table, tf.cast(tf.cast(ids, tf.bool), 'int32')
      ),
      [],
    ),
    # It is no row that is looked up.
    (lambda m, ids: tf.gather(m.table, ids % 2, axis=1), []),
    (lambda m, ids: tf.one_hot(ids, 2), []),
  ],
)
def test_ids_are_those_that_are_looked_up_as_they_are(look_up, found):
  model = _model(lambda: _Subclassed(look_up), **_SUBCLASSED)
  ranges = _ranges(model).get('x', [])
  assert sorted(ranges) == sorted(found)


# ---- what is done with it ----------------------------------------------------


@pytest.fixture(scope='module', name='spec')
def fixture_spec() -> examples.ExampleSpec:
  return _model(_functional, local='head').example_spec


def _fields(item: Any = (0, 6), first: float = 4, rest: float = 5) -> dict:
  traits = np.array([[0, 0], [first, rest]], np.float32)
  return {
    'x': {'item': np.array(item), 'traits': traits},
    'y': np.zeros([2, 1]),
  }


def test_ids_within_the_tables_are_packed(spec):
  assert len(packing.pack({'ann': _fields()}, spec)) == 1
  # A fraction is cut off.
  assert len(packing.pack({'ann': _fields(first=4.9, rest=-0.9)}, spec)) == 1


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    (
      _fields(item=[-1, 0]),
      "Client 'ann', x.item: example 0 is -1, but table 'items' has 7 rows: "
      'ids are 0 to 6. Drop rows with missing values, which `cat.codes` makes',
    ),
    (
      _fields(item=[1, 7]),
      "x.item: example 1 is 7, but table 'items' has 7 rows: ids are 0 to 6. "
      'If ids start at 1, let them start at 0',
    ),
    (_fields(first=5), "x.traits: example 1 is 5.0, but table 'first' has 5"),
    (_fields(rest=6), "x.traits: example 1 is 6.0, but table 'rest' has 6"),
  ],
)
def test_ids_outside_of_the_tables_are_refused(spec, fields, message):
  with pytest.raises(examples.ClientDataError, match=message):
    packing.pack({'ann': fields}, spec)
  reader = client_readers.Reader(['ann'], lambda _: fields, spec)
  with pytest.raises(examples.ClientDataError, match=message):
    reader.cohort(['ann'], np.zeros([1, 2], np.int32))


def _classifier(**options: Any) -> models.PartialModel:
  def build() -> tf.keras.Model:
    return tf.keras.Sequential([tf.keras.Input([2]), layers.Dense(3)])

  return _model(build, **options)


_SPARSE = tf.keras.losses.SparseCategoricalCrossentropy


@pytest.mark.parametrize(
  ('loss', 'labels', 'bad'),
  [
    (_SPARSE(from_logits=True), [0, 2], None),
    (_SPARSE(from_logits=True), [0, 3], 3),
    (_SPARSE(from_logits=True), [1, -1], -1),
    ('sparse_categorical_crossentropy', [1, 3], 3),
    (_SPARSE(ignore_class=-1), [1, -1], None),
    (_SPARSE(ignore_class=-1), [1, -2], -2),
  ],
)
def test_labels_are_classes_that_the_model_predicts(loss, labels, bad):
  spec = _classifier(loss=loss).example_spec
  fields = {'x': np.zeros([2, 2]), 'y': labels}
  if bad is None:
    assert len(packing.pack({'ann': fields}, spec)) == 1
    return
  with pytest.raises(
    examples.ClientDataError,
    match=f"Client 'ann', y: example 1 is {bad}, but the model predicts 3 "
    'classes: ids are 0 to 2',
  ):
    packing.pack({'ann': fields}, spec)


@pytest.mark.parametrize('bad', [-1, 2, -0.5, 1.5])
@pytest.mark.parametrize(
  'loss',
  [
    'binary_crossentropy',
    tf.keras.losses.BinaryFocalCrossentropy(from_logits=True),
  ],
)
def test_binary_labels_are_0_and_1(loss, bad):
  spec = _classifier(loss=loss).example_spec
  fields = {'x': np.zeros([2, 2]), 'y': np.array([[0, 0.5, 1], [0, bad, 1]])}
  with pytest.raises(
    examples.ClientDataError,
    match=f'y: example 1 is {bad}.*tells two classes apart.*0 for one and 1',
  ):
    packing.pack({'ann': fields}, spec)
  fields['y'][1, 1] = 1
  packing.pack({'ann': fields}, spec)


def test_clients_of_another_model_are_refused(spec):
  population = packing.pack({'ann': _fields(), 'bob': _fields([3, 1])}, spec)
  population.check(spec)
  smaller = examples.ExampleSpec(spec, {'x.item': (id_ranges.IdRange(3, 'T'),)})
  with pytest.raises(
    examples.ClientDataError,
    match="x.item: example 1 of client 'ann' is 6, but",
  ):
    population.check(smaller)
  with pytest.raises(examples.ClientDataError, match="of client 'ann' is 6"):
    cohorts.check(cohorts.SomeClients(population, ('ann',)), smaller)
  larger = examples.ExampleSpec(spec, {'x.item': (id_ranges.IdRange(9, 'T'),)})
  population.check(larger)
  reader = client_readers.Reader(['ann', 'ann'], lambda _: _fields(), spec)
  with pytest.raises(
    examples.ClientDataError, match="2 clients have the id 'ann'"
  ):
    reader.check(spec)
  reader = client_readers.Reader(['ann'], lambda _: _fields(), spec)
  cohorts.check(reader, spec)
  with pytest.raises(examples.ClientDataError, match='with other ids'):
    cohorts.check(reader, smaller)
  # Of examples that were described by hand no ids are known.
  by_hand = collections.OrderedDict(spec)
  cohorts.check(
    client_readers.Reader(['ann'], lambda _: _fields(), by_hand), spec
  )
