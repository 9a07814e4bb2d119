"""Tiers of weights: who holds how many copies of a variable.

A model's variables belong to GLOBAL, GROUP or LOCAL. A client may hold a copy
of its own of the GLOBAL ones besides, which is the tier PERSONAL, under the
same names.

Weights are a mapping from tier to a mapping from variable name to tensor. The
two laws of this module: `join(*split(weights, tiers)) == weights` for any
choice of tiers, and `delta(weights, weights)` is zero.
"""

import collections
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from tff_partial import errors

GLOBAL = 'global'  # One copy, at the server.
GROUP = 'group'  # K copies, at the server; a client reads one of them.
LOCAL = 'local'  # One copy per client, which never leaves it.
PERSONAL = 'personal'  # A client's own copy of GLOBAL, which never leaves it.

TIERS = (GLOBAL, GROUP, LOCAL, PERSONAL)

# Variable name to tensor, within one tier.
NamedTensors = collections.OrderedDict[str, tf.Tensor]
# Tier to its named tensors.
Weights = collections.OrderedDict[str, NamedTensors]


class UnknownTierError(errors.UserError, ValueError):
  """Raised for a tier that is none of GLOBAL, GROUP, LOCAL and PERSONAL."""


def check_tiers(tiers: Iterable[str], where: str) -> tuple[str, ...]:
  """Returns `tiers` as a tuple, or raises an error that names the wrong one.

  Args:
    tiers: Names of tiers.
    where: What the tiers are for; begins the error message.

  Raises:
    UnknownTierError: If one of the names is no tier.
  """
  tiers = (tiers,) if isinstance(tiers, str) else tuple(tiers)
  for tier in tiers:
    if tier not in TIERS:
      raise UnknownTierError(
        f'{where}: {tier!r} is not a tier. The tiers are {", ".join(TIERS)}.'
      )
  return tiers


def split(
  weights: Mapping[str, Any], tiers: Iterable[str]
) -> tuple[Weights, Weights]:
  """Divides weights into those of `tiers` and all others, keeping the order."""
  tiers = check_tiers(tiers, 'split')
  chosen: Weights = collections.OrderedDict()
  rest: Weights = collections.OrderedDict()
  for tier, tensors in weights.items():
    (chosen if tier in tiers else rest)[tier] = tensors
  return chosen, rest


def join(*parts: Mapping[str, Any]) -> Weights:
  """Merges weights of different tiers into one mapping, in the tiers' order.

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


def delta(before: NamedTensors, after: NamedTensors) -> NamedTensors:
  """Returns `before - after`: what a server optimizer takes for a gradient."""
  return collections.OrderedDict(
    (name, tensor - after[name]) for name, tensor in before.items()
  )


def read_by_model(
  weights: Mapping[str, NamedTensors], reads: str = GLOBAL
) -> Weights:
  """Returns the weights that a model reads, in the tiers of its variables.

  Args:
    weights: Tier to its named tensors.
    reads: GLOBAL, or PERSONAL to read the client's own copy in its place.
  """
  return collections.OrderedDict(
    (tier, weights[reads] if tier == GLOBAL else named)
    for tier, named in weights.items()
    if tier != PERSONAL
  )
