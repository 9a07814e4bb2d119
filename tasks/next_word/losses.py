"""The classes and the loss of a next-word model.

The class of a token is its id: as with the authors of FedRecon, models predict
all tokens, including buckets of unknown words. Their metric leaves out unknown
targets, but not unknown answers, so that a model loses accuracy wherever its
best answer is a bucket, and the more so the fewer buckets share the probability
of unknown words.

`tokens` are the sizes that determine all ids, `labels` the ids of tokens, int32
`[batch, time]`, and `logits` float32 `[batch, time, ids]`.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tasks.next_word.tokens import Tokens
from tasks.task import LOGITS


def logits_of(outputs: Any) -> tf.Tensor:
  """Return the logits: the only output, or that beside features."""
  return outputs[LOGITS] if isinstance(outputs, dict) else outputs


def is_target(tokens: Tokens, labels: tf.Tensor) -> tf.Tensor:
  """Return where there is a target: everywhere but at padding."""
  return tf.not_equal(labels, tokens.pad)


def is_word(tokens: Tokens, labels: tf.Tensor) -> tf.Tensor:
  """Return where the target is a word of the vocabulary."""
  return tf.logical_and(labels >= 1, labels <= tokens.words)


def cross_entropies(
  tokens: Tokens, labels: tf.Tensor, logits: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
  """Compute the cross-entropy of each target.

  Returns:
    float32 `[batch, time]`, 0 where no target counts; and a mask, bool
    `[batch, time]`, of the targets that count.
  """
  counted = is_target(tokens, labels)
  losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
  return tf.where(counted, losses, 0.0), counted


def build_loss(tokens: Tokens) -> Callable[[tf.Tensor, Any], tf.Tensor]:
  """Build the loss: the cross-entropy of each target, from the outputs.

  As in Keras's own losses that ignore a class, the result carries a mask of the
  targets that count, over which training takes the mean: all tokens of a batch
  count alike, not all sentences. The loss of a batch without targets is 0.
  """

  def cross_entropy(labels: tf.Tensor, outputs: Any) -> tf.Tensor:
    losses, counted = cross_entropies(tokens, labels, logits_of(outputs))
    losses._keras_mask = counted
    return losses

  return cross_entropy
