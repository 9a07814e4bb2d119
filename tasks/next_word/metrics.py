"""Metrics of next-word prediction, as sums over tokens of any batches.

| name | targets | possible answers |
|---|---|---|
| `accuracy` | words of the vocabulary | all classes of the model |
| `accuracy_in_vocabulary` | the same | words of the vocabulary |
| `accuracy_top_3` | the same | the three most likely of them |
| `perplexity` | all that the model can predict | all classes |
| `num_tokens` | all but padding | - |

`accuracy` is that of the FedRecon paper: without padding, beginning and end of
a sentence, and unknown words as targets. The end of a sentence and buckets
remain possible answers, which are then wrong. `perplexity` is the exponential
of the mean cross-entropy; the end of a sentence counts, and unknown words as
their buckets, so that it is comparable only between models with the same number
of buckets. Without targets a metric is NaN, and left out of a mean over
clients.
"""

from typing import Any

import tensorflow as tf

from tasks.next_word import losses as losses_lib
from tasks.next_word.tokens import Tokens
from tff_partial.model import losses


def rank(logits: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
  """Count the other classes that are at least as likely as the right one.

  A tie counts against the right class, so that a model whose logits are all
  equal or NaN is never right. Under XLA on a CPU counting takes a tenth of the
  time of `tf.argmax`, which it computes one class after another.

  Args:
    logits: float `[batch, time, classes]`.
    ids: int32 `[batch, time]`: the right classes.

  Returns:
    int32 `[batch, time]`, 0 where the right class is the most likely.
  """
  score = tf.gather(logits, ids, batch_dims=2)[..., tf.newaxis]
  is_as_likely = tf.logical_not(logits < score)
  # The sum includes the right class.
  return tf.reduce_sum(tf.cast(is_as_likely, tf.int32), -1) - 1


class _OverTokens(tf.keras.metrics.Metric):
  """Mean over the targets that count; its state is two sums.

  Subclasses implement `measure`, from labels, int32 `[batch, time]`, and
  logits, float32 `[batch, time, classes]`, to a value for each target, float32
  `[batch, time]`, and a mask of those that count, bool `[batch, time]`.
  """

  def __init__(self, tokens: Tokens, name: str, **kwargs: Any):
    super().__init__(name=name, **kwargs)
    self.tokens = Tokens(*tokens)
    self.total = self.add_weight('total', initializer='zeros')
    self.count = self.add_weight('count', initializer='zeros')

  def measure(
    self, labels: tf.Tensor, logits: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor]:
    raise NotImplementedError

  def update_state(
    self, labels: Any, outputs: Any, sample_weight: Any = None
  ) -> None:
    values, counted = self.measure(labels, losses_lib.logits_of(outputs))
    weight = tf.cast(counted, values.dtype)
    if sample_weight is not None:
      weight *= _of_tokens(sample_weight, values.dtype)
    self.total.assign_add(tf.reduce_sum(values * weight))
    self.count.assign_add(tf.reduce_sum(weight))

  def result(self) -> tf.Tensor:
    return self.total / self.count

  def get_config(self) -> dict[str, Any]:
    return {**super().get_config(), 'tokens': self.tokens}


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class Accuracy(_OverTokens):
  """Share of target words whose class is among the most likely ones."""

  def __init__(
    self,
    tokens: Tokens,
    name: str = 'accuracy',
    *,
    in_vocabulary: bool = False,
    top: int = 1,
    **kwargs: Any,
  ):
    """Make the metric.

    Args:
      tokens: As for all of these metrics, the sizes that determine all ids.
      name: Its name.
      in_vocabulary: True if only words of the vocabulary are possible answers.
      top: Number of most likely answers to accept.
      **kwargs: Arguments of every metric.
    """
    super().__init__(tokens, name, **kwargs)
    self.in_vocabulary = in_vocabulary
    self.top = top

  def measure(
    self, labels: tf.Tensor, logits: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor]:
    counted = losses_lib.is_word(self.tokens, labels)
    ids = tf.where(counted, labels, 0)
    if self.in_vocabulary:
      logits = logits[..., 1 : self.tokens.words + 1]
      ids = tf.where(counted, ids - 1, 0)
    is_right = rank(logits, ids) < self.top
    return tf.cast(is_right, tf.float32), counted

  def get_config(self) -> dict[str, Any]:
    own = {'in_vocabulary': self.in_vocabulary, 'top': self.top}
    return {**super().get_config(), **own}


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class Perplexity(_OverTokens):
  """The exponential of the mean cross-entropy."""

  def measure(
    self, labels: tf.Tensor, logits: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor]:
    return losses_lib.cross_entropies(self.tokens, labels, logits)

  def result(self) -> tf.Tensor:
    return tf.exp(super().result())


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class NumTokens(tf.keras.metrics.Metric):
  """Number of targets except padding, in examples with a weight."""

  def __init__(self, pad: int = 0, name: str = 'num_tokens', **kwargs: Any):
    super().__init__(name=name, **kwargs)
    self.pad = pad
    self.count = self.add_weight('count', initializer='zeros', dtype=tf.int64)

  def update_state(
    self, labels: Any, outputs: Any, sample_weight: Any = None
  ) -> None:
    del outputs
    counted = tf.not_equal(labels, self.pad)
    if sample_weight is not None:
      weight = _of_tokens(sample_weight, tf.float32)
      counted = tf.logical_and(counted, weight > 0)
    self.count.assign_add(tf.math.count_nonzero(counted))

  def result(self) -> tf.Tensor:
    return tf.identity(self.count)

  def get_config(self) -> dict[str, Any]:
    return {**super().get_config(), 'pad': self.pad}


def _of_tokens(weight: Any, dtype: tf.DType) -> tf.Tensor:
  """Return weights of examples or tokens with an axis for tokens."""
  weight = tf.cast(weight, dtype)
  return losses.expand(weight, 2, 'The weight of examples')


def build_metrics(tokens: Tokens) -> list[tf.keras.metrics.Metric]:
  """Build all metrics of the table above."""
  return [
    Accuracy(tokens),
    Accuracy(tokens, 'accuracy_in_vocabulary', in_vocabulary=True),
    Accuracy(tokens, 'accuracy_top_3', in_vocabulary=True, top=3),
    Perplexity(tokens, 'perplexity'),
    NumTokens(tokens.pad),
  ]
