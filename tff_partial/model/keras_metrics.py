"""Keras metrics as pure functions: their variables become arguments.

A metric's state is a list of tensors, which start from zeros and are summed
over clients.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import functools
import itertools
import types
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tff_partial.arguments import spelling
from tff_partial.model import keras_3
from tff_partial.model import keras_functions
from tff_partial.model import keras_variables
from tff_partial.model import losses
from tff_partial.model import metric_inputs
from tff_partial.model import outputs
from tff_partial.model import tracing
from tff_partial.model import undefined_metrics
from tff_partial.model.keras_variables import ModelError

# Metrics as for Keras's `compile`, or a callable that makes them.
Metrics: TypeAlias = (
  Callable[[], Any]
  | Mapping[Any, Any]
  | Sequence[str | tf.keras.metrics.Metric | Callable[[Any, Any], tf.Tensor]]
  | str
  | tf.keras.metrics.Metric
)
# Metric name to a list of tensors.
MetricState = collections.OrderedDict[str, list[tf.Tensor]]

# Measured for each client in addition to the model's metrics.
LOSS = 'loss'
# Losses that layers add for their weights, if any.
REGULARIZATION = 'regularization'
COUNTS = ('num_examples', 'num_clients', 'num_not_finite')
# Types of a metric's settings.
_PLAIN = (type(None), bool, int, float, str, np.generic, np.ndarray)


def _undecorated(method: Callable[..., Any]) -> Callable[..., Any]:
  """Return the method without Keras's graph function around it, if any."""
  while hasattr(method, '__original_wrapped__'):
    method = method.__original_wrapped__
  return method


def _is_class(given: Any) -> bool:
  return isinstance(given, type) and issubclass(given, tf.keras.metrics.Metric)


def _copy(metric: tf.keras.metrics.Metric) -> tf.keras.metrics.Metric:
  """Copy a metric without the state of its measurements."""
  try:
    copied = type(metric).from_config(metric.get_config())
    if not losses.name_in_keras(metric):
      _check_settings(metric, copied)
    return copied
  except Exception as error:
    raise ModelError(
      f'Metric {metric.name!r} ({type(metric).__name__}) cannot be copied from '
      f'its configuration: {tracing.reason(error)} Pass a callable that makes '
      'the metrics: `metrics=lambda: [...]`.'
    ) from error


def _check_settings(given: Any, copied: Any) -> None:
  """Raise an error if a setting of a metric is not in its configuration."""
  for name in sorted(set(vars(given)) - set(vars(tf.keras.metrics.Mean()))):
    values = [tf.nest.flatten(getattr(m, name, None)) for m in (given, copied)]
    if not all(itertools.starmap(_alike, itertools.zip_longest(*values))):
      raise ValueError(f'Its {name!r} is not in `get_config`.')


def _alike(one: Any, other: Any) -> bool:
  """Return False if two settings differ; objects are not compared."""
  if isinstance(one, types.FunctionType) and one is not other:
    held = [getattr(f, '__closure__', None) or () for f in (one, other)]
    inner = ([cell.cell_contents for cell in cells] for cells in held)
    is_same = one.__code__ is getattr(other, '__code__', None)
    return is_same and all(map(_alike, *inner))
  return not isinstance(one, _PLAIN) or repr(one) == repr(other)


class PureMetrics:
  """Keras metrics whose variables are arguments, with sample weights.

  The released `tff.learning.metrics.create_functional_metric_fns` drops sample
  weights, so padding would be measured.
  """

  def __init__(
    self,
    metrics: Metrics,
    labels: Any,
    predictions: Any,
    weight: tf.TensorSpec,
    places: outputs.Places = None,
  ):
    """Build the metrics once, for specs of one example.

    Raises:
      ModelError: If names repeat, or if a state cannot be summed.
    """
    self._specs = (labels, predictions, weight)
    self._places = places
    self._given = metrics
    # Their states have one dtype, that of today's policy.
    self.build = keras_variables.keeping_policy(self._build)
    # In a separate graph Keras numbers unnamed metrics from the start, so their
    # names are the same in every program.
    with tf.__internal__.FuncGraph('metrics').as_default():
      self.names = tuple(metric.name for metric in self.build())
    repeated = [n for n, k in collections.Counter(self.names).items() if k > 1]
    taken = [REGULARIZATION, LOSS, *COUNTS]
    if repeated or set(taken) & set(self.names):
      raise ModelError(
        f'Metrics need distinct names other than {taken}, found '
        f'{list(self.names)}. Pass `name=` to the metrics.'
      )
    spelling.check_names('The metric', self.names, ModelError)
    with tf.init_scope():  # Tensors that metrics hold have values here.
      built = self.build()
    self._initial = collections.OrderedDict(
      (name, self._first_state(metric))
      for name, metric in zip(self.names, built, strict=True)
    )

  def _build(self) -> list[tf.keras.metrics.Metric]:
    """Make the metrics."""
    given = keras_3.as_keras_2(self._given)
    if isinstance(given, (str, tf.keras.metrics.Metric)) or _is_class(given):
      given = [given]
    elif callable(given):
      given = given()
    by_output = given if isinstance(given, Mapping) else {None: given}
    built = []
    for output, wanted in by_output.items():
      if isinstance(given, Mapping) and not isinstance(wanted, (list, tuple)):
        wanted = [wanted]
      if not isinstance(wanted, (list, tuple)):
        raise ModelError(
          'Pass `metrics` as a list of Keras metrics, or as a callable that '
          f'returns one; found a {type(given).__name__}.'
        )
      for one in wanted:
        specs = outputs.part_of(output, *self._specs[:2], self._places)
        metric = self._metric(one, specs)
        if output is not None:
          metric._name = f'{output}_{metric.name}'
        # The output that it measures; None for the structure of all.
        metric._of_output = output
        built.append(metric)
    return built

  def _metric(self, given: Any, specs: Any) -> tf.keras.metrics.Metric:
    """Make a separate metric, as Keras's `compile` would."""
    given = keras_3.as_keras_2(given)
    if isinstance(given, str):
      return self._named(given, specs)
    if _is_class(given):
      return given()
    if isinstance(given, tf.keras.metrics.Metric):
      is_made = callable(self._given) and self._given is not given
      return given if is_made else _copy(given)
    if callable(given):
      name = getattr(given, '__name__', type(given).__name__).strip('<>')
      return tf.keras.metrics.MeanMetricWrapper(given, name=name)
    raise ModelError(
      f'{given!r} is no metric. Pass Keras metrics, their names, or functions '
      'of labels and predictions.'
    )

  def _named(self, name: str, specs: Any) -> tf.keras.metrics.Metric:
    """Make a metric by its Keras name; `accuracy` depends on the labels."""
    kinds = {'accuracy': 'accuracy', 'acc': 'accuracy'}
    kinds |= {'crossentropy': 'crossentropy', 'ce': 'crossentropy'}
    identifier = name
    if name in kinds:
      identifier = f'{_kind_of_labels(specs)}_{kinds[name]}'
    try:
      found = tf.keras.metrics.get(identifier)
      if found == name:  # Keras 3 also takes 'r2_score' for 'R2Score'.
        known = {kind.lower(): kind for kind in dir(tf.keras.metrics)}
        found = tf.keras.metrics.get(known.get(name.replace('_', '')))
    except (ValueError, TypeError):
      found = None
    if not callable(found):
      raise ModelError(
        f"Keras has no metric {name!r}. Pass one of its names, such as 'mae' "
        "or 'accuracy', a Keras metric, or a function of labels and "
        'predictions.'
      )
    if isinstance(found, tf.keras.metrics.Metric):
      return found
    return tf.keras.metrics.MeanMetricWrapper(found, name=name)

  def _first_state(self, metric: tf.keras.metrics.Metric) -> list[np.ndarray]:
    """Return a metric's initial state; refuse one that is no sum."""
    with tf.init_scope():
      self._refuse_scalar(metric)
      # Some metrics wait for shapes.
      self._measure(metric, *map(tracing.one_example, self._specs))
      state = [variable.numpy() for variable in metric.variables]
      # Zeros are no real example, so their measurement may be NaN.
      if any(np.nan_to_num(value).any() for value in state):
        raise ModelError(
          f'The state of metric {metric.name!r} does not begin with zeros or '
          'is changed by an example of weight 0, so that it would count '
          'padding and could not be summed over clients. Honour '
          '`sample_weight`, and sum.'
        )
      zeros = [np.zeros_like(value) for value in state]
      self._check_counts(metric, zeros)
    return zeros

  def _refuse_scalar(self, metric: tf.keras.metrics.Metric) -> None:
    """Refuse a function that returns one number for a whole batch."""
    # Subclasses may choose among outputs before the function sees them.
    if type(metric) is not tf.keras.metrics.MeanMetricWrapper:
      return
    specs = outputs.part_of(metric._of_output, *self._specs[:2], self._places)
    labels, predictions = (
      tf.cast(tracing.one_example(spec), metric.dtype) for spec in specs
    )
    labels, predictions = losses.aligned(labels, predictions, False)
    if not tf.rank(metric._fn(labels, predictions, **metric._fn_kwargs)):
      raise ModelError(
        f'Metric {metric.name!r} must return one number per example, it '
        'returned a scalar. Leave the averaging to the metric.'
      )

  def _check_counts(
    self, metric: tf.keras.metrics.Metric, zeros: Sequence[np.ndarray]
  ) -> None:
    """Refuse a metric that sums no examples, or that sees those of weight 0."""
    # In labels, in predictions, and the weight.
    example, padding = (1.0, 0.5, 1.0), (0.0, 0.25, 0.0)

    def close(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
      pairs = zip(one, other, strict=True)
      return all(np.allclose(a, b, equal_nan=True) for a, b in pairs)

    try:
      one, two, padded = (
        self._counted(metric, zeros, *batches)
        for batches in ([[example]], [[example]] * 2, [[example, padding]])
      )
    except (ValueError, TypeError, tf.errors.OpError):
      return  # Ones may be no label.
    finally:
      self._counted(metric, zeros)
    if not close([2.0 * value for value in one], two):
      raise ModelError(
        f'The state of metric {metric.name!r} is no sum: two equal examples '
        'do not count twice as much as one, so that it cannot be summed over '
        'clients. Keep sums in it, such as a total and a count.'
      )
    if not close(one, padded):
      raise ModelError(
        f'Metric {metric.name!r} reads other examples of a batch, also those '
        'of weight 0, which fill batches up. Compute it of each example: '
        '[batch, 1] with labels or weights of [batch] makes [batch, batch].'
      )

  def _counted(
    self,
    metric: tf.keras.metrics.Metric,
    zeros: Sequence[np.ndarray],
    *batches: Sequence[Sequence[float]],
  ) -> list[np.ndarray]:
    """Return a metric's state after batches of examples of equal numbers."""
    for variable, zero in zip(metric.variables, zeros, strict=True):
      variable.assign(zero)
    for batch in batches:
      parts = [list(map(tracing.one_example, self._specs, e)) for e in batch]
      joined = tf.nest.map_structure(lambda *same: tf.concat(same, 0), *parts)
      self._measure(metric, *joined)
    return [variable.numpy() for variable in metric.variables]

  def _measure(
    self,
    metric: tf.keras.metrics.Metric,
    labels: Any,
    predictions: Any,
    weight: tf.Tensor,
  ) -> None:
    """Update a metric's variables."""
    output, places = metric._of_output, self._places
    weight = outputs.weight_of(output, labels, weight, places)
    labels, predictions = outputs.part_of(output, labels, predictions, places)
    mask = keras_functions.mask_of(predictions)
    if mask is not None:
      weight = losses.expand(weight, mask.shape.rank, 'The weight of examples')
      weight *= tf.cast(mask, weight.dtype)
    labels, predictions, weight = metric_inputs.aligned(
      metric, labels, predictions, weight
    )
    _undecorated(metric.update_state)(labels, predictions, sample_weight=weight)
    if not getattr(metric, 'num_regressors', 1):
      metric.num_samples.assign(0)  # R2Score reads it for adjusted ones alone.

  def initial_state(self) -> MetricState:
    """Return the metrics' states before any example."""
    return collections.OrderedDict(
      (name, [tf.constant(value) for value in values])
      for name, values in self._initial.items()
    )

  def update(
    self, state: MetricState, labels: Any, predictions: Any, weight: tf.Tensor
  ) -> MetricState:
    """Return the states after a batch; `weight` is 0 for padding."""
    result = collections.OrderedDict()
    for name, (metric, variables) in self._on(state).items():
      self._measure(metric, labels, predictions, weight)
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
    """Return metric name to the function from its state to its value."""
    found = collections.OrderedDict()
    for name, initial in self._initial.items():
      specs = [tf.TensorSpec(value.shape, value.dtype) for value in initial]
      with tf.init_scope():
        result = tracing.traced(functools.partial(self._result, name), specs)
      found[name] = tf.function(
        lambda state, result=result: result(list(state)), autograph=False
      )
    return found

  def _on(
    self, states: Mapping[str, list[tf.Tensor]]
  ) -> dict[
    str, tuple[tf.keras.metrics.Metric, list[keras_variables.StateTensor]]
  ]:
    """Build metrics on their states, each with its variables in their order."""
    with keras_variables.answering_variables(
      lambda _, **request: keras_variables.stand_in(request)
    ):
      named = zip(self.names, self.build(), strict=True)
      built = {name: metric for name, metric in named if name in states}
      for name, metric in built.items():
        if len(metric.variables) < len(states[name]):
          self._measure(metric, *map(tracing.one_example, self._specs))
    found = {n: (metric, list(metric.variables)) for n, metric in built.items()}
    for name, (_, variables) in found.items():
      for variable, tensor in zip(variables, states[name], strict=True):
        variable.assign(tensor)
    return found

  def _result(self, name: str, state: list[tf.Tensor]) -> tf.Tensor:
    metric, _ = self._on({name: state})[name]
    value = _undecorated(metric.result)()
    return undefined_metrics.or_nan(metric, value)


def _kind_of_labels(specs: Any) -> str:
  """Return the kind of accuracy that Keras would use for these labels."""
  labels, predictions = specs
  if not isinstance(predictions, tf.TensorSpec) or not isinstance(
    labels, tf.TensorSpec
  ):
    raise ModelError(
      'The model has several outputs or labels, so that it is not clear '
      'which accuracy is meant. Pass metrics in a callable.'
    )
  if not predictions.shape.rank or predictions.shape[-1] == 1:
    return 'binary'
  is_number = labels.shape.rank < predictions.shape.rank
  if is_number or labels.shape[-1] == 1:
    return 'sparse_categorical'
  return 'categorical'
