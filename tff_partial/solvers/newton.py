"""Minimization of a client's objective over weights that enter it affinely.

The Jacobian of predictions is computed once. A quadratic objective then takes
one linear solve; others take Newton steps, each of them such a solve followed
by a line search, and no further call of the model.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tff_partial.model import losses
from tff_partial.model import tracing
from tff_partial.solvers import affine
from tff_partial.solvers import linear_systems
from tff_partial.solvers.exact import Exact
from tff_partial.solvers.exact import ExactError

# A step is halved at most so often, and taken if it lowers the objective by
# this share of what its slope promises.
_HALVINGS, _SHARE = 40, 1e-4
# Newton's method stops where a step promises less than this share of the
# objective: about the rounding of losses in float32.
_PROMISED = 1e-7
# It has failed where its steps are used up, and another promises more than this
# share of the objective at the start.
_ACCEPTED = 1e-3


class Objective(NamedTuple):
  """A client's objective, as functions of predictions and weights.

  Attributes:
    loss: Predictions -> the loss of all examples.
    rest: (the vector of weights, predictions) -> what is added to the mean
      loss; None if there is nothing.
    is_summed: True if `rest` is added to the sum of losses instead.
  """

  loss: Callable[[Any], losses.LossValue]
  rest: Callable[[tf.Tensor, Any], tf.Tensor] | None
  is_summed: bool

  def value(self, vector: tf.Tensor, predictions: Any) -> tf.Tensor:
    """Return the sum of losses, and the rest scaled to it."""
    return self.loss(predictions).total + self.of_rest(vector, predictions)

  def of_rest(self, vector: tf.Tensor, predictions: Any) -> tf.Tensor:
    """Return the rest, scaled to the sum of losses."""
    if self.rest is None:
      return tf.constant(0.0)
    scale = 1.0 if self.is_summed else self.loss(predictions).num_elements
    return scale * self.rest(vector, predictions)


class Solution(NamedTuple):
  """The minimum.

  Attributes:
    weights: float32 `[weights]`.
    covariance: The inverse of half the Hessian, float32 `[weights, weights]`;
      None unless asked for.
    solve: Solves a system with the Hessian at the minimum, for `[weights]`.
  """

  weights: tf.Tensor
  covariance: tf.Tensor | None
  solve: Callable[[tf.Tensor], tf.Tensor]


class _Local(NamedTuple):
  """The quadratic function that is nearest to the objective at some point.

  Attributes:
    gradient: `[weights]`.
    solve: Solves a system with the Hessian, for `[weights, number]`.
    is_exact: True if the Hessian is the same everywhere.
  """

  gradient: tf.Tensor
  solve: Callable[[tf.Tensor], tf.Tensor]
  is_exact: bool


def minimize(
  settings: Exact,
  objective: Objective,
  predict: Callable[[tf.Tensor], Any],
  flat: affine.Flat,
  mean: tf.Tensor,
  precision: tf.Tensor,
) -> Solution:
  """Minimize the objective plus a quadratic prior.

  Args:
    settings: The settings of the solve.
    objective: The client's objective.
    predict: From the vector of weights to predictions.
    flat: The structure of the weights.
    mean: The mean of the prior, float32 `[weights]`.
    precision: Its precision, a scalar or `[weights, weights]`.

  Raises:
    ExactError: If a covariance is asked of weights that are solved for by
      conjugate gradients.
  """
  is_direct = (
    flat.static_size is not None and flat.static_size <= settings.max_direct
  )
  if settings.covariance is not None and not is_direct:
    raise ExactError(
      f'Exact: covariance={settings.covariance!r}: more than '
      f'max_direct={settings.max_direct} weights, or a number of them that the '
      'data determine, are solved for without a matrix. Leave it out.'
    )
  kind = _Direct if is_direct else _ByProducts
  problem = kind(
    objective, affine.Linearized(predict, mean), flat, mean, precision
  )
  change = tf.zeros([flat.size], linear_systems.dtype())
  nearest = problem.nearest(change)
  if nearest.is_exact:
    change -= nearest.solve(nearest.gradient[:, None])[:, 0]
  else:
    change = _newton(settings.newton_steps, problem, change)

  def solve(right: tf.Tensor) -> tf.Tensor:
    local = nearest if nearest.is_exact else problem.nearest(change)
    return tf.cast(local.solve(tf.cast(right, change.dtype)), tf.float32)

  covariance = None
  if settings.covariance is not None:
    covariance = 2.0 * solve(tf.eye(flat.size, dtype=change.dtype))
  return Solution(
    problem.weights(change),
    covariance,
    lambda right: solve(right[:, None])[:, 0],
  )


def _newton(
  max_steps: int, problem: '_Direct | _ByProducts', start: tf.Tensor
) -> tf.Tensor:
  """Take Newton steps, each with a line search.

  Returns:
    The minimum; NaN if the steps end far from it, as with too small a ridge.
  """

  def stepped(
    step: tf.Tensor, change: tf.Tensor, *_: tf.Tensor
  ) -> tuple[tf.Tensor, ...]:
    nearest = problem.nearest(change)
    way = nearest.solve(nearest.gradient[:, None])[:, 0]
    promised = tf.reduce_sum(way * nearest.gradient)
    before = problem.value(change)
    rounding = tf.cast(_PROMISED, change.dtype) * tf.abs(before)

    def is_long(number: tf.Tensor, length: tf.Tensor) -> tf.Tensor:
      after = problem.value(change - length * way)
      enough = before - _SHARE * length * promised + rounding
      return (number < _HALVINGS) & ~(after <= enough)

    _, length = tf.while_loop(
      is_long,
      lambda number, length: (number + 1, length / 2.0),
      (tf.constant(0), tf.ones([], change.dtype)),
      parallel_iterations=1,
    )
    # After the last step one more is computed, and not taken.
    length = tf.where(step < max_steps, length, 0.0)
    return step + 1, change - length * way, promised, rounding

  infinite = tf.constant(float('inf'), start.dtype)
  first = tf.abs(problem.value(start))
  _, change, promised, rounding = tf.while_loop(
    lambda step, _, promised, rounding: (
      (step <= max_steps) & ~(promised <= rounding)
    ),
    stepped,
    (tf.constant(0), start, infinite, tf.zeros([], start.dtype)),
    parallel_iterations=1,
  )
  accepted = tf.maximum(rounding, tf.cast(_ACCEPTED, start.dtype) * first)
  return tf.where(promised <= accepted, change, float('nan'))


class _Problem:
  """The objective as a function of a change of the weights from the mean."""

  def __init__(
    self,
    objective: Objective,
    linearized: affine.Linearized,
    flat: affine.Flat,
    mean: tf.Tensor,
    precision: tf.Tensor,
  ):
    """Store the parts; see `minimize`."""
    self._objective = objective
    self._linearized = linearized
    self._flat = flat
    self._mean = mean
    self._precision = tf.cast(precision, linear_systems.dtype())

  def moved(self, change: tf.Tensor) -> tf.Tensor:
    """Return how predictions move by a change of the weights."""
    raise NotImplementedError

  def weights(self, change: tf.Tensor) -> tf.Tensor:
    """Return the weights after a change, float32 `[weights]`."""
    return tf.cast(tf.cast(self._mean, change.dtype) + change, tf.float32)

  def predictions(self, change: tf.Tensor) -> Any:
    """Return the predictions after a change of the weights."""
    return affine.added(self._linearized.predictions, self.moved(change))

  def value(self, change: tf.Tensor) -> tf.Tensor:
    """Return the objective after a change of the weights, with the prior."""
    value = self._objective.value(
      self.weights(change), self.predictions(change)
    )
    return tf.cast(value, change.dtype) + penalty(self._precision, change)

  def _rest(
    self, change: tf.Tensor
  ) -> tuple[tf.GradientTape, tf.Tensor, tf.Tensor]:
    """Return a tape, the weights, and the gradient of the rest by them."""
    vector = self.weights(change)
    tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
    with tape, tf.GradientTape(watch_accessed_variables=False) as inner:
      tape.watch(vector)
      inner.watch(vector)
      moved = tf.cast(vector - self._mean, change.dtype)
      rest = self._objective.of_rest(vector, self.predictions(moved))
      slopes = inner.gradient(
        rest, vector, unconnected_gradients=tf.UnconnectedGradients.ZERO
      )
    return tape, vector, slopes


class _Direct(_Problem):
  """The objective with its Jacobian and Hessian as matrices."""

  def __init__(self, *parts: Any):
    """Compute the Jacobian; see `minimize`."""
    super().__init__(*parts)
    self._jacobian = self._linearized.jacobian()

  def moved(self, change: tf.Tensor) -> tf.Tensor:
    """Return how predictions move by a change of the weights."""
    return tf.reduce_sum(self._jacobian * change[:, None, None], 0)

  def nearest(self, change: tf.Tensor) -> _Local:
    """Return the quadratic function that is nearest to the objective."""
    slopes, curvature, is_exact = derivatives(
      self._objective, self.predictions(change)
    )
    slopes = tf.cast(slopes, change.dtype)
    curvature = tf.cast(curvature, change.dtype)
    jacobian = self._jacobian
    if slopes.shape[1] == 1:
      curved = jacobian * curvature[:, :, 0]
    else:
      curved = tf.einsum('wnk,nkm->wnm', jacobian, curvature)
    size = self._flat.size
    by_number = [size, -1]
    hessian = tf.matmul(
      tf.reshape(jacobian, by_number),
      tf.reshape(curved, by_number),
      transpose_b=True,
    )
    gradient = tf.reduce_sum(jacobian * slopes, [1, 2])
    gradient += 2.0 * _times(self._precision, change)
    precision = self._precision
    if precision.shape.rank == 0:
      precision *= tf.eye(size, dtype=change.dtype)
    hessian += 2.0 * precision
    if self._objective.rest is not None:
      tape, vector, by_rest = self._rest(change)
      gradient += tf.cast(by_rest, change.dtype)
      found = tape.jacobian(
        by_rest, vector, unconnected_gradients=tf.UnconnectedGradients.ZERO
      )
      hessian += tf.cast(found, change.dtype)
      is_exact &= tracing.first_dependent([found], [vector]) is None
    return _Local(
      gradient, lambda right: linear_systems.solve(hessian, right), is_exact
    )


class _ByProducts(_Problem):
  """The objective with derivatives as products, for many weights."""

  def moved(self, change: tf.Tensor) -> tf.Tensor:
    """Return how predictions move by a change of the weights."""
    return self._linearized.pushed(tf.cast(change, tf.float32))

  def nearest(self, change: tf.Tensor) -> _Local:
    """Return the quadratic function that is nearest to the objective."""
    slopes, curvature, is_exact = derivatives(
      self._objective, self.predictions(change)
    )
    pulled = self._linearized.pulled
    gradient = tf.cast(pulled(slopes), change.dtype)
    gradient += 2.0 * _times(self._precision, change)
    rest = None
    if self._objective.rest is not None:
      rest = self._rest(change)
      gradient += tf.cast(rest[2], change.dtype)
      is_exact = False

    def product(way: tf.Tensor) -> tf.Tensor:
      small = tf.cast(way, tf.float32)
      curved = tf.linalg.matvec(curvature, self._linearized.pushed(small))
      found = pulled(curved)
      if rest is not None:
        tape, vector, by_rest = rest
        found += tape.gradient(
          by_rest,
          vector,
          output_gradients=small,
          unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
      return tf.cast(found, change.dtype) + 2.0 * _times(self._precision, way)

    def solve(right: tf.Tensor) -> tf.Tensor:
      found = linear_systems.solve_by_products(product, right[:, 0])
      return found[:, None]

    return _Local(gradient, solve, is_exact)


def penalty(precision: tf.Tensor, change: tf.Tensor) -> tf.Tensor:
  """Return what a prior adds to the objective.

  Args:
    precision: The prior's precision, a number or a matrix.
    change: The weights less the prior's mean, `[weights]`.
  """
  return tf.reduce_sum(change * _times(precision, change))


def _times(precision: tf.Tensor, change: tf.Tensor) -> tf.Tensor:
  if precision.shape.rank == 0:
    return precision * change
  return tf.linalg.matvec(precision, change)


def derivatives(
  objective: Objective, predictions: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, bool]:
  """Return the derivatives of the sum of losses by prediction.

  Returns:
    The gradient `[examples, numbers]`; the Hessian `[examples, numbers,
    numbers]`; and True if the Hessian does not depend on predictions.
  """
  numbers = tf.identity(affine.by_example(predictions))
  with tf.GradientTape(watch_accessed_variables=False) as outer:
    outer.watch(numbers)
    with tf.GradientTape(watch_accessed_variables=False) as inner:
      inner.watch(numbers)
      loss = objective.loss(affine.shaped(numbers, predictions))
    slopes = inner.gradient(loss.total, numbers)
  if slopes.shape[1] == 1:
    curvature = outer.gradient(slopes, numbers)
    curvature = None if curvature is None else curvature[:, :, None]
  else:
    curvature = outer.batch_jacobian(slopes, numbers)
  if curvature is None:
    curvature = tf.zeros_like(numbers)[:, :, None]
  is_exact = tracing.first_dependent([curvature], [numbers]) is None
  return slopes, curvature, is_exact
