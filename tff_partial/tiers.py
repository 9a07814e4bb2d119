"""Tiers of weights: the holders and the number of copies of a variable.

A model's variables belong to GLOBAL, GROUP or LOCAL. A client may also hold a
personal copy of the GLOBAL ones, which is the tier PERSONAL, under the same
names, and numbers that are not variables of the model, the tier CLIENT_VALUES.

Weights are a mapping from tier to a mapping from variable name to tensor. Of
the same weights, `delta(weights, weights)` is zero.
"""

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from tff_partial.errors import SettingError

GLOBAL = 'global'  # One copy, at the server.
GROUP = 'group'  # K copies, at the server; a client reads one of them.
LOCAL = 'local'  # One copy per client, which never leaves the client.
PERSONAL = 'personal'  # A client's copy of GLOBAL, which never leaves it.
# A client's numbers besides the model, which never leave it.
CLIENT_VALUES = 'client_values'

TIERS = (GLOBAL, GROUP, LOCAL, PERSONAL, CLIENT_VALUES)
CLIENTS = (LOCAL, PERSONAL, CLIENT_VALUES)  # Tiers that never leave a client.

# Variable name to tensor, within one tier.
NamedTensors = collections.OrderedDict[str, tf.Tensor]
# Tier to its named tensors.
Weights = collections.OrderedDict[str, NamedTensors]


def of_model(tier: str) -> str:
  """Return the model's tier whose variables a tier of weights has values of.

  Args:
    tier: A tier of weights.
  """
  return GLOBAL if tier == PERSONAL else tier


def check_tiers(tiers: Iterable[str], where: str) -> tuple[str, ...]:
  """Return `tiers` as a tuple, or raise an error that names the wrong one.

  Args:
    tiers: Names of tiers.
    where: Purpose of the tiers; start of the error message.

  Raises:
    SettingError: If one of the names is not a tier.
  """
  tiers = (tiers,) if isinstance(tiers, str) else tuple(tiers)
  for tier in tiers:
    if tier not in TIERS:
      raise SettingError(
        f'{where}: {tier!r} is not a tier. The tiers are {", ".join(TIERS)}.'
      )
  return tiers


def join(*parts: Mapping[str, Any]) -> Weights:
  """Merge weights of different tiers into one mapping, in the tiers' order.

  Raises:
    ValueError: If two parts hold the same tier.
  """
  found: dict[str, Any] = {}
  for part in parts:
    for tier, tensors in part.items():
      if tier in found:
        raise ValueError(f'Tier {tier!r} is in two of the parts to join.')
      found[tier] = tensors
  return collections.OrderedDict(
    (tier, found[tier]) for tier in TIERS if tier in found
  )


def mapped(
  function: Callable[[str, str, Any], tf.Tensor],
  weights: Mapping[str, Mapping[str, Any]],
) -> Weights:
  """Apply a function of tier, name and tensor or spec to those of all tiers."""
  return collections.OrderedDict(
    (
      tier,
      collections.OrderedDict(
        (name, function(tier, name, tensor)) for name, tensor in named.items()
      ),
    )
    for tier, named in weights.items()
  )


def delta(before: NamedTensors, after: NamedTensors) -> NamedTensors:
  """Return `before - after`, which a server optimizer uses as a gradient."""
  return collections.OrderedDict(
    (name, tensor - after[name]) for name, tensor in before.items()
  )


# The weights that a client holds -> those that the model reads, in the tiers of
# the model's variables.
WeightsFn = Callable[[Weights], Weights]


def server_and_local_weights(weights: Weights) -> Weights:
  """Return the weights of the server and LOCAL ones, for the model to read."""
  return collections.OrderedDict(
    (tier, named)
    for tier, named in weights.items()
    if tier not in (PERSONAL, CLIENT_VALUES)
  )


def personal_copy(weights: Weights) -> Weights:
  """Return the weights with the personal copy in place of the GLOBAL ones."""
  return collections.OrderedDict(
    server_and_local_weights(weights), **{GLOBAL: weights[PERSONAL]}
  )


def mixed(share: Callable[[Weights], tf.Tensor]) -> WeightsFn:
  """Let the model read a mixture of the personal copy and the GLOBAL weights.

  Args:
    share: (the weights that a client holds) -> the share of the personal copy
      in the mixture, a scalar from 0 to 1.
  """

  def mixture(weights: Weights) -> Weights:
    own = share(weights)
    return collections.OrderedDict(
      server_and_local_weights(weights),
      **{
        GLOBAL: collections.OrderedDict(
          (
            name,
            tf.cast(own, tensor.dtype) * weights[PERSONAL][name]
            + tf.cast(1.0 - own, tensor.dtype) * tensor,
          )
          for name, tensor in weights[GLOBAL].items()
        )
      },
    )

  return mixture
