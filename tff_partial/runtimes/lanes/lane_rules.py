"""Rules to build single operations for several lanes at once.

`tf.vectorized_map` lacks these, or does them otherwise than lanes require:
lists of tensors, which must not be copied; writes into a tensor; and shape
queries.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tff_partial.runtimes.lanes import function_bodies
from tff_partial.runtimes.lanes import lane_values
from tff_partial.runtimes.lanes.lane_values import Value

# From the number of lanes, a node and its inputs to its outputs.
Rule: TypeAlias = Callable[
  [int, tf.compat.v1.NodeDef, Sequence[Value]], list[Value]
]

# Operations that write into a tensor.
SCATTERS = frozenset(
  ('TensorScatterAdd', 'TensorScatterSub', 'TensorScatterUpdate')
)


def rule_of(node: tf.compat.v1.NodeDef, has_lanes: bool) -> Rule | None:
  """Return the rule for a node; None if it has none here.

  Args:
    node: The node.
    has_lanes: Whether any of its inputs differs between lanes.
  """
  if node.op in _LISTS:
    return _LISTS[node.op]
  if not has_lanes:
    return None
  if node.op in function_bodies.SHAPES:
    return _shape
  if node.op in SCATTERS:
    return _scatter
  return None


def _scatter(
  number: int, node: tf.compat.v1.NodeDef, given: Sequence[Value]
) -> list[Value]:
  """Add to, or write into, the tensor of each lane."""
  tensor, indices, updates = [
    lane_values.spread(v, number).tensor for v in given
  ]
  shape = tf.concat([tf.shape(indices)[:-1], [1]], 0)
  lane = tf.reshape(
    tf.range(number, dtype=indices.dtype),
    tf.concat([[number], tf.ones_like(shape[1:])], 0),
  )
  places = tf.concat([tf.broadcast_to(lane, shape), indices], -1)
  changed = getattr(tf.raw_ops, node.op)(
    tensor=tensor, indices=places, updates=updates
  )
  return [Value(changed, True)]


def _shape(
  number: int, node: tf.compat.v1.NodeDef, given: Sequence[Value]
) -> list[Value]:
  """Build the shapes, ranks or sizes of one lane's tensors."""
  dtype = tf.int32
  if 'out_type' in node.attr:
    dtype = tf.as_dtype(node.attr['out_type'].type)

  def found(value: Value) -> tf.Tensor:
    skipped = int(value.has_lanes)
    if node.op == 'Rank':
      return tf.rank(value.tensor) - skipped
    static = value.tensor.shape[skipped:]
    shape = tf.shape(value.tensor, dtype)[skipped:]
    if static.is_fully_defined():
      shape = tf.constant(static.as_list(), dtype)
    return tf.reduce_prod(shape) if node.op == 'Size' else shape

  return [Value(found(value), False) for value in given]


def _in_front(number: int, shape: tf.Tensor) -> tf.Tensor:
  """Add lanes to the shape of a list's elements, unless it is a scalar -1."""
  if shape.shape.rank == 0:
    return shape
  return tf.concat([tf.cast([number], shape.dtype), shape], 0)


def _swapped(tensor: tf.Tensor) -> tf.Tensor:
  """Swap the dimensions of elements and lanes."""
  rank = tensor.shape.rank
  if rank is None:
    raise lane_values.UnfitForLanesError(
      'a list has elements of any number of dimensions'
    )
  return tf.transpose(tensor, [1, 0, *range(2, rank)])


def _list_operation(build: Callable[..., Sequence[tuple[Any, bool]]]) -> Rule:
  """Make a rule from a function of attributes and inputs."""
  return lambda number, node, given: [
    Value(*result) for result in build(number, node.attr, *given)
  ]


def _element(handle: Value, item: tf.Tensor) -> tuple[tf.Tensor, bool]:
  """Return an item of a list, without lanes if it is the same in all."""
  return (item, True) if handle.has_lanes else (item[0], False)


def _new_list(
  make: Callable[..., tf.Tensor], length: str
) -> Callable[..., list[tuple[tf.Tensor, bool]]]:
  """Return a function that builds lists with nothing written.

  Args:
    make: The operation.
    length: The name of its second input.
  """

  def build(
    number: int, attr: Any, shape: Value, size: Value
  ) -> list[tuple[tf.Tensor, bool]]:
    made = make(
      element_shape=_in_front(number, lane_values.same_in_all(shape)),
      element_dtype=tf.as_dtype(attr['element_dtype'].type),
      **{length: lane_values.same_in_all(size)},
    )
    return [(made, False)]

  return build


def _set_item(
  number: int, attr: Any, handle: Value, index: Value, item: Value
) -> list[tuple[tf.Tensor, bool]]:
  changed = tf.raw_ops.TensorListSetItem(
    input_handle=handle.tensor,
    index=lane_values.same_in_all(index),
    item=lane_values.spread(item, number).tensor,
    resize_if_index_out_of_bounds=attr['resize_if_index_out_of_bounds'].b,
  )
  return [(changed, handle.has_lanes or item.has_lanes)]


def _get_item(
  number: int, attr: Any, handle: Value, index: Value, shape: Value
) -> list[tuple[tf.Tensor, bool]]:
  item = tf.raw_ops.TensorListGetItem(
    input_handle=handle.tensor,
    index=lane_values.same_in_all(index),
    element_shape=_in_front(number, lane_values.same_in_all(shape)),
    element_dtype=tf.as_dtype(attr['element_dtype'].type),
  )
  return [_element(handle, item)]


def _push(
  number: int, attr: Any, handle: Value, item: Value
) -> list[tuple[tf.Tensor, bool]]:
  del attr
  longer = tf.raw_ops.TensorListPushBack(
    input_handle=handle.tensor, tensor=lane_values.spread(item, number).tensor
  )
  return [(longer, handle.has_lanes or item.has_lanes)]


def _pop(
  number: int, attr: Any, handle: Value, shape: Value
) -> list[tuple[tf.Tensor, bool]]:
  shorter, item = tf.raw_ops.TensorListPopBack(
    input_handle=handle.tensor,
    element_shape=_in_front(number, lane_values.same_in_all(shape)),
    element_dtype=tf.as_dtype(attr['element_dtype'].type),
  )
  return [(shorter, handle.has_lanes), _element(handle, item)]


def _stack(
  number: int, attr: Any, handle: Value, shape: Value
) -> list[tuple[tf.Tensor, bool]]:
  stacked = tf.raw_ops.TensorListStack(
    input_handle=handle.tensor,
    element_shape=_in_front(number, lane_values.same_in_all(shape)),
    element_dtype=tf.as_dtype(attr['element_dtype'].type),
    num_elements=attr['num_elements'].i,
  )
  return [_element(handle, _swapped(stacked))]


def _from_tensor(
  number: int, attr: Any, tensor: Value, shape: Value
) -> list[tuple[tf.Tensor, bool]]:
  del attr
  made = tf.raw_ops.TensorListFromTensor(
    tensor=_swapped(lane_values.spread(tensor, number).tensor),
    element_shape=_in_front(number, lane_values.same_in_all(shape)),
  )
  return [(made, tensor.has_lanes)]


def _length(
  number: int, attr: Any, handle: Value
) -> list[tuple[tf.Tensor, bool]]:
  del number, attr
  return [(tf.raw_ops.TensorListLength(input_handle=handle.tensor), False)]


def _element_shape(
  number: int, attr: Any, handle: Value
) -> list[tuple[tf.Tensor, bool]]:
  del number
  shape = tf.raw_ops.TensorListElementShape(
    input_handle=handle.tensor,
    shape_type=tf.as_dtype(attr['shape_type'].type),
  )
  return [(shape[1:], False)]


_LISTS: Mapping[str, Rule] = {
  'EmptyTensorList': _list_operation(
    _new_list(tf.raw_ops.EmptyTensorList, 'max_num_elements')
  ),
  'TensorListElementShape': _list_operation(_element_shape),
  'TensorListFromTensor': _list_operation(_from_tensor),
  'TensorListGetItem': _list_operation(_get_item),
  'TensorListLength': _list_operation(_length),
  'TensorListPopBack': _list_operation(_pop),
  'TensorListPushBack': _list_operation(_push),
  'TensorListReserve': _list_operation(
    _new_list(tf.raw_ops.TensorListReserve, 'num_elements')
  ),
  'TensorListSetItem': _list_operation(_set_item),
  'TensorListStack': _list_operation(_stack),
}
