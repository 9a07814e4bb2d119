"""Models of single characters: linear, dense, convolutional.

All of them take images as stored, uint8 `[batch, height, width]`, and scale ink
to 1. Layers have names for `local=`: `head` is the last one, and the layers
before it represent the image.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tasks.emnist.options import CNN as CNN
from tasks.emnist.options import DENSE as DENSE
from tasks.emnist.options import FED_AVG_CNN as FED_AVG_CNN
from tasks.emnist.options import LINEAR as LINEAR
from tasks.emnist.options import MODELS as MODELS
from tasks.errors import OptionError
from tasks.images import HEAD
from tasks.images import scaled_input
from tasks.task import FEATURES
from tasks.task import LOGITS
from tff_partial.layers import PrivateVector
from tff_partial.model import keras_models
from tff_partial.model import models

# The layer of a vector of the user's own that is added to features.
SHIFT = 'shift'


def build_classifier(
  kind: str, shape: tuple[int, int], num_classes: int, ink: int
) -> tf.keras.Model:
  """Build a model from images to logits, `[batch, num_classes]`.

  Args:
    kind: LINEAR is multinomial logistic regression; DENSE has one hidden layer
      of 100 rectified units (both as in pFedMe's experiments); CNN two
      convolutions of 32 and 64 filters, a pool of 2 x 2 and a dense layer of
      128; FED_AVG_CNN is PFLlib's, with convolutions of 5 x 5, a pool after
      each, and a dense layer of 512.
    shape: Height and width of an image.
    num_classes: Number of characters.
    ink: The value of full ink.

  Raises:
    OptionError: If images are too small for FED_AVG_CNN.
  """
  if kind == FED_AVG_CNN and min(shape) < 16:
    raise OptionError(
      f'--model={kind}: images of {shape[0]} x {shape[1]} are too small for '
      'its convolutions and pools, which need 16 x 16. Choose cnn.'
    )
  layers = tf.keras.layers
  flat: list[tf.keras.layers.Layer] = [layers.Flatten(name='flatten')]
  bodies: dict[str, Callable[[], list[tf.keras.layers.Layer]]] = {
    LINEAR: lambda: flat,
    DENSE: lambda: [*flat, layers.Dense(100, activation='relu', name='hidden')],
    CNN: lambda: [
      layers.Conv2D(32, 3, activation='relu', name='convolution_1'),
      layers.Conv2D(64, 3, activation='relu', name='convolution_2'),
      layers.MaxPool2D(2, name='pool'),
      *flat,
      layers.Dense(128, activation='relu', name='hidden'),
    ],
    FED_AVG_CNN: lambda: [
      layers.Conv2D(32, 5, activation='relu', name='convolution_1'),
      layers.MaxPool2D(2, name='pool_1'),
      layers.Conv2D(64, 5, activation='relu', name='convolution_2'),
      layers.MaxPool2D(2, name='pool_2'),
      *flat,
      layers.Dense(512, activation='relu', name='hidden'),
    ],
  }
  images, values = scaled_input(shape, ink)
  for layer in [*bodies[kind](), layers.Dense(num_classes, name=HEAD)]:
    values = layer(values)
  return tf.keras.Model(images, values, name=kind)


def build_with_prototypes(
  build: Callable[[], tf.keras.Model],
  *,
  is_shifted: bool = False,
  **options: Any,
) -> models.PartialModel:
  """Build FedProto's model, without local weights; FedDBE's with a vector.

  Its outputs are LOGITS, and FEATURES, the input of the last layer.

  Args:
    build: Builds the model to logits.
    is_shifted: True if the last layer reads the sum of these and of the vector
      SHIFT.
    **options: Other arguments of `from_keras`.
  """
  loss = classification_loss()

  def with_features() -> tf.keras.Model:
    classifier = build()
    head = classifier.get_layer(HEAD)
    features = head.input
    outputs = {LOGITS: classifier.output, FEATURES: features}
    if is_shifted:
      shift = PrivateVector(features.shape[-1], initializer='zeros', name=SHIFT)
      outputs[LOGITS] = head(features + shift(features))
    return tf.keras.Model(classifier.input, outputs, name=classifier.name)

  return keras_models.from_keras(
    with_features,
    local=SHIFT if is_shifted else None,
    loss=lambda labels, outputs: loss.call(labels, outputs[LOGITS]),
    labels=tf.TensorSpec([], tf.int32),
    metrics=lambda: [LogitsAccuracy('accuracy')],
    **options,
  )


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class LogitsAccuracy(tf.keras.metrics.SparseCategoricalAccuracy):
  """Share of examples whose class is predicted, from LOGITS."""

  def update_state(
    self, y_true: tf.Tensor, y_pred: Any, sample_weight: tf.Tensor | None = None
  ) -> Any:
    return super().update_state(y_true, y_pred[LOGITS], sample_weight)


def classification_loss() -> tf.keras.losses.Loss:
  """Cross-entropy of logits, for integer labels."""
  return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def build_classification_metrics() -> list[tf.keras.metrics.Metric]:
  return [tf.keras.metrics.SparseCategoricalAccuracy('accuracy')]
