"""What `PartialModel` asks of a Keras model, of Keras 2 or 3."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tff_partial.model import keras_analysis
from tff_partial.model import keras_filling
from tff_partial.model import loss_scaling


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


def call(
  functions: ModelFunctions,
  tensors: dict[str, tf.Tensor],
  inputs: Any,
  *,
  training: bool,
  seed: tf.Tensor,
) -> tuple[Any, list[tf.Tensor], dict[str, tf.Tensor]]:
  """Call functions of a model, with gradients inside it at its loss scale."""
  scale = functions.spec.loss_scale
  tensors = loss_scaling.scaled(tensors, 1 / scale)
  outputs, losses, states = functions.call(
    tensors, inputs, training=training, seed=seed
  )
  return *loss_scaling.scaled((outputs, losses), scale), states


class ComputedFunctions:
  """A model whose variables are computed from others.

  Attributes:
    spec: The others, and the layers, inputs and outputs of the model.
  """

  def __init__(
    self,
    functions: ModelFunctions,
    variables: Sequence[keras_analysis.VariableSpec],
    compute: Callable[[dict[str, Any]], dict[str, Any]],
  ):
    """Describe the variables.

    Args:
      functions: The model.
      variables: Those from which its own are computed.
      compute: From their values to those of the model's variables, by name; of
        tensors and of arrays.
    """
    self._functions, self._compute = functions, compute
    self.spec = functions.spec._replace(variables=tuple(variables))

  def call(
    self,
    tensors: dict[str, tf.Tensor],
    inputs: Any,
    *,
    training: bool,
    seed: tf.Tensor,
  ) -> tuple[Any, list[tf.Tensor], dict[str, tf.Tensor]]:
    """Call the model with what is computed."""
    return self._functions.call(
      self._compute(dict(tensors)), inputs, training=training, seed=seed
    )

  def changed(self) -> frozenset[str]:
    """Return the names of the variables that layers change in training."""
    return self._functions.changed()

  def with_variables(
    self, variables: Sequence[keras_analysis.VariableSpec]
  ) -> 'ComputedFunctions':
    """Return the same functions, of other variables."""
    return ComputedFunctions(self._functions, variables, self._compute)

  def filled(self, values: Mapping[str, Any]) -> tf.keras.Model:
    """Make the Keras model with what is computed."""
    return self._functions.filled(
      self._compute(
        {
          v.name: keras_filling.checked(v, values[v.name])
          for v in self.spec.variables
        }
      )
    )
