"""Memories: predictions from keys of a client's support examples.

No weight has to be trained. A client stores a key of each of its support
examples, or of each of their steps if they are sequences, together with the
correct class. To predict, it compares the query's key with all stored keys
(`recall`). Similar keys vote for their classes: with the weights w_i of the
keys, and their classes y_i,

    p_memory(y) = sum_i w_i [y_i = y] / sum_i w_i,
    p(y) = share p_memory(y) + (1 - share) p_model(y).

The logarithms of p replace the model's logits. If no key votes, the model's
logits do not change, bit for bit.

The votes of a batch are an array of its predictions times the client's keys; a
smaller `measure_batch_size` saves memory.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tff_partial import evaluation
from tff_partial import tiers
from tff_partial.contexts import batch_of
from tff_partial.contexts import ClientContext
from tff_partial.contexts import Compute
from tff_partial.data import splits
from tff_partial.errors import SettingError
from tff_partial.model import models
from tff_partial.model import tracing
from tff_partial.phases import changed
from tff_partial.phases import Phase

# (a batch of the model's inputs, () -> the model's outputs for it) -> keys
# `[batch, ..., size]`.
KeysFn = Callable[[Any, Callable[[], Any]], tf.Tensor]
# Labels `[batch, ...]` -> classes, integers from 0 on, and the mask of valid
# ones, bool, both `[batch, ...]`.
TargetsFn = Callable[[Any], tuple[tf.Tensor, tf.Tensor]]

_MEMORY = 'memory'


class Memory(NamedTuple):
  """Keys and classes of a client's support examples.

  Attributes:
    keys: `[keys, size]`.
    classes: int32 `[keys]`, the correct classes; 0 if `is_key` is false.
    is_key: bool `[keys]`; false for padding and for labels without a class.
  """

  keys: tf.Tensor
  classes: tf.Tensor
  is_key: tf.Tensor


class Votes(NamedTuple):
  """Votes of a memory for some questions.

  Attributes:
    weights: float32 `[questions, keys]`, at least 0: the weight of each key;
      ignored where `is_key` is false.
    share: float32 `[questions]`, at least 0 and below 1: the share of the
      memory in the answer.
  """

  weights: tf.Tensor
  share: tf.Tensor


def classes_from_zero(labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Return labels as classes; negative ones are invalid.

  Args:
    labels: Integers `[batch, ...]`.
  """
  return labels, labels >= 0


def check_mixing(mixing: float) -> None:
  """Check the share of a memory in an answer.

  Raises:
    SettingError: If it is not from 0 to less than 1: with 1, classes that
      a memory never saw would have the probability 0, whose logarithm is
      infinite.
  """
  if not 0.0 <= mixing < 1.0:
    raise SettingError(
      f'mixing={mixing}: the share of the memory in an answer is a number from '
      '0 to less than 1.'
    )


def memory_evaluation(
  model: models.PartialModel,
  *,
  keys: KeysFn,
  recall: Callable[[tf.Tensor, Memory], Votes],
  logits: str | None = None,
  targets: TargetsFn = classes_from_zero,
  personalise: Phase | None = None,
  tune: Phase | None = None,
  split: splits.Split | None = None,
  measure_batch_size: int = 100,
) -> evaluation.Evaluation:
  """Build an evaluation on the query set with a memory of the support set.

  Args:
    model: A model that predicts logits of classes.
    keys: Makes keys of examples, to store and to compare.
    recall: (keys `[questions, size]`, the memory) -> votes of its keys.
    logits: The name of the logits among the model's outputs; None if they are
      its only output.
    targets: Makes correct classes from labels.
    personalise: How clients reconstruct local weights before, on the support
      set; not at all by default.
    tune: How clients then tune global weights, all of them or those that it
      names, on the support set; not at all by default. Keys that the model
      makes are made by the tuned model.
    split: Support and query set; the two halves by default.
    measure_batch_size: Examples measured at a time; does not change the result.

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
    SettingError: If the model has no such logits, or there is not one key
      and one class for each of its predictions.
  """
  _check_shapes(model, keys, logits, targets)

  def remember(client: ClientContext) -> Memory:
    classes, counts = targets(client.examples['y'])
    counts &= _like(client.example_weights > 0.0, counts)
    is_key = tf.reshape(counts, [-1])
    classes = tf.reshape(tf.cast(classes, tf.int32), [-1])
    return Memory(
      _in_rows(keys(client.examples['x'], client.predict)),
      tf.where(is_key, classes, 0),
      is_key,
    )

  def answer(client: ClientContext) -> Any:
    batch, memory = batch_of(client), client.computed[_MEMORY]
    outputs = batch.predictions
    said = outputs if logits is None else outputs[logits]
    votes = recall(_in_rows(keys(batch.x, lambda: outputs)), memory)
    mixed = _mixed(_in_rows(said), votes, memory)
    mixed = tf.ensure_shape(tf.reshape(mixed, tf.shape(said)), said.shape)
    mixed = tf.cast(mixed, said.dtype)
    return mixed if logits is None else {**outputs, logits: mixed}

  before = [
    changed(phase, train=(tier,), measured=False)
    for phase, tier in ((personalise, tiers.LOCAL), (tune, tiers.GLOBAL))
    if phase is not None
  ]
  return evaluation.build_query_evaluation(
    model,
    before=[*before, Compute(_MEMORY, remember)],
    predict_fn=answer,
    split=split,
    measure_batch_size=measure_batch_size,
  )


def _mixed(logits: tf.Tensor, votes: Votes, memory: Memory) -> tf.Tensor:
  """Return logs of mixed probabilities, or the logits if no key votes.

  Both are `[questions, classes]`.
  """
  logits = tf.cast(logits, tf.float32)
  weights = tf.where(memory.is_key, votes.weights, 0.0)
  # A row of questions for each key: XLA adds rows much faster than scalars.
  of_classes = tf.transpose(
    tf.math.unsorted_segment_sum(
      tf.transpose(weights), memory.classes, logits.shape[-1]
    )
  )
  total = tf.reduce_sum(of_classes, -1, keepdims=True)
  share = votes.share[:, tf.newaxis]
  remembered = share * tf.math.divide_no_nan(of_classes, total)
  by_model = tf.math.log1p(-share) + tf.nn.log_softmax(logits)
  # log(a + b) from logarithms, also valid if a or b is too small.
  is_known = remembered > 0.0
  by_memory = tf.math.log(tf.where(is_known, remembered, 1.0))
  both = tf.maximum(by_model, by_memory) + tf.math.log1p(
    tf.exp(-tf.abs(by_model - by_memory))
  )
  mixed = tf.where(is_known, both, by_model)
  return tf.where(tf.reduce_any(is_known, -1, keepdims=True), mixed, logits)


def _in_rows(tensor: tf.Tensor) -> tf.Tensor:
  """Reshape `[batch, ..., size]` to `[rows, size]`."""
  return tf.reshape(tensor, [-1, tensor.shape[-1]])


def _like(of_examples: tf.Tensor, of_steps: tf.Tensor) -> tf.Tensor:
  """Broadcast values of examples `[batch]`, or of their steps, to all steps."""
  missing = of_steps.shape.rank - of_examples.shape.rank
  ones = tf.ones([missing], tf.int32)
  shape = tf.concat([tf.shape(of_examples), ones], 0)
  return tf.broadcast_to(tf.reshape(of_examples, shape), tf.shape(of_steps))


def check_output(
  model: models.PartialModel, argument: str, name: str | None
) -> tf.TensorSpec:
  """Find one of a model's outputs.

  Args:
    model: The model.
    argument: The argument that names it, for the error message.
    name: The output's name; None if it is the only one.

  Returns:
    The output's spec for one example.
  """
  found = model.prediction_spec
  if name is not None:
    found = found.get(name) if isinstance(found, Mapping) else None
  if not isinstance(found, tf.TensorSpec) or not found.shape.rank:
    raise SettingError(
      f'{argument}={name!r}: the model has no such output, but '
      f'{model.prediction_spec}. Name one of several outputs, each a vector of '
      'an example or of a step; None is for the only one.'
    )
  return found


def _check_shapes(
  model: models.PartialModel,
  keys: KeysFn,
  logits: str | None,
  targets: TargetsFn,
) -> None:
  """Check that there is one key and one class for each prediction."""
  one = tracing.one_example
  wanted = one(check_output(model, 'logits', logits)).shape[:-1].as_list()
  outputs = one(model.prediction_spec)
  classes, counts = targets(one(model.example_spec['y']))
  found = {
    'keys': keys(one(model.example_spec['x']), lambda: outputs).shape[:-1],
    'classes': classes.shape,
    'what counts of them': counts.shape,
  }
  for what, shape in found.items():
    if shape.as_list() != wanted:
      raise SettingError(
        f'The model has predictions {wanted} for one example, but {what} are '
        f'{shape.as_list()}. A memory needs a key and a class for each '
        'prediction.'
      )
