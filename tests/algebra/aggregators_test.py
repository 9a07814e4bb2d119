"""Means to which clients add rows: as TFF's, which add whole tables."""

import collections
import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import planted
from tff_partial import aggregators
from tff_partial import client_state
from tff_partial import composition
from tff_partial import processes
from tff_partial import runtimes
from tff_partial import tiers
from tff_partial.composition import Aggregation
from tff_partial.data import examples
from tff_partial.data import packing
from tff_partial.joins.row_aggregations import SumOfRowsFactory
from tff_partial.phases import Phase
from tff_partial.phases import sgd

_TABLE = 'items/embeddings'
# More clients than one shard takes, with more or fewer ratings than items.
_CLIENTS = planted.rate({f'{n}': 1 + n % 40 for n in range(40)})
_FACTORIES = {
  'mean': (
    aggregators.MeanFactory,
    functools.partial(tff.aggregators.MeanFactory, no_nan_division=True),
  ),
  'robust': (aggregators.robust, tff.learning.robust_aggregator),
}


class Spy(aggregators.MeanFactory):
  """Remembers what it was created for."""

  value_type: Any = None

  def create_by_rows(self, value_type: Any, *types: Any) -> Any:
    self.value_type = value_type
    return super().create_by_rows(value_type, *types)


# ---- alone -------------------------------------------------------------------


def _type(dtype: Any, *shape: int | None) -> tff.Type:
  return tff.TensorType(dtype, shape)


def _nested(**named: Any) -> tff.Type:
  inner = collections.OrderedDict(named)
  return tff.to_type(collections.OrderedDict({tiers.GLOBAL: inner}))


def test_mean_of_rows_by_hand():
  mean = aggregators.MeanFactory().create_by_rows(
    _nested(table=_type(np.float32, None, 1), bias=_type(np.float32)),
    _type(np.float32),
    _nested(table=_type(np.int32, None)),
    _nested(table=_type(np.float32, 4, 1), bias=_type(np.float32)),
  )

  def value(rows: list[float], bias: float) -> Any:
    table = np.array(rows, np.float32)[:, None]
    return {tiers.GLOBAL: {'table': table, 'bias': np.float32(bias)}}

  def weight(number: float, ids: list[int]) -> Any:
    table = np.array(ids, np.int32)
    return {
      'weight': np.float32(number),
      'ids': {tiers.GLOBAL: {'table': table}},
    }

  with runtimes.native():
    output = mean.next(
      mean.initialize(),
      # The second client's row 2 stands there twice.
      [value([4.0, 8.0], 1.0), value([1.0, 2.0, 0.0], 2.0)],
      [weight(1.0, [0, 2]), weight(3.0, [2, 3, 2])],
    )
    result = output.result[tiers.GLOBAL]
    # Row 2 is (1 * 8 + 3 * 1) / 4.
    np.testing.assert_allclose(
      result['table'][:, 0], [1.0, 0.0, 11.0 / 4.0, 6.0 / 4.0]
    )
    np.testing.assert_allclose(result['bias'], 7.0 / 4.0)
    nothing = mean.next(output.state, [value([5.0], 6.0)], [weight(0.0, [1])])
    assert not np.any(nothing.result[tiers.GLOBAL]['table'])
    assert not nothing.result[tiers.GLOBAL]['bias']


# ---- in a round --------------------------------------------------------------


@pytest.mark.parametrize(
  'runtime',
  [runtimes.native, runtimes.cohort, lambda: runtimes.cohort(jit=False)],
)
def test_sums_of_rows_by_hand(runtime):
  draw = np.random.default_rng(0)
  sent = [
    {
      'ids': draw.integers(0, 4, number).astype(np.int32),
      'weights': draw.integers(0, 9, [number, 2]).astype(np.float32),
      'parts': draw.integers(0, 9, [2, 3]).astype(np.float32),
    }
    for number in (5, 1, 0, 7)
  ]
  process = SumOfRowsFactory(6).create(
    tff.to_type(
      collections.OrderedDict(
        ids=_type(np.int32, None),
        weights=_type(np.float32, None, 2),
        parts=_type(np.float32, 2, 3),
      )
    )
  )
  wanted = np.zeros([6, 3])
  for client in sent:
    np.add.at(wanted, client['ids'], client['weights'] @ client['parts'])
  with runtime():
    state = process.initialize()
    for _ in range(2):  # Adding in place leaves the zeros of a round alone.
      found = process.next(state, sent).result
      np.testing.assert_array_equal(found, wanted)


@pytest.fixture(scope='module', name='model')
def fixture_model():
  return planted.factorization()


def _compose(model: Any, aggregator: Any) -> processes.PartialProcess:
  return composition.compose(
    model,
    work=[
      Phase(
        (tiers.GLOBAL, tiers.LOCAL),
        optimizer=sgd(0.1),
        epochs=2,
        batch_size=4,
        measured=True,
      )
    ],
    client_state=client_state.persist_local,
    aggregation=Aggregation(aggregator=aggregator),
  )


@pytest.fixture(scope='module', name='pairs')
def fixture_pairs(model):
  """A process with our aggregator and with TFF's, and what that makes."""
  pairs = {}
  for name, (ours, theirs) in _FACTORIES.items():
    reference = _compose(model, theirs())
    wanted = _two_rounds(reference, runtimes.native())
    pairs[name] = _compose(model, ours()), reference, wanted
  return pairs


@pytest.fixture(scope='module', params=_FACTORIES, name='pair')
def fixture_pair(request, pairs):
  return pairs[request.param]


@pytest.fixture(scope='module', name='process')
def fixture_process(model):
  return _compose(model, None)


def _two_rounds(
  process: processes.PartialProcess,
  context: Any,
  clients: Any = _CLIENTS,
  **options: Any,
) -> processes.PartialProcessOutput:
  with context:
    cohort = planted.cohort_of(process, clients, 'seed', **options)
    output = planted.run(process, cohort)
    return planted.run(process, cohort, output.state)


@pytest.mark.slow
def test_only_rows_are_sent_to_a_mean_that_takes_them(model):
  spy = Spy()
  _compose(model, spy)
  (sent,) = spy.value_type[tiers.GLOBAL]
  assert sent == _type(np.float32, None, planted.NUM_FACTORS)


@pytest.mark.slow
def test_types_are_those_with_tffs_aggregator(pair):
  ours, theirs, _ = pair
  assert ours.next.type_signature.is_equivalent_to(theirs.next.type_signature)


@pytest.mark.slow
def test_a_round_is_as_with_tffs_aggregator(pair):
  ours, _, wanted = pair
  planted.assert_same(_two_rounds(ours, runtimes.native()), wanted)


@pytest.fixture(scope='module', params=[False, True], name='jit')
def fixture_jit(request):
  return request.param


@pytest.fixture(scope='module', name='runtime')
def fixture_runtime(jit):
  return runtimes.cohort(jit=jit, threads=2)


@pytest.mark.slow
def test_the_cohort_runtime_makes_the_same_of_rows(pair, runtime):
  ours, _, wanted = pair
  planted.assert_close(
    _two_rounds(ours, runtime).state.global_model_weights,
    wanted.state.global_model_weights,
  )


@pytest.mark.slow
def test_an_id_that_the_table_lacks_is_an_error(process):
  outside = {'x': np.array([planted.NUM_ITEMS]), 'y': np.zeros([1], np.float32)}
  clients = {'outside': outside}
  with pytest.raises(examples.ClientDataError, match='0 is 29, but table'):
    packing.pack(clients, process.example_spec)
  # Whoever packs without knowing the tables is told when they are read.
  plain = collections.OrderedDict(process.example_spec)
  cohort = packing.pack(clients, plain).cohort(
    ['outside'], np.zeros([1, 2], np.int32)
  )
  for jit in (False, True):
    with (
      runtimes.cohort(jit=jit),
      pytest.raises(Exception, match=r'29 is not in \[0, 29\)'),
    ):
      planted.run(process, cohort)


@pytest.mark.slow
def test_a_table_with_a_regularizer_is_sent_as_a_whole():
  def build() -> tf.keras.Model:
    item = tf.keras.Input([], dtype=tf.int32)
    vectors = tf.keras.layers.Embedding(
      planted.NUM_ITEMS, 2, embeddings_regularizer='l2', name='items'
    )(item)
    return tf.keras.Model(item, planted.UserVector(name='user')(vectors))

  spy = Spy()
  process = _compose(planted.factorization(build), spy)
  assert spy.value_type is None
  clients = planted.rate({'one': 3})
  with runtimes.native():
    weights = planted.before_and_after(process, clients, 's')
  # Rows that nobody looked up shrink, too: twice, by 2 * 0.01 * 0.1.
  before, after = (
    np.delete(named[_TABLE], clients['one']['x'], 0) for named in weights
  )
  np.testing.assert_allclose(after, before * 0.998**2, rtol=1e-5)
