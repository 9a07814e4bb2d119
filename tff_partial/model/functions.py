"""What `PartialModel` asks of a Keras model, of Keras 2 or 3."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tff_partial.model import keras_analysis


class ModelFunctions(Protocol):
  """A Keras model as pure functions of its variables' values.

  Attributes:
    spec: Its variables, layers, inputs and outputs.
  """

  spec: keras_analysis.KerasSpec

  def call(
    self,
    tensors: dict[str, tf.Tensor],
    inputs: Any,
    *,
    training: bool,
    seed: tf.Tensor,
  ) -> tuple[Any, list[tf.Tensor], dict[str, tf.Tensor]]:
    """Compute predictions, losses and states: see `PartialModel.call`."""

  def changed(self) -> frozenset[str]:
    """Return the names of the variables that layers change in training."""

  def with_variables(
    self, variables: Sequence[keras_analysis.VariableSpec]
  ) -> 'ModelFunctions':
    """Return the same functions, of variables with a treatment of state."""

  def filled(self, values: Mapping[str, Any]) -> tf.keras.Model:
    """Make a Keras model with a value for each variable, by its name."""
