"""Systems of any size are NumPy's; what is not finite ends no round."""

import numpy as np
import pytest
import tensorflow as tf

from tff_partial.solvers import linear_systems


@pytest.mark.parametrize('size', [1, 7, 32, 33, 80])
def test_solutions_are_those_of_numpy(size) -> None:
  draw = np.random.default_rng(size)
  root = draw.normal(size=[size, 2 * size])
  matrix, right = root @ root.T, draw.normal(size=[size, 2])
  found = linear_systems.solve(tf.constant(matrix), tf.constant(right))
  np.testing.assert_allclose(found, np.linalg.solve(matrix, right), rtol=1e-9)
  with linear_systems.for_devices():
    small = [tf.constant(values, tf.float32) for values in (matrix, right)]
    found = linear_systems.solve(*small)
  np.testing.assert_allclose(
    found, np.linalg.solve(matrix, right), rtol=1e-2, atol=1e-4
  )


@pytest.mark.parametrize('size', [5, 40])
@pytest.mark.parametrize('wrong', [float('nan'), float('inf')])
def test_what_is_not_finite_ends_in_nan(size, wrong) -> None:
  matrix = np.eye(size)
  matrix[1, 1] = wrong
  found = linear_systems.solve(
    tf.constant(matrix), tf.ones([size, 1], tf.float64)
  )
  assert np.isnan(found[1])


@pytest.mark.parametrize('at', ['matrix', 'right'])
def test_conjugate_gradients_end_in_nan(at) -> None:
  numbers = {'matrix': np.ones(3), 'right': np.ones(3)}
  numbers[at][1] = np.nan
  found = linear_systems.solve_by_products(
    lambda way: numbers['matrix'] * way, tf.constant(numbers['right'])
  )
  assert np.isnan(found[1])


@pytest.mark.parametrize(
  ('size', 'power', 'is_solved'), [(200, 5.5, True), (60, 14.0, False)]
)
def test_what_conjugate_gradients_do_not_solve_is_nan(size, power, is_solved):
  # The first takes more than 1,000 steps, the second more than it is given.
  diagonal = np.logspace(0.0, power, size)
  found = tf.function(linear_systems.solve_by_products)(
    lambda way: diagonal * way, tf.ones(size, tf.float64)
  )
  if is_solved:
    np.testing.assert_allclose(found, 1.0 / diagonal, rtol=1e-4)
  else:
    assert np.isnan(found).all()
