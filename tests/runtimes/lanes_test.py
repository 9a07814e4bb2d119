"""Several clients in lock-step compute what each computes alone."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.runtimes import errors
from tff_partial.runtimes.graphs import graphs
from tff_partial.runtimes.lanes import lane_loop
from tff_partial.runtimes.lanes import vectorizable

_LANES = 3
_RNG = np.random.default_rng(0)


def _floats(*shape: int) -> np.ndarray:
  return _RNG.normal(size=shape).astype(np.float32)


def _check(
  run: Callable[..., Sequence[Any]],
  alike: Sequence[np.ndarray],
  apart: Sequence[np.ndarray],
) -> None:
  """Compares lanes with one call after the other; `apart` has lanes."""

  def spec(array: np.ndarray) -> tf.TensorSpec:
    return tf.TensorSpec(array.shape, array.dtype)

  one = graphs.trace(run, [*map(spec, alike), *(spec(a[0]) for a in apart)])
  function = vectorizable.retraced(one)
  many = graphs.trace(
    lambda *flat: tf.vectorized_map(
      lambda own: function(*flat[: len(alike)], *own), flat[len(alike) :]
    ),
    [*map(spec, alike), *map(spec, apart)],
  )
  found = many(*map(tf.constant, alike), *map(tf.constant, apart))
  for lane in range(len(apart[0])):
    own = [tf.constant(array[lane]) for array in apart]
    expected = one(*map(tf.constant, alike), *own)
    for mine, theirs in zip(found, expected, strict=True):
      assert mine[lane].shape == theirs.shape
      np.testing.assert_allclose(mine[lane], theirs, 1e-5, 1e-5)


def test_a_loop_ends_for_each_lane_when_it_ends_for_that_client():
  def run(weights: Any, rows: Any, number: Any) -> Any:
    def step(place: Any, weights: Any) -> Any:
      row = tf.gather(rows, place)[tf.newaxis]
      with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = tf.reduce_sum(tf.tanh(row @ weights) ** 2)
      return place + 1, weights - 0.1 * tape.gradient(loss, weights)

    return tf.while_loop(
      lambda place, _: place < number, step, (tf.constant(0), weights)
    )

  # A lane that is done would read behind the last row: the first reads all.
  numbers = np.array([4, 1, 0], np.int32)
  _check(run, [_floats(5, 2)], [_floats(_LANES, 4, 5), numbers])


def test_loops_within_loops_and_conditionals_within_both():
  def run(rows: Any, number: Any) -> Any:
    def inner(place: Any, total: Any) -> Any:
      value = rows[place % 4]
      return place + 2, total + tf.cond(
        value > 0,
        lambda: tf.cond(place > 3, lambda: value, lambda: 2 * value),
        lambda: -value,
      )

    def outer(place: Any, total: Any) -> Any:
      _, total = tf.while_loop(lambda p, _: p < number, inner, (place, total))
      return place + 1, total * 0.9

    return tf.while_loop(
      lambda place, _: place < number, outer, (tf.constant(0), 0.0)
    )

  numbers = np.array([7, 0, 5], np.int32)
  _check(run, [], [_floats(_LANES, 4), numbers])


def test_arrays_of_tensors_are_written_and_read_step_by_step():
  def run(weights: Any, x: Any) -> Any:
    with tf.GradientTape() as tape:
      tape.watch(weights)
      steps = tf.TensorArray(tf.float32, 4, element_shape=[3])

      def step(place: Any, steps: Any, state: Any) -> Any:
        state = tf.tanh(tf.linalg.matvec(weights, state) + x[place])
        return place + 1, steps.write(place, state), state

      _, steps, last = tf.while_loop(
        lambda place, *_: place < 4,
        step,
        (tf.constant(0), steps, tf.zeros([3])),
        maximum_iterations=4,
      )
      states = steps.stack()
      loss = tf.reduce_sum(states**2) + tf.reduce_sum(last)
    rows = tf.TensorArray(tf.float32, 4).unstack(states)
    return [states, tape.gradient(loss, weights), rows.read(2), rows.size()]

  _check(run, [_floats(3, 3)], [_floats(_LANES, 4, 3)])


def test_rows_are_scattered_into_the_table_of_each_lane():
  def run(table: Any, places: Any, rows: Any) -> Any:
    return [
      tf.tensor_scatter_nd_add(table, places[:, tf.newaxis], rows),
      tf.tensor_scatter_nd_update(table, places[:2, tf.newaxis], rows[:2]),
      tf.math.top_k(table[:, 0], 2).indices,
      tf.unique(tf.cast(table[:, 0] > 0, tf.int32)).y,
      tf.shape(table),
      tf.size(rows) + tf.rank(rows),
    ]

  places = np.array([[0, 4, 0], [1, 2, 3], [3, 3, 3]], np.int32)
  # `Unique` is not known to TensorFlow's vectorization: one for each lane.
  _check(run, [_floats(5, 2)], [places, _floats(_LANES, 3, 2)])


def test_what_is_drawn_from_seeds_is_drawn_for_each_lane():
  def run(seed: Any) -> Any:
    return [
      tf.random.stateless_normal([4], seed),
      tf.random.experimental.stateless_shuffle(tf.range(5), seed),
    ]

  seeds = np.array([[0, 1], [2, 3], [0, 2]], np.int32)
  _check(run, [], [seeds])


def test_an_assertion_speaks_of_lanes_at_work():
  def run(limit: Any, number: Any) -> Any:
    def step(place: Any) -> Any:
      with tf.control_dependencies(
        [tf.debugging.Assert(place < limit, [place])]
      ):
        return tf.identity(place) + 1

    return tf.while_loop(lambda place: place < number, step, [0])

  numbers = np.array([3, 1, 2], np.int32)
  _check(run, [np.int32(3)], [numbers])
  with pytest.raises(tf.errors.InvalidArgumentError, match='assertion failed'):
    _check(run, [np.int32(2)], [numbers])


# ---- under a context ---------------------------------------------------------

_CLIENT = tff.FederatedType(np.float32, tff.CLIENTS)


@tff.federated_computation(_CLIENT)
def _sums(numbers):
  """A mean, and each client's number a hundred times."""

  @tff.tensorflow.computation(np.float32)
  def often(number):
    return tf.reduce_sum(tf.fill([100], number))

  return tff.federated_mean(numbers), tff.federated_map(often, numbers)


@pytest.mark.parametrize('size', [0, 1, 4, 5, 40])
def test_cohorts_of_any_size(size):
  numbers = [float(number) for number in range(size)]
  with lane_loop.cohort_in_lanes(4, jit=False, strict=True):
    mean, each = _sums(numbers)
  if size:
    assert mean == np.mean(numbers)
  assert list(each) == [100 * number for number in numbers]


def test_the_client_that_fails_is_named():
  @tff.tensorflow.computation(np.int32)
  def divided(number):
    return 12 // number

  @tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
  def run(numbers):
    return tff.federated_sum(tff.federated_map(divided, numbers))

  with lane_loop.cohort_in_lanes(4, jit=False):
    assert run([1, 2, 3, 4, 6]) == 12 + 6 + 4 + 3 + 2
    with pytest.raises(errors.ClientComputationError, match='Client 4 of 6'):
      run([1, 2, 3, 4, 0, 6])


def test_a_way_that_no_client_goes_may_fail():
  @tff.tensorflow.computation(np.float32)
  def root(number):
    # Of a matrix that is not positive there is none, which is an error.
    return tf.cond(
      number > 0,
      lambda: tf.linalg.cholesky(tf.reshape(number, [1, 1]))[0, 0],
      lambda: -1.0,
    )

  @tff.federated_computation(_CLIENT)
  def run(numbers):
    return tff.federated_sum(tff.federated_map(root, numbers))

  with lane_loop.cohort_in_lanes(4, jit=False, strict=True):
    assert run([4.0, -4.0, 9.0, 16.0, 1.0]) == 2 - 1 + 3 + 4 + 1


def _unfit():
  @tff.tensorflow.computation(np.float32)
  def noisy(number):
    return number + 0 * tf.random.uniform([])

  @tff.federated_computation(_CLIENT)
  def run(numbers):
    return tff.federated_sum(tff.federated_map(noisy, numbers))

  return run


def test_clients_that_cannot_run_in_lanes_run_one_by_one(caplog):
  with lane_loop.cohort_in_lanes(4, jit=False):
    assert _unfit()([1.0, 2.0]) == 3
  assert 'draw randomness without a seed' in caplog.text
  with lane_loop.cohort_in_lanes(4, jit=False, strict=True):
    with pytest.raises(
      lane_loop.LanesRefusedError, match='use runtimes.cohort'
    ):
      _unfit()([1.0, 2.0])


def test_there_is_at_least_one_lane():
  with pytest.raises(ValueError, match='at least one lane, found 0'):
    lane_loop.cohort_in_lanes(0)
