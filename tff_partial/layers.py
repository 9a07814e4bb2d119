"""Keras layers for models of a single user: the client that runs them."""

from typing import Any

import tensorflow as tf


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class PrivateVector(tf.keras.layers.Layer):
  """The client's own vector, the same for all examples of a batch.

  Maps any tensor `[batch, ...]` to float32 `[batch, units]`; it reads only the
  batch size of its input. All its weights are the client's own:

      vector = PrivateVector(32, name='user')(text)
      from_keras(build, local='user', ...)

  With a learned default the vector is the sum of two weights: `default`, which
  all clients train together, and `own`, this client's deviation from it. The
  deviation is initialized to zero, so that a client that never took part starts
  from the default. Only the deviation is local:

      vector = PrivateVector(32, learned_default=True, name='user')(text)
      from_keras(build, local='user/own', ...)

  A step moves both weights along the same gradient, so that by default each
  moves half of the way. A regularizer such as `l2(0.01)` pulls deviations back
  to zero and so moves what clients share into the default: when training has
  converged, the mean of the deviations is zero. It applies to each client's
  vector separately, as section 3.2 of the FURL paper requires.

  The deviation is never sent. But a client's update of the default reveals how
  its own vector moved, to anyone who sees that update by itself and not only
  the mean of many; use a secure or private aggregator where that matters.
  """

  def __init__(
    self,
    units: int,
    *,
    learned_default: bool = False,
    initializer: Any = 'uniform',
    regularizer: Any = None,
    **kwargs: Any,
  ):
    """Initialize the layer.

    Args:
      units: Length of the vector.
      learned_default: True if clients share a default that they learn together.
      initializer: Keras initializer of the vector; of the default, if there is
        one.
      regularizer: Keras regularizer of the client's own weight, or None.
      **kwargs: Arguments of all layers, such as the name.
    """
    super().__init__(**kwargs)
    self.units = units
    self.learned_default = learned_default
    self.initializer = tf.keras.initializers.get(initializer)
    self.regularizer = tf.keras.regularizers.get(regularizer)

  def build(self, input_shape: tf.TensorShape) -> None:
    """Create the weights."""
    if self.learned_default:
      self.default = self.add_weight(
        name='default', shape=[self.units], initializer=self.initializer
      )
    self.own = self.add_weight(
      name='own',
      shape=[self.units],
      initializer='zeros' if self.learned_default else self.initializer,
      regularizer=self.regularizer,
    )
    super().build(input_shape)

  def call(self, batch: tf.Tensor) -> tf.Tensor:
    """Return the vector, repeated for each example."""
    vector = self.default + self.own if self.learned_default else self.own
    return tf.repeat(vector[None], tf.shape(batch)[0], axis=0)

  def get_config(self) -> dict[str, Any]:
    """Return the layer's configuration."""
    return {
      **super().get_config(),
      'units': self.units,
      'learned_default': self.learned_default,
      'initializer': tf.keras.initializers.serialize(self.initializer),
      'regularizer': tf.keras.regularizers.serialize(self.regularizer),
    }


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class Centers(tf.keras.layers.Layer):
  """Vectors that all clients share, one per group; no output depends on them.

  They are FedEmbed's prototypes (section 3.3.2), the nodes of its
  self-organizing map (3.3.1), or the centers of PFedKM's gradients. The layer
  returns its input.
  """

  def __init__(
    self,
    num_groups: int,
    size: int,
    *,
    initializer: Any = 'uniform',
    **kwargs: Any,
  ):
    """Initialize the layer.

    Args:
      num_groups: Number of vectors.
      size: Length of each vector.
      initializer: Keras initializer of the vectors.
      **kwargs: Arguments of all layers, such as the name.
    """
    super().__init__(**kwargs)
    self.num_groups = num_groups
    self.size = size
    self.initializer = tf.keras.initializers.get(initializer)

  def build(self, input_shape: tf.TensorShape) -> None:
    """Create the weights."""
    self.vectors = self.add_weight(
      name='vectors',
      shape=[self.num_groups, self.size],
      initializer=self.initializer,
    )
    super().build(input_shape)

  def call(self, inputs: tf.Tensor) -> tf.Tensor:
    """Return the inputs."""
    return tf.identity(inputs)

  def get_config(self) -> dict[str, Any]:
    """Return the layer's configuration."""
    return {
      **super().get_config(),
      'num_groups': self.num_groups,
      'size': self.size,
      'initializer': tf.keras.initializers.serialize(self.initializer),
    }
