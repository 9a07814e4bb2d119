"""Memories: clients answer by what they remember of their support examples.

No weight has to be trained. A client keeps a key of each of its support
examples, or of each step of these if they are sequences, together with the
class that was right there. Asked for a prediction, it compares the key of what
is asked with all that it keeps (`recall`). Keys that are alike vote for their
classes: with the weights w_i of the keys, and their classes y_i,

    p_memory(y) = sum_i w_i [y_i = y] / sum_i w_i,
    p(y) = share p_memory(y) + (1 - share) p_model(y).

The logarithms of p take the place of the model's logits. Where no key votes,
the model's logits stay as they are, bit for bit.

The votes of a batch take as many numbers as its predictions times the client's
keys; a smaller `measure_batch_size` saves memory.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, NamedTuple

import tensorflow as tf

from tff_partial import client_state
from tff_partial import errors
from tff_partial import evaluation
from tff_partial import tiers
from tff_partial.contexts import batch_of
from tff_partial.contexts import ClientContext
from tff_partial.contexts import Compute
from tff_partial.data import splits
from tff_partial.model import models
from tff_partial.phases import Phase

# (a batch of the model's inputs, makes the model's outputs for it) -> keys
# `[batch, ..., size]`.
KeysFn = Callable[[Any, Callable[[], Any]], tf.Tensor]
# Labels `[batch, ...]` -> integers from 0 on, and whether they are classes at
# all, bool, both `[batch, ...]`.
TargetsFn = Callable[[Any], tuple[tf.Tensor, tf.Tensor]]

_MEMORY = 'memory'


class MemoryOptionError(errors.UserError, ValueError):
  """Raised for memories that cannot be."""


class Memory(NamedTuple):
  """What a client remembers of its support examples.

  Attributes:
    keys: `[keys, size]`.
    classes: int32 `[keys]`: which class was right there; 0 if it is no key.
    is_key: bool `[keys]`; false for padding and for what has no class.
  """

  keys: tf.Tensor
  classes: tf.Tensor
  is_key: tf.Tensor


class Votes(NamedTuple):
  """What a memory says to some questions.

  Attributes:
    weights: float32 `[questions, keys]`, at least 0: how much each key counts;
      those that are none count for nothing.
    share: float32 `[questions]`, at least 0 and below 1: the share of the
      memory in the answer.
  """

  weights: tf.Tensor
  share: tf.Tensor


class Measuring(evaluation.Measuring, total=False):
  """What builders hand on to `build_memory_evaluation`."""

  tune: Phase | None


def classes_from_zero(labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Labels that are classes themselves; negative ones are none.

  Args:
    labels: Integers `[batch, ...]`.
  """
  return labels, labels >= 0


def check_mixing(mixing: float) -> None:
  """Check how much of an answer comes from a memory.

  Raises:
    MemoryOptionError: If it is no share, or all: what a memory never saw would
      have the probability 0, whose logarithm is no number.
  """
  if not 0.0 <= mixing < 1.0:
    raise MemoryOptionError(
      f'mixing={mixing}: the share of the memory in an answer is a number from '
      '0 to less than 1.'
    )


def build_memory_evaluation(
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
  """Clients remember their support set, and answer by it on the query set.

  Args:
    model: A model that predicts logits of classes.
    keys: What is remembered of examples, and compared with new ones.
    recall: (keys `[questions, size]` of what is asked, the memory) -> how much
      each key of the memory counts.
    logits: The name of the logits among the model's outputs; None if they are
      its only output.
    targets: Which classes are right, from labels.
    personalise: How clients rebuild local weights before, on the support set;
      not at all by default.
    tune: How clients then tune global weights, all of them or those that it
      names, likewise; not at all by default. Keys that the model makes are
      made by the tuned one.
    split: Support and query set; the two halves by default.
    measure_batch_size: Examples measured at a time; changes no result.

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
    MemoryOptionError: If the model has no such logits, or keys or classes are
      not one for each of its predictions.
  """
  _check_shapes(model, keys, logits, targets)
  support, query = split or splits.halves()

  def remember(client: ClientContext) -> Memory:
    classes, counts = targets(client.examples['y'])
    for given in (client.is_real, client.examples['weight'] > 0.0):
      counts = tf.logical_and(counts, _like(given, counts))
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
    said = _chosen(outputs, logits)
    votes = recall(_in_rows(keys(batch.x, lambda: outputs)), memory)
    mixed = _mixed(_in_rows(said), votes, memory)
    mixed = tf.ensure_shape(tf.reshape(mixed, tf.shape(said)), said.shape)
    mixed = tf.cast(mixed, said.dtype)
    return mixed if logits is None else {**outputs, logits: mixed}

  before = [
    dataclasses.replace(phase, train=(tier,), on=support, measured=False)
    for phase, tier in ((personalise, tiers.LOCAL), (tune, tiers.GLOBAL))
    if phase is not None
  ]
  return evaluation.build_evaluation(
    model,
    client_state=client_state.stateless,
    work=[
      *before,
      Compute(_MEMORY, remember, on=support),
      Phase(
        train=(),
        on=query,
        batch_size=measure_batch_size,
        measured=True,
        answer=answer,
      ),
    ],
  )


def _mixed(logits: tf.Tensor, votes: Votes, memory: Memory) -> tf.Tensor:
  """Logarithms of mixed probabilities, or the logits where no key votes.

  Args:
    logits: `[questions, classes]`.
    votes: How much each key counts.
    memory: The keys.
  """
  logits = tf.cast(logits, tf.float32)
  weights = tf.where(memory.is_key, votes.weights, 0.0)
  # A row of questions for each key: XLA adds rows much faster than numbers.
  of_classes = tf.transpose(
    tf.math.unsorted_segment_sum(
      tf.transpose(weights), memory.classes, logits.shape[-1]
    )
  )
  total = tf.reduce_sum(of_classes, -1, keepdims=True)
  share = votes.share[:, tf.newaxis]
  remembered = share * tf.math.divide_no_nan(of_classes, total)
  by_model = tf.math.log1p(-share) + tf.nn.log_softmax(logits)
  # log(a + b) of logarithms, which also holds where a or b is too small.
  is_known = remembered > 0.0
  by_memory = tf.math.log(tf.where(is_known, remembered, 1.0))
  both = tf.maximum(by_model, by_memory) + tf.math.log1p(
    tf.exp(-tf.abs(by_model - by_memory))
  )
  mixed = tf.where(is_known, both, by_model)
  return tf.where(tf.reduce_any(is_known, -1, keepdims=True), mixed, logits)


def _in_rows(tensor: tf.Tensor) -> tf.Tensor:
  """`[batch, ..., size]` as `[rows, size]`."""
  return tf.reshape(tensor, [-1, tensor.shape[-1]])


def _like(of_examples: tf.Tensor, of_steps: tf.Tensor) -> tf.Tensor:
  """What holds for examples `[batch]`, or for their steps, for all steps."""
  missing = of_steps.shape.rank - of_examples.shape.rank
  ones = tf.ones([missing], tf.int32)
  shape = tf.concat([tf.shape(of_examples), ones], 0)
  return tf.broadcast_to(tf.reshape(of_examples, shape), tf.shape(of_steps))


def _chosen(outputs: Any, name: str | None) -> Any:
  return outputs if name is None else outputs[name]


def check_output(
  model: models.PartialModel, argument: str, name: str | None
) -> tf.TensorSpec:
  """Find one of a model's outputs.

  Args:
    model: The model.
    argument: What names it, for the message.
    name: Its name; None if it is the only one.

  Returns:
    Its spec for one example.

  Raises:
    MemoryOptionError: If there is none.
  """
  found = model.prediction_spec
  if name is not None:
    found = found.get(name) if isinstance(found, Mapping) else None
  if not isinstance(found, tf.TensorSpec) or not found.shape.rank:
    raise MemoryOptionError(
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
  """Check that there are a key and a class for each prediction."""

  def one(specs: Any) -> Any:
    return tf.nest.map_structure(
      lambda spec: tf.zeros([1, *(n or 1 for n in spec.shape)], spec.dtype),
      specs,
    )

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
      raise MemoryOptionError(
        f'The model has predictions {wanted} for one example, but {what} are '
        f'{shape.as_list()}. A memory needs a key and a class for each '
        'prediction.'
      )
