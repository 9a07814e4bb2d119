"""One step of descent on the weights of some tiers."""

import collections
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from tff_partial import phases
from tff_partial import tiers


def descend(
  optimizer: phases.Optimizer,
  state: Any,
  weights: tiers.NamedTensors,
  gradients: Mapping[str, Any],
) -> tuple[Any, tiers.NamedTensors, list[tf.Tensor]]:
  """One optimizer step; also returns sums over all that it changed."""
  by_rows = phases.is_plain_descent(optimizer)
  sparse = {
    name: gradient
    for name, gradient in gradients.items()
    if by_rows and isinstance(gradient, tf.IndexedSlices)
  }
  dense = [name for name in weights if name not in sparse]
  result = collections.OrderedDict(weights)
  sums = []
  if dense:
    state, moved = optimizer.next(
      state,
      collections.OrderedDict((name, weights[name]) for name in dense),
      collections.OrderedDict((name, gradients[name]) for name in dense),
    )
    result.update(moved)
    sums += [tf.reduce_sum(tensor) for tensor in moved.values()]
  for name, gradient in sparse.items():
    _, change = optimizer.next(
      state, tf.zeros_like(gradient.values), gradient.values
    )
    where = gradient.indices[:, None]
    result[name] = tf.tensor_scatter_nd_add(weights[name], where, change)
    sums.append(tf.reduce_sum(tf.gather(result[name], gradient.indices)))
  return state, result, sums


def replaced(weights: tiers.Weights, trained: tiers.Weights) -> tiers.Weights:
  """Weights of all tiers, with newer values of some."""
  return collections.OrderedDict(
    (
      tier,
      collections.OrderedDict(
        (name, trained[tier].get(name, tensor) if tier in trained else tensor)
        for name, tensor in named.items()
      ),
    )
    for tier, named in weights.items()
  )


def trained_by(
  group: Iterable[phases.Phase], weights: tiers.Weights
) -> tiers.Weights:
  """The weights that phases train, by tier."""
  chosen: tiers.Weights = collections.OrderedDict()
  for tier, named in weights.items():
    names = [
      name
      for name in named
      if any(tier in phase.train and phase.trains(name) for phase in group)
    ]
    if names:
      chosen[tier] = collections.OrderedDict((n, named[n]) for n in names)
  return chosen


def connected(gradients: Any, trained: tiers.Weights) -> Any:
  """Gradients by tier, zeros for variables on which nothing depends.

  Raises:
    PhaseError: If the phase would not move a tier that it trains at all.
  """
  for tier, named in gradients.items():
    if all(gradient is None for gradient in named.values()):
      raise phases.PhaseError(
        f'A phase trains {tier!r}, but what it minimizes depends on none of '
        f'{list(named)}, so that they would stay as they are. Let the model '
        'read them in that phase, name terms that depend on them, or do not '
        'train them.'
      )
  return collections.OrderedDict(
    (
      tier,
      collections.OrderedDict(
        (name, tf.zeros_like(trained[tier][name]) if slope is None else slope)
        for name, slope in named.items()
      ),
    )
    for tier, named in gradients.items()
  )
