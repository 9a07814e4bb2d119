"""Operations on which XLA and TensorFlow's own kernels agree.

XLA drops the errors of kernels: it reads another row where an index is out of
range, divides by zero, ignores assertions. It differs on NaN in sorts and on
numbers too large for an integer, and draws other random floats. The result of
a client must not depend on whether XLA compiles it. So an operation is one of
three:

*   It agrees, up to rounding, for all inputs.
*   It agrees unless a *doubt* about its inputs comes true, which a few extra
    operations can check. `doubts` adds them to graphs.
*   It is unfit, and so is every loop that contains it.
"""

from collections.abc import Callable, Mapping
import functools
import os
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

NodeDef: TypeAlias = tf.compat.v1.NodeDef
# Checks, on an operation's inputs, whether XLA may compute something else.
Doubt: TypeAlias = Callable[..., tf.Tensor]

# Without these flags, XLA loses NaN in maxima and minima. It reads them at
# first use; a flag that the user has set is kept.
for _flag in ('xla_cpu_enable_fast_min_max', 'xla_gpu_enable_fast_min_max'):
  _flags = os.environ.get('XLA_FLAGS', '')
  if _flag not in _flags:
    os.environ['XLA_FLAGS'] = f'{_flags} --{_flag}=false'.strip()

_AGREE = frozenset(
  """
  Abs Acos Acosh Add AddN AddV2 All Any Asin Asinh Atan Atan2 Atanh AvgPool
  AvgPoolGrad BatchMatMul BatchMatMulV2 BatchMatMulV3 BiasAdd BiasAddGrad
  Bitcast BitwiseAnd BitwiseOr BitwiseXor BroadcastArgs BroadcastGradientArgs
  BroadcastTo Case Ceil Complex ComplexAbs Concat ConcatOffset ConcatV2 Conj
  Const Conv2D Conv2DBackpropFilter Conv2DBackpropInput Cos Cosh Cumprod
  Cumsum DepthToSpace DepthwiseConv2dNative
  DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput Diag
  DiagPart Digamma DivNoNan DynamicStitch Einsum Elu EnsureShape Equal Erf
  Erfc Exp ExpandDims Expm1 FFT Fill Floor FusedBatchNormGradV3
  FusedBatchNormV3 Greater GreaterEqual IRFFT Identity IdentityN If Imag Inv
  Invert IsFinite IsInf IsNan L2Loss LeakyRelu LeakyReluGrad Less LessEqual
  Lgamma LinSpace Log Log1p LogSoftmax LogicalAnd LogicalNot LogicalOr MatMul
  MatrixBandPart MatrixDiagPartV3 MatrixDiagV3 MatrixSetDiagV3 Max Maximum Min
  Minimum MirrorPad Mul MulNoNan Neg NoOp NotEqual OneHot OnesLike Pack Pad
  PadV2 PartitionedCall Placeholder PreventGradient Prod RFFT Range Rank Real
  RealDiv Reciprocal Relu Relu6 Reshape ReverseV2 Rint Roll Round Rsqrt Select
  SelectV2 Selu Shape ShapeN Sigmoid SigmoidGrad Sign Sin Sinh Size Snapshot
  Softplus SoftplusGrad Softsign SoftsignGrad SpaceToDepth Split SplitV Sqrt
  Square SquaredDifference Squeeze
  StatefulPartitionedCall StatelessCase StatelessIf StatelessWhile
  StopGradient StridedSliceGrad Sub Sum Tan Tanh TanhGrad TensorListFromTensor
  TensorListLength TensorListReserve TensorListStack Tile Transpose Unpack
  While Xdivy Xlog1py Xlogy ZerosLike
  """.split()
)


class UnfitForXlaError(ValueError):
  """XLA would compile a loop but compute something else."""


def _any(*conditions: tf.Tensor) -> tf.Tensor:
  found = [tf.reduce_any(condition) for condition in conditions]
  return tf.reduce_any(tf.stack(found))


def _outside(indices: tf.Tensor, sizes: tf.Tensor) -> tf.Tensor:
  return _any(indices < 0, indices >= tf.cast(sizes, indices.dtype))


def _has_nan(x: tf.Tensor) -> tf.Tensor:
  return _any(tf.math.is_nan(x))


def _not_finite(x: tf.Tensor) -> tf.Tensor:
  return _any(~tf.math.is_finite(x))


def _of_relu(gradients: tf.Tensor, features: tf.Tensor) -> tf.Tensor:
  # Kernels multiply by the slope, also zero; XLA selects.
  return _any(tf.math.is_nan(features), ~tf.math.is_finite(gradients))


def _rows(sizes: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
  """Return the sizes of the dimensions that `indices` index."""
  return sizes[: tf.shape(indices)[-1]]


def _scatter(x: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
  return _outside(indices, _rows(tf.shape(x), indices))


def _gather(x: tf.Tensor, indices: tf.Tensor, axis: Any = 0) -> tf.Tensor:
  sizes = tf.shape(x)
  return _outside(indices, tf.gather(sizes, axis % tf.size(sizes)))


def _slice(x: tf.Tensor, begin: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
  end = begin + tf.maximum(size, 0)
  return _any(begin < 0, end > tf.cast(tf.shape(x), begin.dtype))


def _top(x: tf.Tensor) -> tf.Tensor:
  # XLA puts a zero above a negative zero.
  is_zero = tf.equal(x, 0.0)
  zeros = [tf.reduce_any(is_zero & way) for way in (1.0 / x > 0, 1.0 / x < 0)]
  return _any(tf.math.is_nan(x), tf.reduce_all(zeros))


def _shift(x: tf.Tensor, by: tf.Tensor) -> tf.Tensor:
  del x
  return _outside(by, tf.constant(by.dtype.size * 8))


def _segments(data: tf.Tensor, ids: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
  del data
  return _any(ids >= tf.cast(number, ids.dtype))


def _largest_segments(
  data: tf.Tensor, ids: tf.Tensor, number: tf.Tensor
) -> tf.Tensor:
  return _any(_segments(data, ids, number), tf.math.is_nan(data))


# Doubts about operations on integers.
_OF_INTEGERS: Mapping[str, Doubt] = {
  **dict.fromkeys(
    ('Div', 'FloorDiv', 'FloorMod', 'Mod', 'TruncateDiv', 'TruncateMod'),
    lambda x, y: _any(tf.equal(y, 0)),
  ),
  'LeftShift': _shift,
  'Pow': lambda x, y: _any(y < 0),
  'RightShift': _shift,
  'UnsortedSegmentMax': _segments,
  'UnsortedSegmentMin': _segments,
}
# Doubts about operations on floats.
_OF_FLOATS: Mapping[str, Doubt] = {
  'ArgMax': _has_nan,
  'ArgMin': _has_nan,
  'CheckNumerics': _not_finite,
  'ClipByValue': lambda x, low, high: _any(~(low <= high)),
  'EluGrad': lambda gradients, outputs: _has_nan(outputs),
  'Erfinv': lambda x: _any(~(tf.abs(x) <= 1.0)),
  'MaxPool': lambda x: _any(~(x > x.dtype.min)),
  'MaxPoolGrad': _has_nan,
  'Relu6Grad': _of_relu,
  'ReluGrad': _of_relu,
  # Kernels let a gradient of zero be zero, whatever the slope.
  'RsqrtGrad': lambda outputs: _not_finite(outputs * outputs * outputs),
  # Kernels take the slope above zero at zero, XLA that below.
  'SeluGrad': lambda gradients, outputs: _any(
    tf.math.is_nan(outputs), tf.equal(outputs, 0.0)
  ),
  'Softmax': lambda x: _any(~(x <= x.dtype.max)),
  'SoftmaxCrossEntropyWithLogits': _not_finite,
  'SqrtGrad': lambda outputs, gradients: _any(
    tf.math.is_nan(outputs), tf.equal(outputs, 0.0) & tf.equal(gradients, 0.0)
  ),
  'TopKV2': _top,
  'UnsortedSegmentMax': _largest_segments,
  'UnsortedSegmentMin': _largest_segments,
}
# Doubts about operations of any dtype.
_OF_ALL: Mapping[str, Doubt] = {
  'Assert': lambda condition: _any(~condition),
  'Gather': _gather,
  'GatherNd': lambda x, indices: _outside(indices, _rows(tf.shape(x), indices)),
  'GatherV2': _gather,
  'ScatterNd': lambda indices, updates, shape: _outside(
    indices, _rows(shape, indices)
  ),
  'InvertPermutation': lambda x: _any(
    tf.not_equal(tf.sort(x), tf.range(tf.size(x), dtype=x.dtype))
  ),
  'Slice': _slice,
  'SparseSoftmaxCrossEntropyWithLogits': lambda x, labels: _outside(
    labels, tf.shape(x)[-1]
  ),
  **dict.fromkeys(
    (
      *('TensorScatterAdd', 'TensorScatterMax', 'TensorScatterMin'),
      *('TensorScatterSub', 'TensorScatterUpdate'),
    ),
    _scatter,
  ),
  **dict.fromkeys(
    ('TensorListGetItem', 'TensorListSetItem'),
    lambda handle, index: _outside(
      index, tf.raw_ops.TensorListLength(input_handle=handle)
    ),
  ),
  'UnsortedSegmentProd': _segments,
  'UnsortedSegmentSum': _segments,
}
# These agree on the dtypes for which no doubt is listed.
_AGREE_ELSE = frozenset(
  (
    *('ArgMax', 'ArgMin', 'ClipByValue', 'FloorDiv', 'FloorMod', 'MaxPool'),
    *('Mod', 'Pow', 'ReluGrad', 'TopKV2'),
  )
)
_PHILOX = tf.random.Algorithm.PHILOX.value


def doubt(
  node: NodeDef, constant: Callable[[str], np.ndarray | None]
) -> Doubt | None:
  """Return the condition under which XLA may differ; None if it never does.

  Args:
    node: An operation of a graph.
    constant: Returns the value of an input, if the graph holds it.

  Raises:
    UnfitForXlaError: If XLA computes something else, or may do so.
  """
  if node.op in _AGREE:
    return None
  if node.op == 'InvertPermutation' and constant(node.input[0]) is not None:
    return None  # In the gradient of every transpose.
  if node.op in _OF_ALL:
    return _OF_ALL[node.op]
  dtype = tf.as_dtype(_number_type(node))
  of_dtype = _OF_FLOATS if dtype.is_floating else _OF_INTEGERS
  if node.op in of_dtype:
    return of_dtype[node.op]
  if node.op in _AGREE_ELSE or (node.op == 'Mean' and dtype.is_floating):
    return None
  if node.op == 'Cast':
    return _cast(node.attr['SrcT'].type, node.attr['DstT'].type)
  if node.op == 'StridedSlice':
    return _strided_slice(node, constant)
  if node.op == 'StatelessRandomUniformFullIntV2':
    if constant(node.input[3]) == _PHILOX:
      return None
  if 'Random' in node.op or node.op.startswith('Stateless'):
    raise UnfitForXlaError(f'XLA draws other numbers than {node.op} draws')
  advice = ''
  if node.op == 'TensorListPushBack':
    advice = (
      '. It comes from a loop over time: recurrent layers of short sequences '
      'compile with unroll=True'
    )
  raise UnfitForXlaError(
    f'XLA may compute something else than {node.op} computes{advice}'
  )


def _number_type(node: NodeDef) -> int:
  for name in ('T', 'SrcT', 'dtype', 'element_dtype'):
    if name in node.attr and node.attr[name].type:
      return node.attr[name].type
  return tf.variant.as_datatype_enum


@functools.cache
def _cast(source: int, target: int) -> Doubt | None:
  """Return the doubt about a cast, if any.

  Out of range, XLA takes the nearest integer, and kernels what the CPU gives.
  """
  given, wanted = tf.as_dtype(source), tf.as_dtype(target)
  if given.is_complex and wanted.is_integer:
    raise UnfitForXlaError('XLA may take other integers of complex numbers')
  if not (given.is_floating and wanted.is_integer):
    return None
  low, high = float(wanted.min), float(wanted.max)
  above = high + 1.0 if high + 1.0 != high else high
  wide = tf.float64 if given == tf.float64 else tf.float32

  def is_outside(x: tf.Tensor) -> tf.Tensor:
    x = tf.cast(x, wide)
    return _any(~((x >= low) & (x < above)))

  return is_outside


def _strided_slice(
  node: NodeDef, constant: Callable[[str], np.ndarray | None]
) -> Doubt | None:
  """Return the doubt that an index is out of range; slices are clipped."""
  masks = {
    name: node.attr[f'{name}_mask'].i
    for name in ('ellipsis', 'new_axis', 'shrink_axis')
  }
  if not masks['shrink_axis'] or constant(node.input[1]) is not None:
    return None
  strides = constant(node.input[3])
  if strides is None:
    raise UnfitForXlaError('XLA takes slices of unknown steps for others')
  places: list[tuple[int, int]] = []  # (In the slice, axis of the array).
  axes = [p for p in range(len(strides)) if not masks['new_axis'] >> p & 1]
  for number, place in enumerate(axes):
    if masks['shrink_axis'] >> place & 1:
      is_behind = any(masks['ellipsis'] >> p & 1 for p in axes[:number])
      places.append((place, number - len(axes) if is_behind else number))

  def is_outside(x: tf.Tensor, begin: tf.Tensor) -> tf.Tensor:
    sizes = tf.cast(tf.shape(x), begin.dtype)
    return _any(
      *[
        (begin[place] < -sizes[axis]) | (begin[place] >= sizes[axis])
        for place, axis in places
      ]
    )

  return is_outside


@functools.cache
def are_nans_kept() -> bool:
  """Check whether XLA keeps NaN in maxima; not if it ran before this import."""
  largest = tf.function(tf.reduce_max, jit_compile=True)
  return bool(np.isnan(largest(tf.constant([np.nan, 1.0])).numpy()))
