"""Checks of a model by tracing it once, so that errors are raised now."""

import collections
from collections.abc import Iterator
import contextlib
from typing import Any

import tensorflow as tf

from tff_partial import tiers
from tff_partial.data import examples
from tff_partial.data import id_ranges
from tff_partial.model import keras_functions
from tff_partial.model import keras_refusals
from tff_partial.model import losses
from tff_partial.model import table_ids
from tff_partial.model import tracing
from tff_partial.model.keras_variables import ModelError

# A batch size that no axis of an example has.
_BATCH = 1_000_003


@contextlib.contextmanager
def explaining(model: Any) -> Iterator[None]:
  """Explain errors of a loss or metric by the specs of its arguments."""
  try:
    yield
  except ModelError:
    raise
  except (ValueError, TypeError, tf.errors.OpError) as error:
    raise ModelError(
      'The loss or a metric cannot be computed from labels '
      f'{model.example_spec["y"]} and predictions {model.prediction_spec}: '
      f'{tracing.reason(error)} Pass the spec of one label with '
      '`labels=tf.TensorSpec(...)` if the one assumed here is wrong.'
    ) from error


def check_loss(model: Any, of: Any, mask: tf.TensorSpec | None) -> None:
  """Check that losses and metrics compare an example with its own label alone.

  They are traced with a batch size that no other axis has: labels that would
  broadcast over the batch then fail, or the result has two axes of that size.
  Metrics are sums over examples, so only a loss can be asked if it computes
  with all of them.

  Raises:
    ModelError: If labels and predictions do not match, or the loss of an
      example depends on others.
  """

  def mixing(reason: str) -> ModelError:
    return ModelError(
      'The loss or a metric would compare labels with the predictions of other '
      f'examples of the batch: one label is {model.example_spec["y"]} and one '
      f'prediction {model.prediction_spec}. {reason} Give both the same shape, '
      'with `labels=tf.TensorSpec(...)` or in the function.'
    )

  specs = (
    *(model.example_spec['y'], model.prediction_spec, model.replaced_spec),
    *(model.example_spec['weight'], tf.TensorSpec([], tf.bool)),
  )

  def placed(size: int | None = None) -> Any:
    made = tf.nest.map_structure(
      lambda spec: tracing.placeholder(spec, size), specs
    )
    if mask is not None:
      made[1]._keras_mask = tracing.placeholder(mask, size)
    return made

  with tf.__internal__.FuncGraph('batch').as_default() as graph:
    labels, predictions, measured, weight, is_real = placed(_BATCH)
    if model.replaced_spec is model.prediction_spec:
      measured = predictions
    try:
      model.loss(labels, predictions, weight, is_real, of=of)
      model.metrics.update(
        model.metrics.initial_state(), labels, measured, weight
      )
    except ModelError:
      raise
    except (ValueError, TypeError, tf.errors.OpError) as error:
      reason = tracing.reason(error).replace(str(_BATCH), 'batch')
      raise mixing(reason) from error
  for operation in graph.get_operations():
    if tracing.broadcasts_over(operation, _BATCH):
      raise mixing(f'{operation.type} broadcasts.')
  with tf.__internal__.FuncGraph('open').as_default():
    labels, predictions, _, weight, is_real = placed()
    with explaining(model):
      value = model.loss(labels, predictions, weight, is_real, of=of)
    keras_refusals.refuse_joining(
      'The loss', value.losses, [labels, predictions]
    )


def trace(
  model: Any,
) -> tuple[tuple[str, ...], id_ranges.Ids, tf.TensorSpec | None, bool]:
  """Trace a model's predictions, loss and metrics.

  Returns:
    The names of the variables that the model uses only for row lookups; the
    inputs that are row ids; the spec of the mask over an example's steps, if a
    layer sets one; and true if layers add losses of weights.

  Raises:
    ModelError: If one cannot be computed, or is no pure function.
  """
  with tf.__internal__.FuncGraph('check').as_default() as graph:
    batch = examples.map_fields(tracing.placeholder, model.example_spec)
    seed = tf.compat.v1.placeholder(tf.int32, [2])
    weights = {t: model.initial_weights(t, seed) for t in model.tiers}
    frozen = model.frozen_weights()
    with keras_refusals.explaining_tensors():
      predictions, regularization = model.predict(
        weights, frozen, batch['x'], training=True, seed=seed
      )
    is_real = tf.compat.v1.placeholder(tf.bool, [None])
    losses.warn_of_logits(model, predictions)
    with explaining(model):
      model.loss(batch['y'], predictions, batch['weight'], is_real)
      model.metrics.update(
        model.metrics.initial_state(), batch['y'], predictions, batch['weight']
      )
    if tracing.depends_on(regularization, tf.nest.flatten(batch['x'])):
      raise ModelError(
        'A loss that a layer adds with `add_loss` depends on its inputs, '
        'and so on padded examples. Add losses of weights only, or compute '
        'the term in the loss function.'
      )
    if not any(v.state for v in model.variables):
      # Where layers change a state, training has no padding.
      keras_refusals.refuse_joining('The model', predictions, batch['x'])
  tracing.refuse_hidden_draws(graph, model.spec.constants)
  if any(outside.dtype == tf.resource for outside, _ in graph.captures):
    raise ModelError(
      'The model reads a variable or a table that is none of its own. Make '
      'it inside the callable given to `from_keras`, as an attribute of the '
      'layer that reads it, or read a constant.'
    )
  mask = keras_functions.mask_of(predictions)
  tables = collections.ChainMap(frozen, *weights.values())
  return (
    tuple(
      name
      for named in weights.values()
      for name, tensor in named.items()
      if {operation.type for operation in tensor.consumers()} == {'GatherV2'}
    ),
    table_ids.find(
      tables, dict(examples.leaves(batch['x'], 'x')), model.specs(tiers.LOCAL)
    ),
    None if mask is None else tf.TensorSpec(mask.shape[1:], mask.dtype),
    bool(regularization),
  )
