"""Output classes of a next-word model.

The authors of FedRecon predict all tokens, including buckets of unknown words
(`ALL`). Their metric leaves out unknown targets, but not unknown answers, so
that a model loses accuracy wherever its best answer is a bucket, and the more
so the fewer buckets share the probability of unknown words. With `VOCABULARY` a
model predicts only words and the end of a sentence; it learns nothing from
unknown targets, but still reads unknown words.
"""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tasks.next_word.options import ALL as ALL
from tasks.next_word.options import OUTPUTS as OUTPUTS
from tasks.next_word.options import VOCABULARY as VOCABULARY
from tasks.next_word.tokens import Tokens


class Targets(NamedTuple):
  """The correct classes.

  Attributes:
    ids: int32 `[batch, time]`; 0 where no class is correct.
    counted: bool `[batch, time]`; True where a class is correct.
  """

  ids: tf.Tensor
  counted: tf.Tensor


class Classes(NamedTuple):
  """The classes that a model predicts.

  Attributes:
    tokens: The sizes that determine all ids.
    output: `ALL`: the class of a token is its id; or `VOCABULARY`: the class of
      word w is w - 1, and the end of a sentence is the last class.
  """

  tokens: Tokens
  output: str = ALL

  @property
  def number(self) -> int:
    """Number of classes."""
    if self.output == ALL:
      return self.tokens.total
    return self.tokens.words + 1

  @property
  def words(self) -> slice:
    """Classes of the words of the vocabulary."""
    first = 1 if self.output == ALL else 0
    return slice(first, first + self.tokens.words)

  def targets(self, labels: tf.Tensor) -> Targets:
    """Return all targets that a model can predict.

    Padding is not a target, nor are unknown words with the output `VOCABULARY`.

    Args:
      labels: Ids of tokens, int32 `[batch, time]`.
    """
    if self.output == ALL:
      return Targets(labels, tf.not_equal(labels, self.tokens.pad))
    is_end = tf.equal(labels, self.tokens.end)
    words = self.word_targets(labels)
    return Targets(
      tf.where(is_end, self.tokens.words, words.ids),
      tf.logical_or(is_end, words.counted),
    )

  def word_targets(self, labels: tf.Tensor) -> Targets:
    """Return the targets that are words of the vocabulary.

    Args:
      labels: Ids of tokens, int32 `[batch, time]`.
    """
    is_word = tf.logical_and(labels >= 1, labels <= self.tokens.words)
    return Targets(tf.where(is_word, labels - 1 + self.words.start, 0), is_word)

  def cross_entropies(
    self, labels: tf.Tensor, logits: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute the cross-entropy of each target.

    Args:
      labels: Ids of tokens, int32 `[batch, time]`.
      logits: float32 `[batch, time, classes]`.

    Returns:
      float32 `[batch, time]`, 0 where no target counts; and a mask, bool
      `[batch, time]`, of the targets that count.
    """
    targets = self.targets(labels)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets.ids, logits)
    return tf.where(targets.counted, losses, 0.0), targets.counted


def build_loss(
  classes: Classes,
) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
  """Build the loss: the cross-entropy of each target, from logits.

  As in Keras's own losses that ignore a class, the result carries a mask of the
  targets that count, over which training takes the mean: all tokens of a batch
  count alike, not all sentences. The loss of a batch without targets is 0.

  Args:
    classes: The classes of the model.
  """

  def cross_entropy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    losses, counted = classes.cross_entropies(labels, logits)
    losses._keras_mask = counted
    return losses

  return cross_entropy
