"""First values of local weights, learned by all clients together.

In the FedRecon paper (section 4) reconstruction starts from random values. Here
the global weights hold learned first values, and a client's local weights are
offsets from them: the model reads the sum. Local weights start from zero, so
plain gradient descent on them takes the same steps as from the learned values.
The global optimizer trains the first values by the gradient at the
reconstructed weights, the first-order form of MAML (Finn et al., ICML 2017).

First values are broadcast like all global weights, and a step reads and updates
all rows of a local table, not only those that are looked up. Local offsets are
never sent; but a client's update of the first values reveals how its local
weights would move to anyone who sees that single update rather than the
aggregate.

`layers.PrivateVector(learned_default=True)` does the same for one vector, with
a regularizer of the offset; here a layer's regularizer applies to the sum.
"""

from collections.abc import Mapping, Sequence
import copy
from typing import Any

import tensorflow as tf

from tff_partial import tiers
from tff_partial.model import keras_filling
from tff_partial.model import models
from tff_partial.model.functions import ModelFunctions
from tff_partial.model.keras_analysis import KerasSpec
from tff_partial.model.keras_analysis import VariableSpec
from tff_partial.model.keras_variables import ModelError

# Prefix of the names of the global variables that hold first values.
PREFIX = 'first_values/'


def learn_first_values(model: models.PartialModel) -> models.PartialModel:
  """Learn the first values of local weights across all clients.

  Args:
    model: The model, with local variables. Each gets a matching global one,
      `first_values/NAME`, initialized as the local one would be.

  Returns:
    The same model with these variables. A client's local weights are added to
    them, and start from zero.

  Raises:
    ModelError: If nothing is local, or a local table is sized per client.
  """
  models.check(model)
  local = tuple(v for v in model.trainable(tiers.LOCAL) if not v.is_state)
  if not local:
    raise ModelError(
      'The model has no local variables whose first values could be learned. '
      'Say which are local: `from_keras(..., local=...)`.'
    )
  sized = [v.name for v in local if v.is_client_sized]
  if sized:
    raise ModelError(
      f'The tables {sized} have as many rows as each client needs, so that no '
      'first values fit all clients.'
    )
  first = {v.name: f'{PREFIX}{v.name}' for v in local}
  return model.with_functions(
    lambda functions: _Summed(functions, local),
    {**model.tier_of, **dict.fromkeys(first.values(), tiers.GLOBAL)},
    {first.get(name, name): v for name, v in model.given_values.items()},
  )


class _Summed:
  """A model that reads the sums of first values and local offsets.

  Attributes:
    spec: The model's variables, plus one for each local one.
  """

  def __init__(
    self, functions: ModelFunctions, local: tuple[VariableSpec, ...]
  ):
    """Describe the variables.

    Args:
      functions: The model.
      local: Its local variables.
    """
    self._functions = functions
    self._names = [v.name for v in local]
    spec = functions.spec
    number = len(spec.variables)
    own = {v.name: _beginning_with_zeros(v) for v in local}
    first = [
      v._replace(
        name=f'{PREFIX}{v.name}',
        position=number + place,
        request=number + place,
      )
      for place, v in enumerate(local)
    ]
    self.spec = KerasSpec(
      (*(own.get(v.name, v) for v in spec.variables), *first),
      spec.layers,
      spec.inputs,
      spec.outputs,
    )

  def call(
    self,
    tensors: Mapping[str, tf.Tensor],
    inputs: Any,
    *,
    training: bool,
    seed: tf.Tensor,
  ) -> tuple[Any, list[tf.Tensor], dict[str, tf.Tensor]]:
    """Call the model with the sums."""
    return self._functions.call(
      self._summed(tensors), inputs, training=training, seed=seed
    )

  def changed(self) -> frozenset[str]:
    """Return the names of the variables that layers change in training."""
    return self._functions.changed()

  def with_variables(self, variables: Sequence[VariableSpec]) -> '_Summed':
    """Return the same functions, of other variables."""
    found = copy.copy(self)
    found.spec = self.spec._replace(variables=tuple(variables))
    return found

  def filled(self, values: Mapping[str, Any]) -> tf.keras.Model:
    """Make the Keras model with the sums."""
    return self._functions.filled(
      self._summed(
        {
          v.name: keras_filling.checked(v, values[v.name])
          for v in self.spec.variables
        }
      )
    )

  def _summed(self, values: Mapping[str, Any]) -> dict[str, Any]:
    of_model = {
      name: value
      for name, value in values.items()
      if not name.startswith(PREFIX)
    }
    for name in self._names:
      of_model[name] = values[f'{PREFIX}{name}'] + values[name]
    return of_model


def _beginning_with_zeros(variable: VariableSpec) -> VariableSpec:
  """Return the variable with zeros as its first values."""
  return variable._replace(
    initialize=lambda seed: tf.zeros(variable.shape, variable.dtype),
    value=None,
    is_assigned=False,
  )
