"""Nothing wrong goes unsaid: errors, leaks and draws of the cohort runtime.

Whatever a computation does, and whether or not XLA compiles it, a client gets
the value, or the error, that it gets natively.
"""

import collections
from collections.abc import Callable
import gc
import inspect
import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.support.computations import mapped
from tff_partial.runtimes import cohort
from tff_partial.runtimes import errors
from tff_partial.runtimes.graphs import operations
from tff_partial.runtimes.xla import agreement
from tff_partial.runtimes.xla import doubts


def _at_clients(type_spec: Any) -> tff.FederatedType:
  return tff.FederatedType(type_spec, tff.CLIENTS)


@pytest.fixture(scope='module')
def runtimes():
  """One runtime for each setting."""
  return {jit: cohort(jit=jit, threads=2) for jit in (False, True, 'auto')}


def _floats(*values: float) -> np.ndarray:
  return np.array(values, np.float32)


def _integers(*values: int) -> np.ndarray:
  return np.array(values, np.int32)


# ---- where XLA computes something else ---------------------------------------

_TABLE = _floats(10, 11, 12)


def _loop(places: tf.Tensor) -> tf.Tensor:
  """Reads one place a step, but none where a place is 7."""
  return tf.while_loop(
    lambda step, _: step < 3,
    lambda step, total: (
      step + 1,
      tf.cond(
        tf.equal(places[step], 7),
        lambda: total - 1.0,
        lambda: total + tf.gather(_TABLE, places[step]),
      ),
    ),
    [0, 0.0],
  )[1]


def _root(x: tf.Tensor) -> tf.Tensor:
  with tf.control_dependencies(
    [tf.debugging.Assert(x[0] >= 0.0, ['negative'])]
  ):
    return tf.sqrt(x)


def _slope(function: Callable[[tf.Tensor], tf.Tensor]) -> Any:
  def slope(x: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
      tape.watch(x)
      y = tf.reduce_sum(function(x))
    return tape.gradient(y, x)

  return slope


def _scattered(places: tf.Tensor) -> tf.Tensor:
  return tf.tensor_scatter_nd_add(_TABLE, places[:, None], tf.ones([2]))


def _listed(places: tf.Tensor) -> tf.Tensor:
  return tf.TensorArray(tf.float32, 3).unstack(_TABLE).read(places[0]) * 2.0


_CUBE = np.arange(24, dtype=np.float32).reshape([2, 3, 4])
_NAN, _INFINITE = float('nan'), float('inf')

# Functions, inputs about which there is no doubt, and inputs that are doubtful.
_DOUBTFUL: dict[str, tuple[Callable[..., Any], np.ndarray, np.ndarray]] = {
  'gather': (lambda i: tf.gather(_TABLE, i), _integers(0, 2), _integers(0, 3)),
  'gather below': (
    lambda i: tf.gather(_CUBE, i, axis=-1),
    _integers(0, 3),
    _integers(0, -1),
  ),
  'gather_nd': (
    lambda i: tf.gather_nd(_CUBE, i[None]),
    _integers(1, 2),
    _integers(1, 3),
  ),
  'scatter_nd': (
    lambda i: tf.scatter_nd(i[:, None], tf.ones([2]), [3]),
    _integers(0, 2),
    _integers(0, 3),
  ),
  'tensor_scatter': (_scattered, _integers(0, 2), _integers(0, -1)),
  'segments': (
    lambda i: tf.math.unsorted_segment_sum(tf.ones([2]), i, 3),
    _integers(0, -1),
    _integers(0, 3),
  ),
  'largest of segments': (
    lambda x: tf.math.unsorted_segment_max(x, [0, 0], 2),
    _floats(0, 1),
    _floats(_NAN, 1),
  ),
  'an element': (
    lambda i: tf.constant(_CUBE)[..., i[0], :1],
    *map(_integers, (2, 3)),
  ),
  'a slice': (lambda i: tf.slice(_TABLE, i, [2]), _integers(1), _integers(2)),
  'a list': (_listed, _integers(2), _integers(3)),
  'labels': (
    lambda i: tf.nn.sparse_softmax_cross_entropy_with_logits(i, _TABLE[None]),
    _integers(2),
    _integers(3),
  ),
  'division': (lambda i: 7 // i, _integers(-2, 3), _integers(1, 0)),
  'power': (lambda i: tf.pow(3, i), _integers(0, 2), _integers(0, -2)),
  'shift': (
    lambda i: tf.bitwise.left_shift(3, i),
    _integers(0, 31),
    _integers(0, 32),
  ),
  'a loop': (_loop, _integers(0, 7, 2), _integers(7, 0, 8)),
  'assertion': (_root, _floats(4), _floats(-4)),
  'numerics': (
    lambda x: tf.debugging.check_numerics(x, 'not finite'),
    _floats(1),
    _floats(_INFINITE),
  ),
  'whole numbers': (
    lambda x: tf.cast(x, tf.int32),
    _floats(-2.7, 2e9),
    _floats(1, 3e9),
  ),
  'whole numbers of NaN': (
    lambda x: tf.cast(x, tf.int64),
    _floats(9e18),
    _floats(_NAN),
  ),
  'argmax': (tf.argmax, _floats(3, 2, 1), _floats(3, 2, _NAN)),
  'sort': (tf.sort, _floats(3, 2, 1), _floats(_NAN, 2, 1)),
  'order': (tf.argsort, _floats(0, 0, 1), _floats(-0.0, 0.0, 1)),
  'softmax': (tf.nn.softmax, _floats(1, -_INFINITE), _floats(1, _INFINITE)),
  'clip': (
    lambda x: tf.raw_ops.ClipByValue(
      t=x, clip_value_min=x[0], clip_value_max=1.0
    ),
    _floats(0, 2),
    _floats(2, 0),
  ),
  'permutation': (
    tf.math.invert_permutation,
    _integers(2, 0, 1),
    _integers(2, 0, 2),
  ),
  'erfinv': (tf.math.erfinv, _floats(-1, 0.5), _floats(1.5, 0.5)),
  'slope of relu': (_slope(tf.nn.relu), _floats(1, -1), _floats(1, _NAN)),
  'slope of rsqrt': (_slope(tf.math.rsqrt), _floats(1, 4), _floats(1, -1)),
  'slope of selu': (_slope(tf.nn.selu), _floats(1, -1), _floats(1, 0)),
  'slope of a distance': (
    _slope(lambda x: tf.sqrt(x) * tf.sign(x)),
    _floats(4, 1),
    _floats(4, 0),
  ),
  'cross-entropy': (
    lambda x: tf.nn.softmax_cross_entropy_with_logits([0.0, 1.0], x),
    _floats(1, 2),
    _floats(-_INFINITE, 2),
  ),
  'pooling': (
    lambda x: tf.nn.max_pool1d(x[None, :, None], 2, 1, 'VALID'),
    _floats(1, 2, 3),
    _floats(1, _NAN, 3),
  ),
}


def _graph(function: Callable[..., Any], like: np.ndarray) -> tuple[Any, ...]:
  """A function as a graph: its definition, its input and its output."""
  traced = tf.function(function).get_concrete_function(
    tf.TensorSpec(like.shape, like.dtype)
  )
  return (
    traced.graph.as_graph_def(),
    traced.inputs[0].name,
    traced.outputs[0].name,
  )


def _with_doubt(function: Callable[..., Any], like: np.ndarray) -> Any:
  """A function under XLA that returns its value, and whether it is in doubt."""
  graph_def, start, end = _graph(function, like)
  doubting, doubt = doubts.added(graph_def, [end])
  wrapped = tf.compat.v1.wrap_function(
    lambda: tf.graph_util.import_graph_def(doubting, name=''), []
  )
  ends = [wrapped.graph.as_graph_element(name) for name in (end, doubt)]
  pruned = wrapped.prune(wrapped.graph.as_graph_element(start), ends)

  @tf.function(jit_compile=True)
  def compiled(x):
    # As in a loop over clients: XLA does not know what is in it.
    results = tf.map_fn(
      lambda one: tuple(pruned(one)),
      x[None],
      fn_output_signature=tuple(end.dtype for end in ends),
    )
    return tuple(tf.squeeze(result, 0) for result in results)

  return compiled


@pytest.mark.parametrize('name', _DOUBTFUL)
def test_doubts_come_true_where_xla_may_compute_something_else(name):
  function, good, bad = _DOUBTFUL[name]
  compiled = _with_doubt(function, good)
  value, is_doubtful = compiled(tf.constant(good))
  assert not is_doubtful
  np.testing.assert_allclose(value, function(tf.constant(good)), rtol=1e-6)
  assert compiled(tf.constant(bad))[1]


# Errors, or values, of kernels: through whole rounds.
@pytest.mark.parametrize('jit', [False, True, 'auto'])
@pytest.mark.parametrize('name', ['gather', 'division', 'a loop', 'assertion'])
def test_a_kernel_that_fails_does_so_under_every_setting(name, jit, runtimes):
  function, good, bad = _DOUBTFUL[name]
  computation = _FAILING[name]
  with runtimes[jit]:
    for one in computation([good, good]):
      np.testing.assert_allclose(one, function(tf.constant(good)))
    with pytest.raises(errors.ClientComputationError, match='Client 1 of 2'):
      computation([good, bad])
  if jit is True:  # It was XLA that noticed.
    assert set(runtimes[jit].choices.values()) == {True}


_FAILING = {
  name: mapped(_DOUBTFUL[name][0], (good.dtype.type, good.shape))
  for name, good in (
    (name, _DOUBTFUL[name][1])
    for name in ('gather', 'division', 'a loop', 'assertion')
  )
}


def test_what_is_never_computed_is_not_doubted(runtimes):
  unused = mapped(lambda i: (tf.gather(_TABLE, i), i + 1)[1], (np.int32, [2]))
  with runtimes[True] as context:
    np.testing.assert_array_equal(unused([_integers(0, 9)]), [[1, 10]])
  assert all(context.choices.values())


def test_top_k_is_under_xla_what_the_kernel_says(natively, runtimes):
  # Ties, an unknown class, NaN and infinities, in the graph and in a branch.
  def in_top(given):
    x, targets = given
    return tf.math.in_top_k(targets, x, 2), tf.cond(
      targets[0] < 9,
      lambda: tf.math.in_top_k(targets, x, 1),
      lambda: tf.zeros([3], tf.bool),
    )

  computation = mapped(in_top, ((np.float32, [3, 4]), (np.int32, [3])))
  rows = [
    [[1, 2, 2, 0], [5, 4, 3, 2], [0, 1, 2, 3]],
    [[1, _NAN, 2, 0], [np.inf, 4, 3, 2], [0, 1, -np.inf, 3]],
  ]
  values = [
    (np.array(x, np.float32), _integers(*targets))
    for x, targets in zip(
      rows * 2, [(1, 1, 4), (2, 1, 3), (2, 2, -1), (0, 0, 1)], strict=True
    )
  ]
  expected = natively(computation, values)
  assert np.any(expected[0][0]) and not np.all(expected[0][0])
  with runtimes[True] as context:
    for one, other in zip(computation(values), expected, strict=True):
      np.testing.assert_array_equal(one[0], other[0])
      np.testing.assert_array_equal(one[1], other[1])
  assert all(context.choices.values())


@pytest.mark.slow
def test_nan_is_as_large_under_xla_as_without(natively, runtimes):
  def extremes(x):
    return collections.OrderedDict(
      largest=tf.reduce_max(x),
      smallest=tf.reduce_min(x),
      above=tf.maximum(x, 0.0),
      clipped=tf.clip_by_value(x, 0.0, 1.0),
      where=tf.argmax(x),
      rounded=tf.cast(x, tf.int32),
      order=tf.argsort(x),
    )

  computation = mapped(extremes, (np.float32, [3]))
  values = [_floats(1, _NAN, 2), _floats(3, 2, _NAN), _floats(1, 2, 3)]
  expected = natively(computation, values)
  for jit, context in runtimes.items():
    with context:
      for one, other in zip(computation(values), expected, strict=True):
        for name in other:
          np.testing.assert_array_equal(one[name], other[name], f'{jit} {name}')


# ---- draws -------------------------------------------------------------------

_DRAWS = {
  'uniform': lambda seed: tf.random.stateless_uniform([5], seed),
  'normal': lambda seed: tf.random.stateless_normal([5], seed),
  'truncated': lambda seed: tf.random.stateless_truncated_normal([5], seed),
  'categorical': lambda seed: tf.random.stateless_categorical(
    tf.zeros([1, 4]), 9, seed
  ),
  'integers': lambda seed: tf.random.stateless_uniform(
    [5], seed, 0, 100, tf.int32
  ),
  'dropout': lambda seed: tf.nn.experimental.stateless_dropout(
    tf.ones([9]), 0.5, seed
  ),
  'split': lambda seed: tf.random.split(seed, 3),
}


def test_a_seed_draws_the_same_at_server_and_clients(log):
  @tff.tensorflow.computation(tff.TensorType(np.int32, [2]))
  def draw(seed):
    return [function(seed) for function in _DRAWS.values()]

  @tff.federated_computation(
    _at_clients(tff.TensorType(np.int32, [2])),
    tff.FederatedType(tff.TensorType(np.int32, [2]), tff.SERVER),
  )
  def both(clients, server):
    return tff.federated_map(draw, clients), tff.federated_map(draw, server)

  seeds = [_integers(-5, 7), _integers(1, 2)]
  with cohort(jit=True) as context:
    for seed in seeds:
      clients, server = both([seed], seed)
      for name, one, other in zip(_DRAWS, clients[0], server, strict=True):
        np.testing.assert_array_equal(one, other, name)
  assert not any(context.choices.values())
  assert any('draws' in message for message in log)
  with cohort(jit=True, strict=True):
    with pytest.raises(errors.CohortRuntimeError, match='Stateless'):
      both([seeds[0]], seeds[0])


_UNSEEDED = {
  'generator': lambda n: (
    tf.random.Generator.from_non_deterministic_state().normal([n])
  ),
  'shuffled': lambda n: tf.random.shuffle(tf.range(float(n))),
  'candidates': lambda n: tf.random.log_uniform_candidate_sampler(
    [[1]], 1, n, False, 10 * n
  )[0],
  'shuffled dataset': lambda n: (
    tf.data.Dataset.range(n).shuffle(n).batch(n).get_single_element()
  ),
  'random dataset': lambda n: (
    tf.data.Dataset.random().take(n).batch(n).get_single_element()
  ),
}
_SEEDED = {
  'generator': lambda n: tf.random.Generator.from_seed(1).normal([n]),
  'shuffled dataset': lambda n: (
    tf.data.Dataset.range(n).shuffle(n, seed=3).batch(n).get_single_element()
  ),
  'table': lambda n: tf.lookup.StaticHashTable(
    tf.lookup.KeyValueTensorInitializer([1], [2]), 0
  ).lookup(tf.ones([n], tf.int32)),
  'variable': lambda n: tf.Variable(tf.ones([n])).read_value(),
}
_LARGE = 5000  # Elements of more than 16 KB.


def _drawing(draw: Callable[[int], tf.Tensor]) -> tff.Computation:
  """How far a draw is from itself, when a later stage reads it again."""

  @tff.tensorflow.computation(np.float32)
  def drawn(value):
    return value + tf.reshape(tf.cast(draw(_LARGE), tf.float32), [_LARGE])

  @tff.tensorflow.computation
  def distance(one, other):
    return tf.reduce_sum(tf.abs(one - other))

  @tff.federated_computation(_at_clients(np.float32))
  def distances(values):
    each = tff.federated_map(drawn, values)
    total = tff.federated_broadcast(tff.federated_sum(each))
    return tff.federated_map(distance, (each, total))

  return distances


@pytest.mark.parametrize('name', _UNSEEDED)
def test_whatever_draws_draws_once(name, runtimes):
  with runtimes[False]:
    assert _drawing(_UNSEEDED[name])([1.0]) == [0.0]


def _draws(function: Callable[[int], Any]) -> str | None:
  # As TFF traces it: with variables and tables in the graph.
  with tf.Graph().as_default() as graph:
    function(3)
  return operations.draws(graph.as_graph_def())


def test_draws_are_told_from_what_is_merely_stateful():
  for name, function in _UNSEEDED.items():
    assert _draws(function) is not None, name
  for name, function in _SEEDED.items():
    assert _draws(function) is None, name


# ---- what clients leave behind -----------------------------------------------


def _count_in_table(value):
  table = tf.lookup.experimental.MutableHashTable(tf.int32, tf.int32, 0)
  before = table.lookup(tf.constant([0]))
  with tf.control_dependencies([table.insert([0], before + value)]):
    return table.lookup(tf.constant([0]))[0]


def _count_in_queue(value):
  queue = tf.queue.FIFOQueue(9, [tf.int32], [[]])
  with tf.control_dependencies([queue.enqueue(value)]):
    return queue.size()


def _variable_of_argument(value):
  return tf.Variable(2 * value).read_value()


def _table_of_argument(value):
  table = tf.lookup.StaticHashTable(
    tf.lookup.KeyValueTensorInitializer([value], [value + 1]), 0
  )
  return table.lookup(value)


@pytest.mark.parametrize(
  ('function', 'expected', 'reason'),
  [
    (_count_in_table, [1, 1, 1], 'without an initial value .MutableHashTable'),
    (_count_in_queue, [1, 1, 1], 'without an initial value .FIFOQueue'),
    (_variable_of_argument, [2, 2, 2], 'made from an argument'),
    (_table_of_argument, [2, 2, 2], 'made from an argument'),
  ],
)
def test_resources_are_new_at_each_client(
  function, expected, reason, runtimes, log
):
  computation = mapped(function, np.int32)
  with runtimes[False]:
    for _ in range(2):
      assert list(computation([1, 1, 1])) == expected
  assert sum('native runtime' in message for message in log) == 1
  with cohort(strict=True):
    with pytest.raises(errors.UnsupportedComputationError, match=reason):
      computation([1])


def test_threads_do_not_share_variables(runtimes):
  def count(value):
    variable = tf.Variable(0)
    added: list[Any] = []
    for _ in range(20):
      with tf.control_dependencies(added):
        added = [variable.assign_add(value)]
    with tf.control_dependencies(added):
      return variable.read_value()

  computation = mapped(count, np.int32)
  found = []

  def call(value):
    with runtimes[False]:
      for _ in range(10):
        found.append((value, set(computation([value] * 5))))

  threads = [threading.Thread(target=call, args=[n]) for n in (1, 100)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert all(values == {20 * value} for value, values in found)
  assert len(found) == 20


@pytest.mark.parametrize('jit', [False, True])
@pytest.mark.parametrize('placement', [tff.SERVER, tff.CLIENTS])
def test_two_calls_do_not_share_variables(placement, jit, runtimes):
  @tff.tensorflow.computation(np.int32)
  def later(value):
    variable = tf.Variable(0)
    with tf.control_dependencies([variable.assign(value)]):
      done = tf.while_loop(lambda i: i < 20_000, lambda i: (i + 1,), [0])
    with tf.control_dependencies(done):
      return variable.read_value()

  placed = tff.FederatedType(np.int32, placement)

  @tff.federated_computation(placed, placed)
  def both(one, other):
    return tff.federated_map(later, one), tff.federated_map(later, other)

  given = ([3], [5]) if placement is tff.CLIENTS else (3, 5)
  with runtimes[jit]:
    for _ in range(3):
      assert tuple(both(*given)) == given


def test_functions_may_be_arguments(runtimes, log):
  @tff.federated_computation(tff.FunctionType(np.int32, np.int32), np.int32)
  def twice(function, x):
    return function(function(x))

  double = tff.tensorflow.computation(lambda x: 2 * x, np.int32)
  with runtimes[False]:
    assert twice(double, 3) == 12
  assert any('a function in the parameter' in message for message in log)


# ---- what goes in ------------------------------------------------------------

_TAKEN = [
  (np.str_, b'a\x00', b'a\x00'),
  (np.str_, np.bytes_(b'a\x00'), b'a\x00'),
  (np.int32, np.int8(-3), -3),
  (np.float64, np.float32(0.5), 0.5),
  (np.float32, 16777216, 16777216.0),
  ((np.int32, [2]), np.array([1, -2], np.int8), [1, -2]),
  ((np.str_, [2]), [b'a\x00', b'b'], [b'a\x00', b'b']),
  ((np.int32, [None]), [], []),
]
_REFUSED = [
  (np.int32, 2**31),
  (np.uint8, -1),
  (np.float32, 1e300),
  (np.float32, 16777217),
  (np.int32, np.int64(3)),
  (np.float32, np.float64(1)),
  (np.int32, True),
  ((np.int32, [2]), [1, 2**31]),
]


@pytest.mark.parametrize(('type_spec', 'value', 'expected'), _TAKEN)
def test_what_goes_in_comes_out(type_spec, value, expected, runtimes):
  same = _same(type_spec)
  with runtimes[False]:
    (found,) = same([value])
  assert np.array(found, object).tolist() == expected


@pytest.mark.parametrize(('type_spec', 'value'), _REFUSED)
def test_what_a_dtype_cannot_hold_is_refused(type_spec, value, runtimes):
  same = _same(type_spec)
  with runtimes[False]:
    with pytest.raises(errors.ArgumentError, match='client 0'):
      same([value])


def _same(type_spec: Any) -> tff.Computation:
  type_spec = tff.to_type(type_spec)
  if type_spec not in _sames:
    _sames[type_spec] = tff.federated_computation(
      lambda clients: clients, _at_clients(type_spec)
    )
  return _sames[type_spec]


_sames: dict[tff.Type, tff.Computation] = {}


# ---- what comes out ----------------------------------------------------------


@pytest.mark.slow
def test_what_clients_return_is_a_list(natively, runtimes):
  state = collections.OrderedDict(a=(np.float32, [2]), n=np.int32)
  grow = mapped(
    lambda one: collections.OrderedDict(a=one['a'] + 1.0, n=one['n'] + 1), state
  )
  first = [
    collections.OrderedDict(a=_floats(i, -i), n=np.int32(i)) for i in range(3)
  ]
  with runtimes[False]:
    states = grow(first)
  assert isinstance(states, list) and states.is_dense
  # TFF's own contexts, which want lists, take it, and our own again.
  stock = tff.backends.native.create_sync_local_cpp_execution_context()
  with tff.framework.get_context_stack().install(stock):
    again = grow(states)
  assert [one['n'] for one in again] == [2, 3, 4]
  assert [one['n'] for one in natively(grow, states)] == [2, 3, 4]
  copied = tf.nest.map_structure(np.array, states)
  assert [one['n'] for one in copied] == [1, 2, 3]


def test_a_changed_list_is_an_ordinary_one(runtimes):
  with runtimes[False]:
    numbers = _same(np.int32)([5, 4, 6])
    numbers.append(np.int32(9))
    assert numbers == [5, 4, 6, 9] and len(numbers) == 4
    del numbers[0]
    numbers.sort()
    assert numbers[0] == 4 and numbers.pop() == 9
    assert not numbers.is_dense
    with pytest.raises(AttributeError, match='changed'):
      _ = numbers.stacked
    numbers[1] = numbers[1] + numbers[1]  # A value itself is read-only.
    assert list(_same(np.int32)(numbers)) == [4, 12]


@pytest.mark.parametrize('jit', [False, True])
def test_strings_of_mixed_shapes_are_added_in_the_order_of_the_cohort(
  jit, natively, runtimes
):
  rows = tff.TensorType(np.int32, [None])
  name = tff.tensorflow.computation(
    lambda x: tf.strings.reduce_join(tf.strings.as_string(x)), rows
  )
  add = tff.tensorflow.computation(lambda a, b: a + b, np.str_, np.str_)
  same = tff.tensorflow.computation(lambda a: a, np.str_)

  @tff.federated_computation(_at_clients(rows))
  def joined(clients):
    return tff.federated_aggregate(
      tff.federated_map(name, clients), '', add, add, same
    )

  clients = [np.full([1 + i % 3], i, np.int32) for i in range(20)]
  with runtimes[jit]:
    found = joined(clients)
  assert found == natively(joined, clients)
  assert found.startswith(b'0112223445556')


# ---- falling back ------------------------------------------------------------


@tff.federated_computation(
  _at_clients(tff.SequenceType(tff.TensorType(np.int32, [None])))
)
def _secure_total(clients):
  add = tff.tensorflow.computation(
    lambda numbers: numbers.reduce(0, lambda old, new: old + tf.size(new))
  )
  return collections.OrderedDict(
    total=tff.federated_secure_sum_bitwidth(tff.federated_map(add, clients), 8)
  )


def _uneven_batches(number: int) -> list[tf.data.Dataset]:
  """For each client batches of one, two and three, which are not dense."""
  batches = tf.data.Dataset.range(1, 4).map(
    lambda size: tf.zeros([size], tf.int32)
  )
  return [batches] * number


def test_secure_sums_are_computed_after_falling_back(runtimes, log):
  with runtimes[False]:
    found = _secure_total(_uneven_batches(2))
  # In a line, however long the type of the computation.
  (message,) = [text for text in log if 'native runtime' in text]
  assert 'which is slower, runs a computation: it holds' in message
  assert len(message) < 300
  assert found == collections.OrderedDict(total=12)
  assert isinstance(found, collections.OrderedDict)


@pytest.mark.slow
def test_a_dropped_runtime_leaves_the_context_stack_alone():
  stack = tff.framework.get_context_stack()
  outside = stack.current
  for _ in range(2):
    context = cohort(jit=False)
    with stack.install(context):
      assert _secure_total(_uneven_batches(1)) == {'total': 6}
    collector = threading.Thread(target=gc.collect)
    del context
    collector.start()
    collector.join()
    gc.collect()
    assert stack.current is outside
  # In the threads that collected it, too.
  with cohort(jit=False):
    assert list(_same(np.int32)([1])) == [1]


# ---- operations that agree ---------------------------------------------------


def test_xla_is_left_alone_where_it_was_used_too_early(monkeypatch, log):
  monkeypatch.setattr(agreement, 'are_nans_kept', lambda: False)
  total = tff.federated_computation(
    lambda clients: tff.federated_sum(clients), _at_clients(np.int32)
  )
  with cohort(jit=True) as context:
    assert total([1, 2]) == 3
  assert not any(context.choices.values())
  assert any('loses NaN' in message for message in log)


# Numbers at which functions end, jump or are not numbers.
_EDGES = _floats(
  *(_NAN, _INFINITE, -_INFINITE, 0.0, -0.0, 0.5, -0.5, 1.5, -2.5, 1.0, -1.0),
  *(7.0, 100.0, -100.0, 1e30, -1e30, 1e-30),
)


def _of_floats(number: int) -> list[str]:
  """The operations that agree, take so many floats and nothing else."""
  found = []
  for name in sorted(agreement._AGREE):
    defined = operations.definition(tf.compat.v1.NodeDef(op=name))
    types = [argument.type_attr for argument in defined.input_arg]
    (attribute,) = [a for a in defined.attr if a.name == 'T'] or [None]
    if (
      types == ['T'] * number
      and not any(argument.number_attr for argument in defined.input_arg)
      and all(
        a.HasField('default_value') or a.name == 'T' for a in defined.attr
      )
      and (
        not attribute.HasField('allowed_values')
        or 1 in attribute.allowed_values.list.type  # float32
      )
    ):
      found.append(name)
  return found


def _computed(names: list[str], inputs: list[np.ndarray]) -> Any:
  results = {}
  for name in names:
    arguments = operations.definition(tf.compat.v1.NodeDef(op=name)).input_arg
    results[name] = getattr(tf.raw_ops, name)(
      **{a.name: x for a, x in zip(arguments, inputs, strict=True)}
    )
  return results


@pytest.mark.slow
@pytest.mark.parametrize('number', [1, 2])
def test_what_is_said_to_agree_does(number):
  # Matrices and the like, which are other than these numbers.
  others = ('BiasAddGrad', 'Conj', 'Diag', 'DiagPart', 'LogSoftmax')
  others += ('BatchMatMul', 'BatchMatMulV2', 'BatchMatMulV3', 'BiasAdd')
  others += ('MatMul',)
  names = [name for name in _of_floats(number) if name not in others]
  assert len(names) > 15
  inputs = [grid.ravel() for grid in np.meshgrid(*[_EDGES] * number)]
  compiled = tf.function(
    lambda *inputs: _computed(names, list(inputs)), jit_compile=True
  )
  expected = _computed(names, [tf.constant(x) for x in inputs])
  for name, found in compiled(*[tf.constant(x) for x in inputs]).items():
    # A slope is a product of several numbers; in another order, it overflows.
    is_huge = name.endswith('Grad') & np.any(
      [(abs(x) > 1e20) & np.isfinite(x) for x in inputs], 0
    )
    np.testing.assert_allclose(
      np.where(is_huge, 0, found),
      np.where(is_huge, 0, expected[name]),
      rtol=1e-4,
      atol=1e-5,
      err_msg=name,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
  'name',
  ['EluGrad', 'Relu6Grad', 'ReluGrad', 'RsqrtGrad', 'SeluGrad', 'SqrtGrad'],
)
def test_slopes_that_differ_are_doubted(name):
  inputs = [grid.ravel() for grid in np.meshgrid(_EDGES, _EDGES)]
  compiled = tf.function(
    lambda *inputs: _computed([name], list(inputs))[name], jit_compile=True
  )
  tensors = [tf.constant(x) for x in inputs]
  differ = ~np.isclose(
    compiled(*tensors), _computed([name], tensors)[name], equal_nan=True
  )
  assert differ.any()
  doubt = agreement._OF_FLOATS[name]
  number = len(inspect.signature(doubt).parameters)
  for place in np.flatnonzero(differ):
    assert doubt(*[tensor[place] for tensor in tensors[:number]])
