"""Metrics of next-word prediction: sums over tokens, for any batch.

| name | over which targets | which answers |
|---|---|---|
| `accuracy` | words of the vocabulary | all classes of the model |
| `accuracy_in_vocabulary` | the same | words of the vocabulary |
| `accuracy_top_3` | the same | the three likeliest such words |
| `perplexity` | all that the model can be right about | all classes |
| `num_tokens` | all but padding | - |

`accuracy` is that of the FedRecon paper: without padding, beginning and end of
a sentence, and unknown words as targets. The end of a sentence and buckets stay
possible answers, which are then wrong. `perplexity` is the exponential of the
mean cross-entropy; the end of a sentence counts. With the output `ALL` unknown
words count, too, as the buckets that they are, so that it can be compared among
models with as many buckets only; with `VOCABULARY` they do not. Without
targets a metric is no number, and left out of a mean over clients.
"""

from typing import Any

import tensorflow as tf

from tasks.next_word.classes import Classes
from tasks.next_word.tokens import Tokens
from tff_partial.model import keras_metrics


def rank(logits: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
  """Count the other classes that are at least as likely as the right one.

  A tie counts against the right class, so that a model that says the same of
  all classes, or no number, is never right. Under XLA on a CPU counting takes a
  tenth of the time of `tf.argmax`, which it computes one class after another.

  Args:
    logits: float `[batch, time, classes]`.
    ids: int32 `[batch, time]`: which class is right.

  Returns:
    int32 `[batch, time]`, 0 where the right class is the likeliest.
  """
  score = tf.gather(logits, ids, batch_dims=2)[..., tf.newaxis]
  is_as_likely = tf.logical_not(logits < score)
  # The right class is among them.
  return tf.reduce_sum(tf.cast(is_as_likely, tf.int32), -1) - 1


class _OverTokens(tf.keras.metrics.Metric):
  """The mean of something over targets that count.

  Subclasses say of what in `measure`, from labels, int32 `[batch, time]`, and
  logits, float32 `[batch, time, classes]`: a value for each target, float32
  `[batch, time]`, and whether it counts, bool `[batch, time]`.
  """

  def __init__(self, classes: Classes, name: str, **kwargs: Any):
    """Make the metric.

    Args:
      classes: What the model predicts.
      name: Its name.
      **kwargs: What every metric takes.
    """
    super().__init__(name=name, **kwargs)
    tokens, output = classes
    self.classes = Classes(Tokens(*tokens), output)
    self.total = self.add_weight('total', initializer='zeros')
    self.count = self.add_weight('count', initializer='zeros')

  def measure(
    self, labels: tf.Tensor, logits: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor]:
    raise NotImplementedError

  def update_state(
    self, labels: Any, logits: Any, sample_weight: Any = None
  ) -> None:
    values, counted = self.measure(labels, logits)
    weight = tf.cast(counted, values.dtype)
    if sample_weight is not None:
      weight *= _of_tokens(sample_weight, values.dtype)
    self.total.assign_add(tf.reduce_sum(values * weight))
    self.count.assign_add(tf.reduce_sum(weight))

  def result(self) -> tf.Tensor:
    return self.total / self.count

  def get_config(self) -> dict[str, Any]:
    return {**super().get_config(), 'classes': self.classes}


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class Accuracy(_OverTokens):
  """How often the likeliest class is right, where it should be a word."""

  def __init__(self, classes: Classes, name: str = 'accuracy', **kwargs: Any):
    super().__init__(classes, name, **kwargs)

  def measure(
    self, labels: tf.Tensor, logits: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor]:
    targets = self.classes.word_targets(labels)
    is_right = tf.equal(rank(logits, targets.ids), 0)
    return tf.cast(is_right, tf.float32), targets.counted


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class AccuracyInVocabulary(_OverTokens):
  """How often the right word is among the likeliest words of the vocabulary."""

  def __init__(
    self,
    classes: Classes,
    top: int = 1,
    name: str = 'accuracy_in_vocabulary',
    **kwargs: Any,
  ):
    """Make the metric.

    Args:
      classes: What the model predicts.
      top: How many words are the likeliest.
      name: Its name.
      **kwargs: What every metric takes.
    """
    super().__init__(classes, name, **kwargs)
    self.top = top

  def measure(
    self, labels: tf.Tensor, logits: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor]:
    targets, words = self.classes.word_targets(labels), self.classes.words
    ids = tf.where(targets.counted, targets.ids - words.start, 0)
    is_right = rank(logits[..., words], ids) < self.top
    return tf.cast(is_right, tf.float32), targets.counted

  def get_config(self) -> dict[str, Any]:
    return {**super().get_config(), 'top': self.top}


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class Perplexity(_OverTokens):
  """The exponential of the mean cross-entropy."""

  def __init__(self, classes: Classes, name: str = 'perplexity', **kwargs: Any):
    super().__init__(classes, name, **kwargs)

  def measure(
    self, labels: tf.Tensor, logits: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor]:
    return self.classes.cross_entropies(labels, logits)

  def result(self) -> tf.Tensor:
    return tf.exp(super().result())


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class NumTokens(tf.keras.metrics.Metric):
  """Counts the targets that are no padding, of examples with a weight."""

  def __init__(self, pad: int = 0, name: str = 'num_tokens', **kwargs: Any):
    """Make the metric.

    Args:
      pad: The id of padding.
      name: Its name.
      **kwargs: What every metric takes.
    """
    super().__init__(name=name, **kwargs)
    self.pad = pad
    self.count = self.add_weight('count', initializer='zeros', dtype=tf.int64)

  def update_state(
    self, labels: Any, logits: Any, sample_weight: Any = None
  ) -> None:
    del logits
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
  """Weights of examples, or of their tokens, with an axis for tokens."""
  weight = tf.cast(weight, dtype)
  return keras_metrics.expand(weight, 2, 'The weight of examples')


def build_metrics(classes: Classes) -> list[tf.keras.metrics.Metric]:
  """Build all metrics of the table above.

  Args:
    classes: What the model predicts.
  """
  return [
    Accuracy(classes),
    AccuracyInVocabulary(classes),
    AccuracyInVocabulary(classes, top=3, name='accuracy_top_3'),
    Perplexity(classes),
    NumTokens(classes.tokens.pad),
  ]
