"""Keras metrics as pure functions: their variables become arguments.

A metric's state is a list of tensors, which begin with zeros and are summed
over clients.
"""

import collections
from collections.abc import Callable, Sequence
import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial import keras_functions
from tff_partial import keras_variables
from tff_partial import tracing
from tff_partial.keras_variables import ModelError

# One list of tensors a metric.
MetricState = collections.OrderedDict[str, list[tf.Tensor]]

# Measured of every client beside the model's metrics.
LOSS = 'loss'
COUNTS = ('num_examples', 'num_clients', 'num_not_finite')


def _undecorated(method: Callable[..., Any]) -> Callable[..., Any]:
  """The method without the graph function that Keras may wrap around it."""
  while hasattr(method, '__original_wrapped__'):
    method = method.__original_wrapped__
  return method


def expand(tensor: tf.Tensor, rank: int, what: str) -> tf.Tensor:
  """Gives a tensor the rank of others, of which it has the first axes.

  Raises:
    ModelError: If it has more axes; `what` names the tensor.
  """
  missing = rank - tensor.shape.rank
  if missing < 0:
    raise ModelError(
      f'{what} has {tensor.shape.rank} axes, batch included, where the losses '
      f'have {rank}. A loss function returns one loss per example, or one for '
      'each of its steps if these are weighted or masked.'
    )
  ones = tf.ones([missing], tf.int32)
  return tf.reshape(tensor, tf.concat([tf.shape(tensor), ones], 0))


class PureMetrics:
  """Keras metrics whose variables are arguments, sample weights included.

  The released `tff.learning.metrics.create_functional_metric_fns` drops sample
  weights, without which padding would be measured.
  """

  def __init__(
    self,
    build: Callable[[], Sequence[tf.keras.metrics.Metric]],
    labels: Any,
    predictions: Any,
    weight: tf.TensorSpec,
  ):
    """Looks at the metrics once.

    Args:
      build: Makes the metrics, anew with every call.
      labels: Specs of one example's label.
      predictions: Specs of one example's prediction.
      weight: Spec of one example's weight.

    Raises:
      ModelError: If names repeat, or if a state could not be summed.
    """
    self.build = build
    self._specs = (labels, predictions, weight)
    # In a graph of its own Keras counts metrics without a name from the start,
    # so that they have the same names in every program.
    with tf.__internal__.FuncGraph('metrics').as_default():
      metrics = list(build())
    for metric in metrics:
      if not isinstance(metric, tf.keras.metrics.Metric):
        raise ModelError(
          'The callable given as `metrics` must return a list of Keras '
          f'metrics, found {metric!r} in it.'
        )
    self.names = tuple(metric.name for metric in metrics)
    repeated = [n for n, k in collections.Counter(self.names).items() if k > 1]
    if repeated or {LOSS, *COUNTS} & set(self.names):
      raise ModelError(
        f'Metrics need distinct names other than {[LOSS, *COUNTS]}, found '
        f'{list(self.names)}. Pass `name=` to the metrics.'
      )
    self._initial = collections.OrderedDict(
      (metric.name, self._first_state(metric)) for metric in metrics
    )

  def _first_state(self, metric: tf.keras.metrics.Metric) -> list[np.ndarray]:
    """A metric's state before any example, which padding does not change."""
    with tf.init_scope():
      self._measure_padding(metric)
      state = [variable.numpy() for variable in metric.variables]
    # Zeros are no example, so that what is measured of them may be no number.
    if any(np.nan_to_num(value).any() for value in state):
      raise ModelError(
        f'The state of metric {metric.name!r} does not begin with zeros or is '
        'changed by an example of weight 0, so that it would count padding and '
        'could not be summed over clients. Honour `sample_weight`, and sum.'
      )
    return [np.zeros_like(value) for value in state]

  def _measure_padding(self, metric: tf.keras.metrics.Metric) -> None:
    """Measures an example without weight; some metrics wait for shapes."""
    labels, predictions, weight = tf.nest.map_structure(
      lambda spec: tf.zeros([1, *spec.shape], spec.dtype), self._specs
    )
    _undecorated(metric.update_state)(labels, predictions, sample_weight=weight)

  def initial_state(self) -> MetricState:
    """Returns the metrics' states before any example."""
    return collections.OrderedDict(
      (name, [tf.constant(value) for value in values])
      for name, values in self._initial.items()
    )

  def update(
    self, state: MetricState, labels: Any, predictions: Any, weight: tf.Tensor
  ) -> MetricState:
    """Returns the states after a batch; `weight` is 0 for padding."""
    mask = keras_functions.mask_of(predictions)
    if mask is not None:
      weight = expand(weight, mask.shape.rank, 'The weight of examples')
      weight *= tf.cast(mask, weight.dtype)
    result = collections.OrderedDict()
    for position, name in enumerate(self.names):
      metric, variables = self._metric_on(position, state[name])
      update = _undecorated(metric.update_state)
      update(labels, predictions, sample_weight=weight)
      try:
        result[name] = [tf.identity(v.value()) for v in variables]
      except ValueError as error:
        raise ModelError(
          f'Metric {name!r} assigns its state inside a condition or a loop, '
          'where a pure function cannot. Compute the value there, and assign '
          'it afterwards.'
        ) from error
    return result

  def finalizers(self) -> collections.OrderedDict[str, Any]:
    """Metric name to the function from its state to its value."""
    found = collections.OrderedDict()
    for position, name in enumerate(self.names):
      specs = [
        tf.TensorSpec(value.shape, value.dtype) for value in self._initial[name]
      ]
      with tf.init_scope():
        result = tracing.traced(
          functools.partial(self._result, position), specs
        )
      found[name] = tf.function(
        lambda state, result=result: result(list(state)), autograph=False
      )
    return found

  def _metric_on(
    self, position: int, state: Sequence[tf.Tensor]
  ) -> tuple[tf.keras.metrics.Metric, list[keras_variables.StateTensor]]:
    """Builds one metric on tensors, which stand in its variables' order."""

    def answer(next_creator: Callable[..., Any], **request: Any) -> Any:
      del next_creator  # A tensor takes the variable's place.
      return keras_variables.stand_in(request)

    with keras_variables.answering_variables(answer):
      metric = self.build()[position]
      if len(metric.variables) < len(state):
        self._measure_padding(metric)
    variables = list(metric.variables)
    for variable, tensor in zip(variables, state, strict=True):
      variable.assign(tensor)
    return metric, variables

  def _result(self, position: int, state: Sequence[tf.Tensor]) -> tf.Tensor:
    metric, _ = self._metric_on(position, state)
    return _undecorated(metric.result)()
