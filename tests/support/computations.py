"""Computations in which every client calls a function of TensorFlow."""

from collections.abc import Callable
from typing import Any

import tensorflow_federated as tff


def mapped(
  function: Callable[..., Any],
  *type_specs: Any,
  join: Callable[[Any], Any] = lambda values: values,
) -> tff.Computation:
  """What each client's call returns, on a value of each type, then joined."""
  types = [tff.to_type(type_spec) for type_spec in type_specs]
  local = tff.tensorflow.computation(function, *types)
  clients = [tff.FederatedType(each, tff.CLIENTS) for each in types]
  if len(types) == 1:
    return tff.federated_computation(
      lambda values: join(tff.federated_map(local, values)), *clients
    )
  return tff.federated_computation(
    lambda one, other: join(tff.federated_map(local, (one, other))), *clients
  )


def summed(function: Callable[..., Any], *type_specs: Any) -> tff.Computation:
  """The sum of what clients' calls return."""
  return mapped(function, *type_specs, join=tff.federated_sum)
