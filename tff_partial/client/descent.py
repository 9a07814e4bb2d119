"""One step of descent on the weights of some tiers."""

import collections
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from tff_partial import phases
from tff_partial import tiers

# A number of rows that no table has, to find what an optimizer keeps by rows.
_MANY = 1_000_003


def first_state(
  optimizer: phases.Optimizer, weights: tiers.NamedTensors
) -> Any:
  """An optimizer's state before the first step on some weights.

  Optimizers make it of shapes that are known. Where a table's number of rows is
  not, it is made for one row, and all rows begin alike.

  Args:
    optimizer: The optimizer.
    weights: Name to tensor, of which tables may have an open number of rows.
  """
  state = _state_of_rows(optimizer, weights, [1] * len(weights))
  tensors = list(weights.values())
  if all(tensor.shape.is_fully_defined() for tensor in tensors):
    return state
  marks = [_MANY + place for place in range(len(tensors))]
  with tf.__internal__.FuncGraph('shapes').as_default():
    shapes = [
      leaf.shape
      for leaf in tf.nest.flatten(_state_of_rows(optimizer, weights, marks))
    ]

  def repeated(leaf: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    if not shape.rank or shape[0] not in marks:
      return leaf
    table = tensors[marks.index(shape[0])]
    rows = tf.shape(table)[:1]
    return tf.broadcast_to(leaf, tf.concat([rows, tf.shape(leaf)[1:]], 0))

  leaves = map(repeated, tf.nest.flatten(state), shapes)
  return tf.nest.pack_sequence_as(state, list(leaves))


def _state_of_rows(
  optimizer: phases.Optimizer,
  weights: tiers.NamedTensors,
  rows: Iterable[int],
) -> Any:
  """The first state, with so many rows wherever a number of rows is open."""
  specs = collections.OrderedDict(
    (
      name,
      tf.TensorSpec(
        [number if size is None else size for size in tensor.shape],
        tensor.dtype,
      ),
    )
    for (name, tensor), number in zip(weights.items(), rows, strict=True)
  )
  return tf.nest.map_structure(
    tf.convert_to_tensor, optimizer.initialize(specs)
  )


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
