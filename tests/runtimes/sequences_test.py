"""Laws of sequences in the cohort runtime, and TFF's algorithms over them."""

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import planted
from tests.support.computations import mapped
from tff_partial.runtimes import errors
from tff_partial.runtimes.cohort_runtime.cohort import cohort
from tff_partial.runtimes.values import readers

algorithms = tff.learning.algorithms
Dataset = tf.data.Dataset


@pytest.fixture(scope='module', name='compiled')
def fixture_compiled() -> Iterator[Callable[..., Any]]:
  """Calls a function in the cohort runtime, which must not fall back."""
  context = cohort(strict=True)

  def run(function: Callable[..., Any], *arguments: Any) -> Any:
    with context:
      return function(*arguments)

  yield run


def _count(number: int, batch_size: int | None = None) -> tf.data.Dataset:
  dataset = Dataset.range(number)
  return dataset if batch_size is None else dataset.batch(batch_size)


# ---- what a sequence is read as ----------------------------------------------


class _Pair(NamedTuple):
  """Its fields are in another order than their names."""

  y: Any
  x: Any


_ONE_EACH = tff.SequenceType(np.int64)
_BATCHES = tff.SequenceType(tff.TensorType(np.int64, [None]))
_NAMED = tff.SequenceType(
  collections.OrderedDict(y=np.int32, x=tff.TensorType(np.int32, [2]))
)
_OF_CLASS = tff.SequenceType(
  tff.StructWithPythonType([('y', np.int32), ('x', np.int32)], _Pair)
)
_TEXTS = tff.SequenceType(np.str_)
_OPEN = tff.SequenceType((tff.TensorType(np.float32, [None, 2]), np.int32))


def _named() -> tf.data.Dataset:
  fields = [('y', np.arange(3, dtype=np.int32)), ('x', np.ones([3, 2], 'i'))]
  return Dataset.from_tensor_slices(collections.OrderedDict(fields))


@pytest.mark.parametrize(
  ('type_spec', 'value', 'components', 'batch_size'),
  [
    pytest.param(_ONE_EACH, _count(3), [[0, 1, 2]], 0, id='elements'),
    pytest.param(_ONE_EACH, _count(2500), [range(2500)], 0, id='many'),
    pytest.param(_ONE_EACH, [2, 1], [[2, 1]], 0, id='a list'),
    pytest.param(_BATCHES, _count(5, 5), [range(5)], 5, id='one batch'),
    pytest.param(_BATCHES, _count(5, 2), [range(5)], 2, id='a short last one'),
    pytest.param(
      _ONE_EACH,
      _count(3).repeat().filter(lambda x: x > 0).take(3),
      [[1, 2, 1]],
      0,
      id='the first of endless ones',
    ),
    pytest.param(_BATCHES, [[3, 4], [5]], [[3, 4, 5]], 2, id='batches listed'),
    pytest.param(_BATCHES, _count(0, 2), [[]], 1, id='no batch'),
    pytest.param(_BATCHES, [], [[]], 1, id='an empty list'),
    # `tf.data` sorts the fields of a mapping.
    pytest.param(
      _NAMED, _named(), [[[1, 1]] * 3, [0, 1, 2]], 0, id='named fields'
    ),
    pytest.param(
      _OF_CLASS,
      Dataset.from_tensor_slices(_Pair(y=[1, 2], x=[3, 4])),
      [[1, 2], [3, 4]],
      0,
      id='fields of a class',
    ),
    pytest.param(
      _TEXTS,
      Dataset.from_tensor_slices(np.array([b'a\0', b''], object)),
      [np.array([b'a\0', b''], object)],
      0,
      id='strings',
    ),
    pytest.param(
      _OPEN,
      Dataset.from_tensors((np.ones([3, 2], 'f'), 7)).repeat(2),
      [np.ones([2, 3, 2]), [7, 7]],
      0,
      id='an open dimension',
    ),
  ],
)
def test_sequences_are_read_as_arrays(type_spec, value, components, batch_size):
  elements = readers.ValueReader(type_spec)(value, 'clients')
  assert elements.batch_size == batch_size
  for found, expected in zip(elements.components, components, strict=True):
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
  ('value', 'match'),
  [
    ([[1], [2, 3]], 'differ in shape'),
    ([[1, 2], []], 'differ in shape'),
    (_count(3, 2).repeat(2), 'differ in shape'),
    (_count(1, 1).repeat(), 'without an end'),
    (
      _count(3).repeat().filter(lambda x: x > 0).batch(2).prefetch(1),
      'without an end',
    ),
  ],
)
def test_what_is_not_dense_has_no_arrays(value, match):
  with pytest.raises(
    errors.UnsupportedComputationError, match=f'{match}.*a/client 3'
  ):
    readers.ValueReader(_BATCHES)(value, 'a', 'client 3')


@pytest.mark.parametrize(
  ('value', 'match'),
  [
    (3, 'a tf.data.Dataset or a list of elements'),
    (_count(3), r'found one of int64; convert its elements'),
    (Dataset.from_tensor_slices([[1.0]]), r'expected a sequence of int64'),
    ([[1], [1.5]], r'client 3/element 1: expected int64\[\?\], found'),
  ],
)
def test_errors_name_the_client_whose_sequence_is_wrong(value, match):
  with pytest.raises(errors.ArgumentError, match=match) as raised:
    readers.ValueReader(_BATCHES)(value, 'a', 'client 3')
  assert 'a/client 3' in str(raised.value)


def test_errors_name_the_client_whose_sequence_fails():
  failing = _count(3).map(
    lambda x: tf.debugging.check_numerics(1.0 / tf.cast(x, tf.float32), 'zero')
  )
  with pytest.raises(errors.CohortRuntimeError, match='client 3.*zero'):
    readers.ValueReader(tff.SequenceType(np.float32))(failing, 'a', 'client 3')


# ---- what clients see --------------------------------------------------------


def _at_clients(type_spec: Any) -> tff.FederatedType:
  return tff.FederatedType(type_spec, tff.CLIENTS)


def _as_text(*element: Any) -> tf.Tensor:
  """All that there is to know of an element."""
  parts = []
  for leaf in tf.nest.flatten(element):
    parts += [
      tf.strings.as_string(tf.shape(leaf)),
      leaf if leaf.dtype == tf.string else tf.strings.as_string(leaf),
    ]
  return tf.strings.reduce_join(
    [tf.strings.reduce_join(part, separator=' ') for part in parts],
    separator='|',
  )


def _observer(type_spec: tff.SequenceType) -> tff.Computation:
  """What each client reduces its data set to, and sees in a loop over it."""

  @tf.function
  def look(dataset):
    seen = tf.constant('')
    for element in dataset:
      seen = tf.strings.join([seen, _as_text(element)], ';')
    return seen

  def observe(dataset):
    reduced = dataset.map(_as_text).reduce(
      '', lambda old, new: tf.strings.join([old, new], ';')
    )
    direct = dataset.reduce(
      '', lambda old, *new: tf.strings.join([old, _as_text(*new)], ';')
    )
    return reduced, direct, look(dataset)

  return mapped(observe, type_spec)


def _clients_of(
  make: Callable[[int], tf.data.Dataset], sizes: Sequence[int]
) -> list[tf.data.Dataset]:
  return [make(size) for size in sizes]


@pytest.mark.slow
@pytest.mark.parametrize(
  ('type_spec', 'clients'),
  [
    pytest.param(
      _BATCHES,
      _clients_of(lambda size: _count(size, 3), [7, 0, 2, 6, 1]),
      id='batches',
    ),
    pytest.param(_NAMED, [_named(), _named().take(1)], id='named fields'),
    pytest.param(
      _TEXTS,
      [Dataset.from_tensor_slices(['a', 'bc']), _count(0).map(tf.as_string)],
      id='strings',
    ),
    pytest.param(
      _OPEN,
      [
        Dataset.from_tensors((np.ones([n, 2], 'f'), n)).repeat(2)
        for n in (3, 1, 3)
      ],
      id='open dimensions',
    ),
  ],
)
def test_clients_see_what_they_see_natively(
  type_spec, clients, compiled, natively
):
  observe = _observer(type_spec)
  found = compiled(observe, clients)
  assert list(found) == list(natively(observe, clients))
  for reduced, direct, seen in found:
    assert reduced == direct == seen


def test_other_lengths_are_not_compiled_again():
  total = tff.federated_computation(
    lambda clients: tff.federated_sum(tff.federated_map(_add_up, clients)),
    _at_clients(_BATCHES),
  )
  with cohort(strict=True) as context:
    for sizes in ([1, 2], [700], [0], [5, 0, 41]):
      clients = [_count(size, 1 + size % 7) for size in sizes]
      assert total(clients) == sum(size * (size - 1) // 2 for size in sizes)
    assert context.num_compiled == 1
    assert not any(context.choices.values())
    assert total([]) == 0


def test_errors_name_the_client_that_fails_with_its_sequence():
  @tff.tensorflow.computation
  def check(limit, dataset):
    def add(old, new):
      tf.debugging.assert_less(new, limit, 'too large')
      return old + tf.reduce_sum(new)

    return dataset.reduce(np.int64(0), add)

  @tff.federated_computation(
    tff.FederatedType(np.int64, tff.SERVER), _at_clients(_BATCHES)
  )
  def check_all(limit, clients):
    limits = tff.federated_broadcast(limit)
    return tff.federated_sum(tff.federated_map(check, (limits, clients)))

  clients = [_count(size, 4) for size in (5, 7, 6)]
  with cohort(jit=False, strict=True):
    assert check_all(7, clients) == 10 + 21 + 15
    with pytest.raises(
      errors.ClientComputationError, match='(?s)Client 1 of 3.*too large'
    ):
      check_all(6, clients)


@tff.tensorflow.computation(_BATCHES)
def _add_up(dataset):
  return dataset.reduce(np.int64(0), lambda old, new: old + tf.reduce_sum(new))


def test_a_sequence_may_be_at_the_server(compiled):
  assert compiled(_add_up, _count(5, 2)) == 10
  offset = tff.federated_computation(
    lambda server, clients: tff.federated_sum(
      tff.federated_map(
        tff.tensorflow.computation(lambda one, two: one + two),
        (
          tff.federated_broadcast(tff.federated_map(_add_up, server)),
          tff.federated_map(_add_up, clients),
        ),
      )
    ),
    tff.FederatedType(_BATCHES, tff.SERVER),
    _at_clients(_BATCHES),
  )
  assert compiled(offset, _count(4, 3), [_count(3, 2), [[5]]]) == 20


@pytest.mark.slow
def test_a_data_set_is_read_once_in_the_order_of_the_cohort():
  """A round that reads its clients' data in two loops reads the same twice."""
  calls = []

  def once(number):
    calls.append(int(number))
    return np.int64(number)

  def dataset(number):
    return Dataset.from_tensors(number).map(
      lambda x: tf.ensure_shape(tf.numpy_function(once, [x], tf.int64), [])
    )

  @tff.federated_computation(_at_clients(_ONE_EACH))
  def centred(clients):
    first = tff.tensorflow.computation(
      lambda numbers: numbers.reduce(np.int64(0), lambda old, new: old + new),
      _ONE_EACH,
    )
    numbers = tff.federated_map(first, clients)
    largest = tff.federated_broadcast(tff.federated_max(numbers))
    subtract = tff.tensorflow.computation(
      lambda sequence, by: sequence.reduce(
        np.int64(0), lambda old, new: old + new - by
      )
    )
    return tff.federated_sum(tff.federated_map(subtract, (clients, largest)))

  with cohort(strict=True):
    assert centred([dataset(number) for number in range(40)]) == -780
  assert calls == list(range(40))


# ---- TFF's algorithms --------------------------------------------------------


_SPEC = collections.OrderedDict(
  x=tf.TensorSpec([None, 4], tf.float32), y=tf.TensorSpec([None, 1], tf.float32)
)
# One client has nothing, one has less than a batch.
_SIZES = (11, 0, 3, 8)


def _examples(size: int, seed: int) -> tf.data.Dataset:
  draw = np.random.default_rng(seed)
  x = draw.normal(size=[size, 4]).astype(np.float32)
  y = x.sum(1, keepdims=True) + 1.0
  return Dataset.from_tensor_slices(collections.OrderedDict(x=x, y=y))


def _network() -> tf.keras.Model:
  return tf.keras.Sequential(
    [
      tf.keras.layers.InputLayer([4]),
      tf.keras.layers.Dense(1, kernel_initializer='zeros'),
    ]
  )


def _model() -> tff.learning.models.VariableModel:
  return tff.learning.models.from_keras_model(
    _network(),
    input_spec=_SPEC,
    loss=tf.keras.losses.MeanSquaredError(),
    metrics=[tf.keras.metrics.MeanAbsoluteError()],
  )


_DATA = [_examples(size, number).batch(4) for number, size in enumerate(_SIZES)]


def _three_rounds(process: Any, clients: Any) -> list[Any]:
  """Weights and metrics, round by round."""
  state = process.initialize()
  found: list[Any] = []
  for _ in range(3):
    output = process.next(state, clients)
    state = output.state
    weights = process.get_model_weights(state)
    found.extend(tf.nest.flatten([weights, output.metrics]))
  return found


def _fed_avg() -> tuple[Any, Any]:
  process = algorithms.build_weighted_fed_avg(
    _model, tff.learning.optimizers.build_sgdm(0.1, momentum=0.9)
  )
  return process, _DATA


def _fed_eval() -> tuple[Any, Any]:
  return algorithms.build_fed_eval(_model), _DATA


def _k_means() -> tuple[Any, Any]:
  process = algorithms.build_fed_kmeans(2, (4,), random_seed=(1, 2))
  points = [
    _examples(size, number).map(lambda example: example['x'])
    for number, size in enumerate(_SIZES)
  ]
  return process, points


@pytest.mark.slow
@pytest.mark.parametrize('build', [_fed_avg, _fed_eval, _k_means])
def test_algorithms_of_tff_end_where_they_end_natively(
  build, compiled, natively
):
  process, clients = build()
  found = compiled(_three_rounds, process, clients)
  expected = natively(_three_rounds, process, clients)
  planted.assert_close(found, expected, relative=1e-6)
