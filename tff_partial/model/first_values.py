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

from typing import Any

import tensorflow as tf

from tff_partial import tiers
from tff_partial.model import models
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
  names = [v.name for v in local]
  own = {v.name: _beginning_with_zeros(v) for v in local}
  first = {name: f'{PREFIX}{name}' for name in names}
  number = len(model.variables)
  beside = (
    v._replace(name=first[v.name], position=place, request=place)
    for place, v in enumerate(local, start=number)
  )
  variables = (*(own.get(v.name, v) for v in model.variables), *beside)

  def summed(values: dict[str, Any]) -> dict[str, Any]:
    sums = {name: values.pop(first[name]) + values[name] for name in names}
    return {**values, **sums}

  return model.with_variables(
    variables,
    summed,
    {**model.tier_of, **dict.fromkeys(first.values(), tiers.GLOBAL)},
    {first.get(name, name): v for name, v in model.given_values.items()},
  )


def _beginning_with_zeros(variable: VariableSpec) -> VariableSpec:
  """Return the variable with zeros as its first values."""
  return variable._replace(
    initialize=lambda seed: tf.zeros(variable.shape, variable.dtype),
    value=None,
    is_assigned=False,
  )
