"""Laws of the cohort runtime, over computations that are not ours.

The first law: whatever the computation, the numbers are those of the native
runtime. Clients fewer than a shard's worth run in one loop, in cohort order,
and then the bits are equal, too, unless XLA is used.
"""

import asyncio
import collections
from collections.abc import Callable
import concurrent.futures
import functools
import json
import pathlib
import pickle
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import planted
from tests.support.computations import mapped
from tests.support.computations import summed
import tff_partial
from tff_partial.data.cohorts import Cohort
from tff_partial.data.cohorts import CohortGroup
from tff_partial.runtimes import cohort
from tff_partial.runtimes import errors
from tff_partial.runtimes.cohort_runtime import compiled_loop
from tff_partial.runtimes.cohort_runtime import jit_autotuning as choices_lib
from tff_partial.runtimes.cohort_runtime import rounds
from tff_partial.runtimes.values import client_batch

_FEW = 5  # One shard.
_MANY = 100  # Several shards.

aggregators = tff.aggregators


def _at_clients(type_spec, **kwargs):
  return tff.FederatedType(type_spec, tff.CLIENTS, **kwargs)


def _at_server(type_spec):
  return tff.FederatedType(type_spec, tff.SERVER)


# ---- computations ------------------------------------------------------------


@tff.federated_computation(_at_clients(np.float32))
def _dependent(values):
  """Three waves: the mean, the variance around it, the scores they give."""

  @tff.tensorflow.computation
  def square(value, mean):
    return (value - mean) ** 2

  @tff.tensorflow.computation
  def score(value, mean, variance):
    return (value - mean) / tf.sqrt(variance + 1.0)

  mean = tff.federated_mean(values)
  everywhere = tff.federated_broadcast(mean)
  variance = tff.federated_mean(tff.federated_map(square, (values, everywhere)))
  scores = tff.federated_map(
    score, (values, everywhere, tff.federated_broadcast(variance))
  )
  return collections.OrderedDict(
    mean=mean,
    scores=scores,
    largest=tff.federated_max(scores),
    smallest=tff.federated_min(scores),
    everywhere=everywhere,
  )


@tff.federated_computation(
  _at_clients(np.int32),
  _at_server(np.str_),
  _at_clients(np.int32, all_equal=True),
)
def _strings(numbers, name, same):
  """Strings and integers, at the server and at clients."""

  @tff.tensorflow.computation
  def label(name, number):
    return tf.strings.join([name, tf.strings.as_string(number)])

  labels = tff.federated_map(label, (tff.federated_broadcast(name), numbers))
  total = tff.federated_sum(numbers)
  return tff.federated_map(label, (name, total)), labels, same, name, numbers


@tff.federated_computation(_at_clients(np.float32), _at_clients(np.float32))
def _weighted(values, weights):
  return tff.federated_mean(values, weights), tff.federated_sum(weights)


_ROWS = collections.OrderedDict(
  rows=tff.TensorType(np.float32, [None, 2]), scale=np.int32
)


@tff.federated_computation(_at_clients(_ROWS))
def _open_shapes(clients):
  """Clients with different numbers of rows; what they return differs, too."""

  @tff.tensorflow.computation
  def total(client):
    return tf.reduce_sum(client['rows'], 0) * tf.cast(
      client['scale'], tf.float32
    )

  @tff.tensorflow.computation
  def double(client):
    return client['rows'] * 2.0

  return (
    tff.federated_sum(tff.federated_map(total, clients)),
    tff.federated_map(double, clients),
  )


# What a client returns has a shape that depends on its data.
_distinct = mapped(
  lambda client: tf.unique(client)[0], tff.TensorType(np.int32, [None])
)


@tff.federated_computation(_at_clients(tff.TensorType(np.int32, [None])))
def _distinct_and_later(clients):
  """A result of such a shape, which is read after an aggregate, too."""
  unique = tff.tensorflow.computation(lambda client: tf.unique(client)[0])
  size = tff.tensorflow.computation(lambda values: tf.size(values))

  @tff.tensorflow.computation
  def missing(values, most):
    return most - tf.size(values)

  values = tff.federated_map(unique, clients)
  most = tff.federated_max(tff.federated_map(size, values))
  lacking = tff.federated_map(missing, (values, tff.federated_broadcast(most)))
  return values, clients, lacking, tff.federated_sum(lacking)


@tff.tensorflow.computation(np.float32)
def _unplaced(x):
  return collections.OrderedDict(b=x + 1.0, a=[x, (x, -x)])


@tff.federated_computation
def _no_argument():
  number = tff.tensorflow.computation(lambda: tf.constant([1, 2]))
  return tff.federated_eval(number, tff.SERVER), tff.federated_value(
    3.5, tff.SERVER
  )


# ---- their arguments, and the table ------------------------------------------

_VECTORS = tff.to_type([(np.float32, (3, 2)), (np.float32, (4,))])
_INTEGERS = tff.TensorType(np.int32, (5,))


def _vectors(size: int, seed: int) -> list[Any]:
  generator = np.random.default_rng(seed)
  return [
    [
      generator.normal(size=shape).astype(np.float32)
      for shape in ((3, 2), (4,))
    ]
    for _ in range(size)
  ]


def _integers(size: int, seed: int) -> list[Any]:
  generator = np.random.default_rng(seed)
  return [generator.integers(0, 9, (5,)).astype(np.int32) for _ in range(size)]


def _floats(size: int) -> list[np.float32]:
  return [np.float32(number**1.5) for number in range(size)]


def _rows(size: int) -> list[Any]:
  return [
    collections.OrderedDict(
      rows=np.full([1 + number % 3, 2], number, np.float32), scale=number
    )
    for number in range(size)
  ]


class _Aggregation:
  """Two rounds of an aggregator."""

  def __init__(self, factory, type_spec=_VECTORS, values=_vectors):
    if isinstance(factory, aggregators.WeightedAggregationFactory):
      self._process = factory.create(type_spec, tff.TensorType(np.float32))
    else:
      self._process = factory.create(type_spec)
    self._values = values

  def __call__(self, size: int) -> list[Any]:
    state = self._process.initialize()
    outputs = []
    for number in range(2):
      arguments = [self._values(size, number)]
      if self._process.is_weighted:
        arguments.append([np.float32(1 + i % 3) for i in range(size)])
      output = self._process.next(state, *arguments)
      state = output.state
      outputs.append(output)
    return outputs


def _robust():
  return tff.learning.robust_aggregator()


def _clipped():
  return aggregators.zeroing_factory(
    2.0, aggregators.clipping_factory(1.0, aggregators.MeanFactory())
  )


def _private():
  return aggregators.DifferentiallyPrivateFactory.gaussian_fixed(0.0, 3.0, 1.0)


def _repeated(size: int) -> list[np.ndarray]:
  return [np.arange(8, dtype=np.int32) // (1 + i % 3) for i in range(size)]


_AGGREGATORS: dict[str, Callable[[], Any]] = {
  'mean': aggregators.MeanFactory,
  'unweighted_mean': aggregators.UnweightedMeanFactory,
  'sum': aggregators.SumFactory,
  'robust': _robust,
  'clipped_and_zeroed': _clipped,
  'private_without_noise': _private,
  'concatenated': lambda: aggregators.concat_factory(aggregators.MeanFactory()),
  'compressed': tff.learning.compression_aggregator,
  'measured': lambda: tff.learning.add_debug_measurements(
    aggregators.MeanFactory()
  ),
}
_CALLS: dict[str, Callable[[int], Any]] = {
  'dependent': lambda size: _dependent(_floats(size)),
  'weighted': lambda size: _weighted(_floats(size), _floats(size)),
  'strings': lambda size: _strings(list(range(size)), 'ab', 7),
  'open_shapes': lambda size: _open_shapes(_rows(size)),
  'distinct': lambda size: _distinct(_repeated(size)),
  'distinct_and_later': lambda size: _distinct_and_later(_repeated(size)),
  'unplaced': lambda size: _unplaced(size / 3.0),
}
_LAWFUL = (*_AGGREGATORS, *_CALLS)
_EMPTY_REFUSED_BY_NATIVE = ('dependent', 'strings')


class _Leaf(NamedTuple):
  path: str
  kind: str
  value: Any


def _leaves(value: Any, path: str = '') -> list[_Leaf]:
  """Every container and every leaf of a result, with its Python type."""
  if isinstance(value, client_batch.Columns):
    value = list(value)  # Natively, a list.
  named = isinstance(value, tff.structure.Struct | dict) or hasattr(
    type(value), '__attrs_attrs__'
  )
  if hasattr(value, '_asdict') or named:
    elements = tff.structure.to_elements(tff.structure.from_container(value))
  elif isinstance(value, list | tuple):
    elements = list(enumerate(value))
  else:
    kind = f'{type(value).__name__} {getattr(value, "dtype", "")}'
    return [_Leaf(path, kind, value)]
  found = [_Leaf(path, type(value).__name__, None)]
  for name, element in elements:
    found.extend(_leaves(element, f'{path}/{name}'))
  return found


def _assert_alike(actual: Any, expected: Any, tolerance: float = 0.0) -> None:
  """Same containers and types, and bits, or a small distance in norm."""
  actual, expected = _leaves(actual), _leaves(expected)
  assert [leaf[:2] for leaf in actual] == [leaf[:2] for leaf in expected]
  for one, other in zip(actual, expected, strict=True):
    if not tolerance or np.asarray(other.value).dtype.kind != 'f':
      np.testing.assert_array_equal(one.value, other.value, one.path)
    else:
      finite = np.isfinite(other.value)
      np.testing.assert_array_equal(np.isfinite(one.value), finite, one.path)
      distance = np.linalg.norm((one.value - other.value) * finite)
      norm = np.linalg.norm(np.where(finite, other.value, 0.0))
      assert distance <= tolerance * max(norm, 1.0), one.path


@pytest.fixture(scope='module')
def plain():
  return cohort(jit=False, threads=2, strict=True)


@pytest.fixture(scope='module')
def jitted():
  return cohort(jit=True, threads=2)


@pytest.fixture(scope='module')
def lawful():
  """The table's computations, each made once."""
  return functools.cache(
    lambda name: _CALLS.get(name) or _Aggregation(_AGGREGATORS[name]())
  )


# ---- equal to native ---------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize('name', _LAWFUL)
def test_one_shard_has_the_bits_of_the_native_runtime(
  name, lawful, natively, plain
):
  run = lawful(name)
  for size in (_FEW, 1, 0):
    with plain:
      actual = run(size)
    if size or name not in _EMPTY_REFUSED_BY_NATIVE:
      _assert_alike(actual, natively(run, size))


@pytest.mark.slow
@pytest.mark.parametrize('name', _LAWFUL)
def test_xla_and_shards_come_close_to_the_native_runtime(
  name, lawful, natively, jitted
):
  run = lawful(name)
  with jitted:
    _assert_alike(run(_MANY), natively(run, _MANY), tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['robust', 'dependent'])
def test_several_shards_without_xla_come_closer(name, lawful, natively, plain):
  run = lawful(name)
  with plain:
    _assert_alike(run(_MANY), natively(run, _MANY), tolerance=1e-6)


def test_a_computation_without_clients(plain):
  with plain:
    numbers, number = _no_argument()
  np.testing.assert_array_equal(numbers, [1, 2])
  assert number == np.float32(3.5)


@pytest.mark.parametrize('jit', [False, True])
def test_an_empty_cohort_has_sums_of_zero_and_no_client_results(jit):
  with cohort(jit=jit):
    result = _dependent([])
    total = _weighted([], [])
  assert result['scores'] == []
  assert np.isnan(result['mean']) and np.isnan(result['everywhere'])
  assert total[1] == 0.0


# ---- randomness and privacy --------------------------------------------------


@tff.federated_computation(_at_clients(np.float32))
def _noisy(values):
  """Each client draws once; two loops read what it drew."""
  draw = tff.tensorflow.computation(
    lambda value: value + tf.random.normal([1000])
  )
  drawn = tff.federated_map(draw, values)
  mean = tff.federated_mean(drawn)

  @tff.tensorflow.computation
  def distance(drawn, mean):
    return drawn - mean

  distances = tff.federated_map(
    distance, (drawn, tff.federated_broadcast(mean))
  )
  return drawn, mean, tff.federated_sum(distances)


@pytest.mark.parametrize('jit', [False, True, 'auto'])
def test_a_client_draws_once_a_round(jit):
  with cohort(jit=jit, threads=2) as context:
    drawn, mean, distances = _noisy([np.float32(0)] * 30)
    again, _, _ = _noisy([np.float32(0)] * 30)
  np.testing.assert_allclose(np.mean(drawn, 0), mean, atol=1e-5)
  np.testing.assert_allclose(distances, np.zeros(1000), atol=1e-3)
  draws = np.concatenate([drawn, again])
  assert len(np.unique(draws[:, 0])) == 60
  assert abs(draws.mean()) < 0.05 and abs(draws.std() - 1.0) < 0.05
  assert not any(
    chosen for name, chosen in context.choices.items() if name.endswith('/0')
  )


def test_private_noise_has_the_right_size(plain):
  clip, multiplier, clients = 3.0, 2.0, 10.0
  factory = aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
    multiplier, clients, clip
  )
  size = 4000
  process = factory.create(tff.TensorType(np.float32, [size]))
  values = [np.zeros(size, np.float32)] * int(clients)
  with plain:
    state = process.initialize()
    one = process.next(state, values).result
    other = process.next(state, values).result
  expected = multiplier * clip / clients
  assert abs(one.std() / expected - 1.0) < 0.1 and abs(one.mean()) < expected
  assert not np.array_equal(one, other)


def _insecure(computation):
  return tff.backends.test.replace_secure_intrinsics_with_bodies(computation)


_SECURE = {
  'sum': (aggregators.SecureSumFactory(100, 0), _INTEGERS, _integers),
  'modular': (aggregators.SecureModularSumFactory(8), _INTEGERS, _integers),
  'quantized': (tff.learning.secure_aggregator(), _VECTORS, _vectors),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', _SECURE)
def test_secure_sums_are_what_tff_computes_in_the_clear(name, natively, plain):
  factory, type_spec, values = _SECURE[name]
  if isinstance(factory, aggregators.WeightedAggregationFactory):
    process = factory.create(type_spec, tff.TensorType(np.float32))
    extra = [[np.float32(1)] * _FEW]
  else:
    process, extra = factory.create(type_spec), []
  arguments = [values(_FEW, 3), *extra]
  with plain:
    state = process.initialize()
    actual = process.next(state, *arguments)
  expected = natively(lambda: _insecure(process.next)(state, *arguments))
  # TFF's replacement forgets Python's containers.
  for one, other in zip(
    tf.nest.flatten(actual.result),
    tf.nest.flatten(expected['result']),
    strict=True,
  ):
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize('jit', [False, True])
def test_a_secure_sum_refuses_what_is_above_its_maximum(jit):
  @tff.federated_computation(_at_clients(np.int32))
  def total(values):
    return tff.federated_secure_sum(values, 10)

  @tff.federated_computation(_at_clients(np.int32))
  def narrow_total(values):
    return tff.federated_secure_sum_bitwidth(values, 4)

  with cohort(jit=jit):
    assert total([3, 10]) == 13
    assert narrow_total([15, 1]) == 16
    with pytest.raises(tf.errors.InvalidArgumentError, match='larger'):
      total([3, 11])
    with pytest.raises(tf.errors.InvalidArgumentError, match='larger'):
      narrow_total([16, 1])


def test_a_modular_sum_beyond_its_dtype_has_its_remainder():
  factory = tff.aggregators.SecureModularSumFactory(2**31 - 1)
  process = factory.create(tff.TensorType(np.int32))
  with cohort(jit=False):
    found = process.next(process.initialize(), [2**30] * 3).result
  assert (found, found.dtype) == (2**30 + 1, np.int32)


# ---- threads, shapes, feeding ------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize('jit', [False, True])
def test_the_number_of_threads_changes_no_bit(jit, lawful):
  results = []
  for threads in (1, 2, 4):
    with cohort(jit=jit, threads=threads):
      results.append([lawful('robust')(_MANY), lawful('dependent')(_MANY)])
  _assert_alike(results[1], results[0])
  _assert_alike(results[2], results[0])


def test_cohort_sizes_do_not_recompile():
  with cohort(jit=True, threads=2) as context:
    for size in (1, 3, 16, 17, 23):
      total, _ = _weighted(_floats(size), _floats(size))
    compiled = context.num_compiled
    for size in (2, 5, 7, 20, 22, 31, 40, 100, 190, 0):
      with np.errstate(invalid='ignore'):
        values = _floats(size)
        mean, total = _weighted(values, values)
        expected = np.average(values, weights=values) if size else np.nan
      np.testing.assert_allclose(total, np.sum(values), rtol=1e-5)
      np.testing.assert_allclose(mean, expected, rtol=1e-5)
  assert context.num_compiled == compiled == 1


def test_the_programs_called_last_are_kept(monkeypatch):
  monkeypatch.setattr(rounds, 'MOST_PROGRAMS', 2)

  programs = {factor: planted.scaled_sum(factor) for factor in (1.0, 2.0, 3.0)}
  with cohort(jit=False) as context:
    for factor, compiled in ((1, 1), (2, 2), (1, 2), (3, 3), (1, 3), (2, 4)):
      assert programs[factor]([1.0, 2.0]) == 3.0 * factor
      assert context.num_compiled == compiled


def _resident_cohort(size: int, residents: list[Any]) -> Cohort:
  """A cohort in which every third client has the longer rows."""
  positions = np.arange(size)
  groups = []
  for number, where in enumerate((positions % 3 != 1, positions % 3 == 1)):
    members = positions[where].astype(np.int32)
    groups.append(
      CohortGroup(
        resident=residents[number],
        rows=(7 * members % 50).astype(np.int32),
        positions=members,
        given=collections.OrderedDict(scale=members),
      )
    )
  return Cohort([f'client {i}' for i in range(size)], groups)


def _residents(seed: int) -> list[Any]:
  generator = np.random.default_rng(seed)
  return [
    collections.OrderedDict(
      rows=generator.normal(size=(50, length, 2)).astype(np.float32)
    )
    for length in (3, 8)
  ]


@pytest.mark.parametrize('jit', [False, True])
def test_groups_of_two_shapes_are_one_cohort(jit, natively):
  residents = _residents(0)
  with cohort(jit=jit, threads=2, strict=True) as context:
    for size in (_FEW, _MANY):
      clients = _resident_cohort(size, residents)
      total, doubled = _open_shapes(clients)
      expected = natively(_open_shapes, list(clients))
      _assert_alike(total, expected[0], tolerance=1e-5)
      # In cohort order, whatever the groups.
      _assert_alike(doubled, expected[1])
    assert context.num_compiled == 2


def test_resident_arrays_are_copied_once(monkeypatch):
  residents, copied = _residents(1), []
  constant = tf.constant

  def counting(value, *args, **kwargs):
    if getattr(value, 'shape', None) in {(64, 3, 2), (64, 8, 2)}:
      copied.append(value)
    return constant(value, *args, **kwargs)

  monkeypatch.setattr(tf, 'constant', counting)
  with cohort(jit=False):
    for size in (4, 6, 9):
      _open_shapes(_resident_cohort(size, residents))
  assert len(copied) == 2


# ---- client states -----------------------------------------------------------

_STATE = collections.OrderedDict(
  vectors=[(np.float32, [2]), (np.int32, [])], name=np.str_
)


def _change(state, value):
  """A client changes what it remembers by a value of its own."""
  vector, number = state['vectors']
  return collections.OrderedDict(
    vectors=[vector + value, number + 1], name=state['name'] + '!'
  )


_remember = mapped(_change, _STATE, np.float32)


def _states(size):
  return [
    collections.OrderedDict(
      vectors=[np.array([i, -i], np.float32), np.int32(10 * i)], name=f'c{i}'
    )
    for i in range(size)
  ]


def _stacked_states(size):
  numbers = np.arange(size)
  return collections.OrderedDict(
    vectors=[
      np.stack([numbers, -numbers], 1).astype(np.float32),
      (10 * numbers).astype(np.int32),
    ],
    name=np.array([f'c{i}' for i in range(size)], object),
  )


def _given(stacked, size) -> Cohort:
  """Client values that are new in every round, and nothing resident."""
  everybody = np.arange(size, dtype=np.int32)
  group = CohortGroup({}, np.zeros([size], np.int32), everybody, stacked)
  return Cohort([str(i) for i in range(size)], [group])


@pytest.mark.parametrize('size', [0, 1, _FEW, _MANY])
def test_client_states_may_come_and_go_in_columns(size, plain):
  with plain:
    expected = _remember(_states(size), _floats(size))
    states = _given(_stacked_states(size), size)
    actual = _remember(states, _floats(size))
    # What comes out may go in again.
    again = _remember(actual, _floats(size))
    _assert_alike(again, _remember(list(actual), _floats(size)))
  _assert_alike(actual, expected)
  assert len(actual) == size
  stacked = actual.stacked
  assert list(stacked) == ['vectors', 'name']
  vectors, numbers = stacked['vectors']
  assert vectors.shape == (size, 2) and vectors.dtype == np.float32
  np.testing.assert_array_equal(numbers, 10 * np.arange(size) + 1)
  assert list(stacked['name']) == [f'c{i}!'.encode() for i in range(size)]


def test_columns_are_a_sequence_of_values_of_their_own(plain):
  with plain:
    actual = _remember(_states(3), _floats(3))
    numbers = _strings([4, 5], 'ab', 7)[4]
  assert actual[-1]['name'] == actual[2]['name'] == b'c2!'
  assert [one['name'] for one in actual[1:]] == [b'c1!', b'c2!']
  with pytest.raises(IndexError):
    actual[3]
  with pytest.raises(ValueError, match='read-only'):  # It would be lost.
    actual[0]['vectors'][0][:] = 7.0
  np.testing.assert_array_equal(actual[0]['vectors'][0], [0.0, 0.0])
  assert numbers == [4, 5] and numbers != [4] and numbers != 4
  assert pickle.loads(pickle.dumps(numbers)) == [4, 5]
  assert repr(numbers) == repr(list(numbers))
  assert [3] + numbers + numbers == [3, 4, 5, 4, 5]
  assert tf.nest.map_structure(lambda a, b: a + b, numbers, numbers) == [8, 10]


def test_what_differs_in_shape_is_stacked_as_a_list(plain):
  halve = mapped(lambda rows: rows / 2.0, tff.TensorType(np.float32, [None, 2]))
  with plain:
    doubled = _open_shapes(_rows(4))[1]
    assert [len(rows) for rows in doubled.stacked] == [1, 2, 3, 1]
    again = halve(doubled)
  for one, rows in zip(again, _rows(4), strict=True):
    np.testing.assert_array_equal(one, rows['rows'])


@tff.federated_computation(
  _at_clients(collections.OrderedDict()), _at_clients(np.float32)
)
def _forgetful(states, values):
  return states, tff.federated_sum(values)


def test_of_states_without_leaves_only_the_number_counts(plain):
  nothing = collections.OrderedDict()
  with plain:
    for states in ([nothing] * 3, _given({}, 3), Cohort(['a', 'b', 'c'], [])):
      kept, total = _forgetful(states, [1.0, 2.0, 3.0])
      assert kept == [nothing] * 3 and kept.stacked == nothing
      assert total == 6.0
    with pytest.raises(errors.CohortSizeError, match='argument.0 has 2'):
      _forgetful([nothing] * 2, [1.0])
    with pytest.raises(errors.ArgumentError, match='client 0.*fields'):
      _forgetful([{'a': 1}], [1.0])


def test_columns_of_another_length_are_refused(plain):
  with plain:
    with pytest.raises(
      errors.ArgumentError, match=r'argument\.0.*of 2 clients.*\[3, 2\]'
    ):
      _remember(_given(_stacked_states(3), 2), _floats(2))


# ---- choosing ----------------------------------------------------------------


@pytest.mark.slow
def test_a_measured_run_has_the_bits_of_its_choice(lawful):
  with cohort(jit='auto') as context:
    measured = lawful('robust')(_MANY)
  choices = json.loads(json.dumps(context.choices))
  assert len(set(choices.values())) == 1
  with cohort(jit=next(iter(choices.values()))):
    forced = lawful('robust')(_MANY)
  with cohort(jit='auto', choices=choices) as resumed:
    repeated = lawful('robust')(_MANY)
  _assert_alike(measured, forced)
  _assert_alike(measured, repeated)
  assert resumed.choices == choices


@pytest.mark.parametrize('jit', [False, True])
def test_choices_say_what_ran_even_against_earlier_ones(jit):
  with cohort(jit=jit) as first:
    _weighted(_floats(_FEW), _floats(_FEW))
  told = dict.fromkeys(first.choices, not jit)
  with cohort(jit=jit, choices=told) as context:
    _weighted(_floats(_FEW), _floats(_FEW))
  assert [*context.choices.values()] == [jit] * len(told) and told


def test_a_choice_holds_for_all_shapes_of_a_loop(monkeypatch):
  # What is measured first is the slower of two, and nothing else is measured.
  seconds = iter([2.0, 1.0])
  monkeypatch.setattr(
    choices_lib.Chooser, '_seconds', lambda self, run: next(seconds)
  )
  shapes = [_rows(1), _rows(3)[1:2], _rows(3)[2:3]]
  with cohort(jit='auto') as context:
    sums = [_total_rows(shape) for shape in shapes]
  assert list(context.choices.values()) == [False]
  # A run that goes on from there may meet other clients first.
  with cohort(jit='auto', choices=context.choices) as resumed:
    again = [_total_rows(shape) for shape in reversed(shapes)]
  np.testing.assert_array_equal(again[::-1], sums)
  assert context.num_compiled == resumed.num_compiled == 3
  assert context.choices == resumed.choices
  assert not list(seconds)


_total_rows = summed(lambda client: tf.reduce_sum(client['rows'], 0), _ROWS)


def _convolved(image):
  kernel = tf.ones([3, 3, 1, 1])
  with tf.GradientTape() as tape:
    tape.watch(kernel)
    loss = tf.reduce_sum(tf.nn.conv2d(image, kernel, 1, 'VALID') ** 2)
  return tape.gradient(loss, kernel)


_CONVOLVED = (
  summed(_convolved, (np.float32, [1, 6, 6, 1])),
  [np.ones([1, 6, 6, 1], np.float32)] * 2,
)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('computation', 'values', 'seconds', 'is_tried'),
  [
    (*_CONVOLVED, 1.0, False),
    (*_CONVOLVED, 1e-3, True),
    (_total_rows, _rows(3)[1:], 1.0, True),
  ],
  ids=['long convolutions', 'short convolutions', 'no convolutions'],
)
def test_xla_is_not_tried_for_long_convolutions_on_a_cpu(
  computation, values, seconds, is_tried, monkeypatch
):
  tried = []

  def run(self, inputs, jit):
    tried.append(jit)
    return really_run(self, inputs, jit)

  really_run = compiled_loop.CompiledLoop.run
  monkeypatch.setattr(compiled_loop.CompiledLoop, 'run', run)
  monkeypatch.setattr(
    choices_lib.Chooser, '_seconds', lambda self, run: seconds
  )
  monkeypatch.setattr(tf.config, 'list_physical_devices', lambda kind: [])
  with cohort(jit='auto', threads=1) as context:
    measured = computation(values)
  assert (True in tried) == is_tried
  assert list(context.choices.values()) == [is_tried]
  with cohort(jit=is_tried):
    np.testing.assert_array_equal(measured, computation(values))
  tried.clear()
  # Who was told that XLA compiles it does as told.
  told = dict.fromkeys(context.choices, True)
  with cohort(jit='auto', threads=1, choices=told):
    computation(values)
  assert tried[0] is True


@pytest.mark.parametrize('jit', [0, 1])
def test_zero_and_one_are_false_and_true(jit):
  with cohort(jit=jit) as context:
    _total_rows(_rows(3))
  assert [*context.choices.values()] == [bool(jit)]
  assert not context._chooser.is_undecided('any')
  assert context._chooser._jit is bool(jit)


def test_the_names_of_a_named_tuple_count_not_its_order():
  pair = tff.StructType([('x', np.int32), ('y', np.int32)])
  swapped = collections.namedtuple('swapped', 'y x')
  other = collections.namedtuple('other', 'x z')
  first = tff.tensorflow.computation(lambda both: both['x'], pair)
  with cohort(jit=False):
    assert first(swapped(y=1, x=2)) == 2
    with pytest.raises(errors.ArgumentError, match=r"fields \['x', 'z'\]"):
      first(other(x=1, z=2))


@pytest.mark.slow
def test_a_process_that_is_built_again_has_the_same_choices():
  names = []
  for _ in range(2):
    # Whatever is traced before changes the names of functions in graphs.
    tf.function(lambda: tf.constant(1)).get_concrete_function()
    with cohort(jit=True) as context:
      _Aggregation(_robust())(_FEW)
    names.append(list(context.choices))
  assert names[0] == names[1]


# ---- other forms for XLA -----------------------------------------------------


def _shrink(x):
  """Halves what is large, and negates it; an inverse that may be infinite."""
  return tf.cond(
    tf.reduce_max(x) > 1.0,
    lambda: (x / 2.0, -tf.cast(tf.size(x), tf.int32)),
    lambda: (1.0 / x, tf.constant(7)),
  )


def test_a_choice_is_what_the_conditional_would_be():
  shrink = mapped(_shrink, (np.float32, [3]))
  # The first client has no finite inverse, and needs none.
  values = [np.array(v, np.float32) for v in ([2, 0, 4], [0.5, 1, 0.25])]
  with cohort(jit=True) as context:
    (large, marked), (small, unmarked) = shrink(values)
    np.testing.assert_array_equal(large, [1.0, 0.0, 2.0])
    np.testing.assert_array_equal(small, [2.0, 1.0, 4.0])
    assert (marked, unmarked) == (-3, 7)
  assert list(context.choices.values()) == [True]


@pytest.mark.slow
@pytest.mark.parametrize('size', [4095, 4096, 4099, 32768, 300_001])
def test_large_reductions_are_what_they_were(size):
  def each(x):
    return collections.OrderedDict(
      sum=tf.reduce_sum(x),
      mean=tf.reduce_mean(x),
      largest=tf.reduce_max(x),
      smallest=tf.reduce_min(x),
      half=tf.nn.l2_loss(x),
      all=tf.reduce_all(x > 0.0),
      any=tf.reduce_any(x > 0.0),
    )

  # Whole numbers: their sums are exact in any order.
  x = np.random.default_rng(size).integers(-9, 9, size).astype(np.float32)
  x[-1], x[size // 2] = 20.0, -20.0
  with cohort(jit=True):
    (found,) = mapped(each, (np.float32, [size]))([x])
  assert found['sum'] == x.sum() and found['half'] == np.square(x).sum() / 2
  np.testing.assert_allclose(found['mean'], x.mean(dtype=np.float64), rtol=1e-5)
  assert (found['largest'], found['smallest']) == (20.0, -20.0)
  assert (found['all'], found['any']) == (False, True)


# ---- what is refused ---------------------------------------------------------


_sequences = summed(
  lambda values: values.reduce(0.0, lambda old, new: old + tf.reduce_sum(new)),
  tff.SequenceType(tff.TensorType(np.float32, [None])),
)
# Batches of one, two and three.
_UNEVEN = tf.data.Dataset.range(1, 4).map(lambda size: tf.ones([size]))


@pytest.mark.slow
def test_uneven_sequences_go_to_the_native_runtime_with_one_line(log):
  even = tf.data.Dataset.range(4, output_type=tf.float32).batch(3)
  with cohort():
    assert _sequences([even, even]) == 12.0
    assert not log
    for _ in range(2):
      assert _sequences([even, _UNEVEN]) == 12.0
    assert _weighted([2.0], [3.0]) == (2.0, 3.0)
  told = [message for message in log if 'native runtime' in message]
  assert len(told) == 1
  assert 'elements differ in shape (argument/client 1)' in told[0]


@pytest.mark.parametrize(
  ('computation', 'value', 'match'),
  [
    (_sequences, [_UNEVEN], r'differ in shape.*client 0'),
    (
      tff.tensorflow.computation(lambda n: tf.data.Dataset.range(n), np.int64),
      3,
      'a sequence in the result',
    ),
  ],
)
def test_other_sequences_are_refused_when_strict(computation, value, match):
  with cohort(strict=True):
    with pytest.raises(errors.UnsupportedComputationError, match=match):
      computation(value)


def _in_loops(number):
  """Adds a number 18 times: in loops in a loop, which hand on a size."""

  def body(_, turn, total):
    size = tf.constant([3])
    for _ in range(3):
      _, size, total = tf.while_loop(
        lambda inner, _, total: inner < 2,
        lambda inner, size, total: (
          *(inner + 1, size),
          total + tf.reduce_sum(tf.fill(size, number)),
        ),
        (0, size, total),
      )
    return size, turn + 1, total

  *_, total = tf.while_loop(
    lambda size, turn, total: turn < 1, body, (tf.constant([3]), 0, 0.0)
  )
  return total


def test_xla_knows_the_sizes_that_loops_hand_on():
  with cohort(jit=True, strict=True):
    assert summed(_in_loops, np.float32)([1.0, -3.0]) == -36.0


def test_what_xla_refuses_runs_without_it_unless_strict(log):
  with cohort(jit=True):
    assert _strings([1, 2], 'ab', 7)[0] == b'ab3'
  assert any('XLA refuses the loop' in message for message in log)
  with cohort(jit=True, strict=True):
    with pytest.raises(errors.CohortRuntimeError, match='jit=False'):
      _strings([1, 2], 'ab', 7)


def _train_recurrent(unroll: bool) -> None:
  model = tff_partial.from_keras(
    lambda: tf.keras.Sequential(
      [
        tf.keras.Input([3, 2]),
        tf.keras.layers.GRU(2, unroll=unroll),
        tf.keras.layers.Dense(3, 'softmax', name='head'),
      ]
    ),
    local='head',
    loss='sparse_categorical_crossentropy',
    metrics=[tf.keras.metrics.SparseTopKCategoricalAccuracy(2)],
  )
  process = tff_partial.algorithms.build_fed_recon(
    model, reconstruct=tff_partial.Phase(batch_size=2)
  )
  clients = tff_partial.from_arrays(
    {'x': np.ones([4, 3, 2], np.float32), 'y': np.arange(4) % 3},
    {'a': [0, 1], 'b': [2, 3]},
    process.example_spec,
  )
  tff_partial.train(process, clients, rounds=1, clients_per_round=2)


@pytest.mark.slow
def test_recurrent_layers_are_told_how_to_compile(log):
  # Keras leaves a function for cuDNN in the graph, which nothing calls.
  with cohort(jit=True):
    _train_recurrent(unroll=False)
  (refused,) = [m for m in log if 'XLA refuses' in m]
  assert 'unroll=True' in refused and 'randomness' not in refused
  with cohort(jit=True, strict=True):
    _train_recurrent(unroll=True)  # Its top-k accuracy, too.


@pytest.mark.parametrize(
  ('arguments', 'match'),
  [
    (([1.0], [1.0, 2.0]), r'argument\.0 has 1, argument\.1 has 2'),
    ((1.0, [1.0]), r'argument\.0: expected a list with a value of the type'),
    (([1.0, 'a'], [1.0, 2.0]), r'argument\.0/client 1: expected float32'),
    (([np.ones([2], np.float32)], [1.0]), r'client 0.*found float32\[2\]'),
    (([np.float64(1)], [1.0]), r'client 0: expected float32, found float64'),
  ],
)
def test_wrong_arguments_are_named(arguments, match, plain):
  with plain:
    with pytest.raises(errors.CohortRuntimeError, match=match):
      _weighted(*arguments)


def test_wrong_fields_are_named(plain):
  with plain:
    with pytest.raises(errors.ArgumentError, match='client 0.*rows'):
      _open_shapes([collections.OrderedDict(rows=np.ones([1, 2], np.float32))])


@pytest.mark.parametrize('option', [{'jit': 'yes'}, {'threads': 0}])
def test_wrong_options_are_refused(option):
  with pytest.raises(ValueError, match='Expected'):
    cohort(**option)


# ---- failures at clients -----------------------------------------------------


def _careful_root(value):
  with tf.control_dependencies(
    [tf.debugging.Assert(value >= 0.0, ['a negative number', value])]
  ):
    return tf.sqrt(value)


@pytest.mark.parametrize('jit', [False, True, 'auto'])
def test_a_failing_client_is_named(jit):
  values = _floats(_MANY)
  values[61] = np.float32(-1.0)
  with cohort(jit=jit, threads=2):
    with pytest.raises(
      errors.ClientComputationError, match='Client 61 of 100'
    ) as caught:
      summed(_careful_root, np.float32)(values)
  assert caught.value.client == 61
  assert 'a negative number' in str(caught.value)
  assert 'float32[]' in str(caught.value)


# ---- TFF's context stack -----------------------------------------------------


def test_it_can_be_installed_like_any_context():
  context = cohort(jit=False)
  stack = tff.framework.get_context_stack()
  outside = stack.current
  with stack.install(context):
    assert _weighted([2.0], [3.0]) == (2.0, 3.0)
  with context, context:
    assert stack.current is context
    assert _weighted([2.0], [3.0]) == (2.0, 3.0)
  assert stack.current is outside


def test_it_can_be_the_default():
  context = cohort(jit=False)

  def as_default():
    tff.framework.set_default_context(context)
    assert tff.framework.get_context_stack().current is context
    return _weighted([2.0], [3.0])

  # A thread has a default of its own, and nothing installed above it.
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    assert thread.submit(as_default).result() == (2.0, 3.0)


def test_it_can_be_awaited():
  async def twice(values):
    mean, _ = await _weighted(values, values)
    return await _weighted([mean], [mean])

  async def as_a_program():
    return await tff.program.materialize_value(_weighted([2.0], [3.0]))

  with cohort(jit=False, asynchronous=True) as context:
    assert asyncio.run(twice([2.0, 2.0])) == (2.0, 2.0)
    federated = tff.program.NativeFederatedContext(context)
  with tff.framework.get_context_stack().install(federated):
    assert asyncio.run(as_a_program()) == (2.0, 3.0)


def test_a_program_is_compiled_once():
  with cohort(jit=False) as context:
    for _ in range(2):

      @tff.federated_computation(_at_clients(np.float32))
      def total(values):
        return tff.federated_sum(values)

      for _ in range(2):
        assert total([1.0, 2.0]) == 3.0
  assert context.num_compiled == 1


# ---- threads -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize('has_begun', [False, True])
def test_cores_are_for_clients_unless_tensorflow_has_begun(has_begun):
  code = f"""
import tensorflow as tf
from tff_partial import runtimes
if {has_begun}:
  tf.config.threading.set_intra_op_parallelism_threads(2)
  tf.constant(1) + 1
assert runtimes.cores_for_clients() != {has_begun}
tf.constant(1) + 1
assert runtimes.cores_for_clients() != {has_begun}  # Also when called again.
threads = tf.config.threading.get_intra_op_parallelism_threads()
assert threads == (2 if {has_begun} else 1), threads
"""
  ended = subprocess.run(
    [sys.executable, '-c', code],
    cwd=pathlib.Path(__file__).parents[2],
    capture_output=True,
    text=True,
    check=False,
  )
  assert ended.returncode == 0, ended.stderr
