"""Optimizer steps on the weights of some tiers."""

import collections
from collections.abc import Container, Iterable, Mapping
from typing import Any

import tensorflow as tf

from tff_partial import phases
from tff_partial import tiers
from tff_partial.arguments import optimizers

# A number of rows that no table has, to find optimizer state kept by rows.
_MANY = 1_000_003


def first_state(
  optimizer: phases.Optimizer, weights: tiers.NamedTensors
) -> Any:
  """Return an optimizer's state before the first step on some weights.

  Optimizers require known shapes. If a table's number of rows is unknown, the
  state is made for one row and repeated for all rows.

  Args:
    optimizer: The optimizer.
    weights: Name to tensor; tables may have an unknown number of rows.
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
  optimizer: phases.Optimizer, weights: tiers.NamedTensors, rows: Iterable[int]
) -> Any:
  """Return the first state, with `rows` in place of unknown numbers of rows."""
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
  """Take one optimizer step; also return the sums of all changed tensors."""
  by_rows = optimizers.is_plain_descent(optimizer)
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


def are_finite(structure: Any) -> tf.Tensor:
  """Return True if all floats of a structure are finite."""
  tensors = map(tf.convert_to_tensor, tf.nest.flatten(structure))
  floats = [tensor for tensor in tensors if tensor.dtype.is_floating]
  found = [tf.reduce_all(tf.math.is_finite(tensor)) for tensor in floats]
  return tf.reduce_all([True, *found])


def replaced(weights: tiers.Weights, trained: tiers.Weights) -> tiers.Weights:
  """Return weights of all tiers, with newer values of some."""
  return tiers.mapped(
    lambda tier, name, tensor: (
      trained[tier].get(name, tensor) if tier in trained else tensor
    ),
    weights,
  )


def trained_by(
  group: Iterable[phases.Phase],
  weights: tiers.Weights,
  without: Container[str] = (),
) -> tiers.Weights:
  """Return the weights that phases train, by tier.

  Args:
    group: The phases.
    weights: Tier to named tensors.
    without: Names of variables to leave out, such as the states of layers,
      which no gradient moves.
  """
  chosen: tiers.Weights = collections.OrderedDict()
  for tier, named in weights.items():
    names = [
      name
      for name in named
      if name not in without
      and any(tier in phase.train and phase.trains(name) for phase in group)
    ]
    if names:
      chosen[tier] = collections.OrderedDict((n, named[n]) for n in names)
  return chosen


def connected(gradients: Any, trained: tiers.Weights) -> Any:
  """Return gradients by tier, with zeros for variables without a gradient.

  Raises:
    PhaseError: If no variable of a trained tier has a gradient.
  """
  for tier, named in gradients.items():
    if all(gradient is None for gradient in named.values()):
      raise phases.PhaseError(
        f'A phase trains {tier!r}, but what it minimizes depends on none of '
        f'{list(named)}, so that they would stay as they are. Let the model '
        'read them in that phase, name terms that depend on them, or do not '
        'train them.'
      )
  return tf.nest.map_structure(
    lambda slope, tensor: tf.zeros_like(tensor) if slope is None else slope,
    gradients,
    trained,
  )
