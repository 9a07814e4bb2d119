"""Losses and the accuracy metric of FedEmbed's model."""

from typing import Any

import tensorflow as tf

# Columns of an example's label.
IS_LIKED, KIND, SUB_POPULATION, IS_PROTOTYPICAL = range(4)


# Outputs of the model with all heads.
LIKED, LIKED_GLOBALLY, TYPE = 'liked', 'liked_globally', 'type'


_cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits


def logits_of(predictions: Any) -> tf.Tensor:
  """Return the logits of liked or not: the only output, or one of several."""
  return predictions[LIKED] if isinstance(predictions, dict) else predictions


def preference_loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
  """Compute the cross-entropy of liked or not, from labels `[batch, 4]`."""
  return _cross_entropy(labels[:, IS_LIKED], logits_of(predictions))


def fed_embed_loss(labels: tf.Tensor, predictions: Any) -> tf.Tensor:
  """Add `L_C` of the sub-population's head and `L_M` of the type head."""
  return preference_loss(labels, predictions) + _type_loss(labels, predictions)


def _type_loss(labels: tf.Tensor, predictions: Any) -> tf.Tensor:
  return _cross_entropy(labels[:, KIND], predictions[TYPE])


def global_loss(labels: tf.Tensor, predictions: Any) -> tf.Tensor:
  return _cross_entropy(labels[:, IS_LIKED], predictions[LIKED_GLOBALLY])


def shared_loss(labels: tf.Tensor, predictions: Any) -> tf.Tensor:
  return global_loss(labels, predictions) + _type_loss(labels, predictions)


def clustered_loss(labels: tf.Tensor, predictions: Any) -> tf.Tensor:
  return preference_loss(labels, predictions) + global_loss(labels, predictions)


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class PreferenceAccuracy(tf.keras.metrics.SparseCategoricalAccuracy):
  """Share of examples whose like or dislike is predicted."""

  def update_state(
    self,
    y_true: tf.Tensor,
    y_pred: tf.Tensor,
    sample_weight: tf.Tensor | None = None,
  ) -> Any:
    """Add a batch of labels `[batch, 4]`; only the first is predicted."""
    return super().update_state(
      y_true[:, IS_LIKED], logits_of(y_pred), sample_weight
    )
