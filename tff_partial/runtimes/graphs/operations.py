"""Operations that draw at random, or whose state may outlive a call.

TensorFlow's registry of operations knows which are stateful: they draw random
numbers, keep something between calls, or act on a resource. A stateful
operation not listed here is taken for random. The next call finds a resource
with a name again, so it must be one that the graph's initializer fills.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
import itertools
import re
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tff_partial.runtimes import errors

# Operations that call functions.
CALLS = ('PartitionedCall', 'StatefulPartitionedCall')
CONDITIONALS = ('If', 'StatelessIf')
CASES = ('Case', 'StatelessCase')
LOOPS = ('While', 'StatelessWhile')

# Stateful operations with equal results for equal inputs, if the resources that
# they act on are made or filled in the same call: control flow, checks,
# printing; variables, and generators whose state is one; tables; arrays and
# stacks, which every execution makes again; data sets, and iterators without a
# name.
_PURE = frozenset(
  """
  AnonymousHashTable AnonymousIterator AnonymousIteratorV2 AnonymousIteratorV3
  AnonymousMemoryCache AnonymousMutableDenseHashTable AnonymousMutableHashTable
  AnonymousMutableHashTableOfTensors AnonymousRandomSeedGenerator
  AnonymousSeedGenerator Assert AssignAddVariableOp AssignSubVariableOp
  AssignVariableOp CacheDatasetV2 Case CheckNumerics CheckNumericsV2
  DatasetToSingleElement DeepCopy DeleteIterator DeleteMemoryCache
  DeleteRandomSeedGenerator DeleteSeedGenerator DestroyResourceOp DeviceIndex
  DisableCopyOnRead DummyIterationCounter DummyMemoryCache DummySeedGenerator
  ExperimentalGroupByReducerDataset ExperimentalRandomDataset
  GroupByReducerDataset GuaranteeConst HashTableV2 If InitializeTableFromDataset
  InitializeTableV2 IteratorGetNext IteratorGetNextAsOptional
  IteratorGetNextSync LookupTableExportV2 LookupTableFindV2 LookupTableImportV2
  LookupTableInsertV2 LookupTableRemoveV2 LookupTableSizeV2 MakeIterator
  MutableDenseHashTableV2 MutableHashTableOfTensorsV2 MutableHashTableV2 Print
  PrintV2 RandomDataset RandomDatasetV2 RangeDataset ReadVariableOp
  ReduceDataset RngReadAndSkip RngSkip ShuffleAndRepeatDatasetV2
  ShuffleDatasetV2 ShuffleDatasetV3 SparseTensorSliceDataset StackCloseV2
  StackPopV2 StackPushV2 StackV2 StatefulPartitionedCall StatelessRandomGetAlg
  TensorArrayCloseV3 TensorArrayConcatV3 TensorArrayGatherV3 TensorArrayGradV3
  TensorArrayGradWithShape TensorArrayReadV3 TensorArrayScatterV3
  TensorArraySizeV3 TensorArraySplitV3 TensorArrayV3 TensorArrayWriteV3
  TensorDataset TensorSliceDataset VarHandleOp VarIsInitializedOp VariableShape
  While
  """.split()
)
# Whole families that act on variables.
_PURE_FAMILY = re.compile(r'Resource(Apply|Gather|Scatter|Sparse|Strided)')

# These draw at random unless one of the inputs called `seed` is not zero.
_SEEDED = frozenset(
  """
  AnonymousRandomSeedGenerator AnonymousSeedGenerator ExperimentalRandomDataset
  RandomDataset RandomDatasetV2 ShuffleAndRepeatDataset
  ShuffleAndRepeatDatasetV2 ShuffleDataset ShuffleDatasetV3
  """.split()
)

# These fill their first input, a resource, with all its contents.
_FILLS = frozenset(
  """
  AssignVariableOp InitializeTableFromDataset InitializeTableV2
  LookupTableImportV2
  """.split()
)


def definition(node: tf.compat.v1.NodeDef) -> Any:
  """Return a node's registered operation; None if it calls a function."""
  return op_def_registry.get(node.op)


def input_dtypes(node: tf.compat.v1.NodeDef) -> list[tf.DType]:
  """Return the dtype of each input of an operation."""
  found = []
  for argument in definition(node).input_arg:
    if argument.type_list_attr:
      found.extend(node.attr[argument.type_list_attr].list.type)
      continue
    number = node.attr[argument.number_attr].i if argument.number_attr else 1
    kind = (
      node.attr[argument.type_attr].type
      if argument.type_attr
      else argument.type
    )
    found.extend([kind] * number)
  return [tf.as_dtype(kind) for kind in found]


def branches(node: tf.compat.v1.NodeDef) -> list[Any]:
  """Return the functions of which a node runs one, in the order of its index.

  Args:
    node: The node. The results are parts of it: renaming them changes what it
      runs.
  """
  if node.op in CONDITIONALS:
    return [node.attr[f'{way}_branch'].func for way in ('else', 'then')]
  if node.op in CASES:
    return list(node.attr['branches'].list.func)
  return []


def scopes(
  graph_def: tf.compat.v1.GraphDef,
) -> Iterator[Sequence[tf.compat.v1.NodeDef]]:
  """Yield the nodes of a graph, then those of each of its functions."""
  yield graph_def.node
  for function in graph_def.library.function:
    yield function.node_def


def named_functions(node: tf.compat.v1.NodeDef) -> Iterator[Any]:
  """Yield the functions that a node names, as parts of it."""
  for attribute in node.attr.values():
    if attribute.HasField('func'):
      yield attribute.func
    yield from attribute.list.func


def rename_functions(
  graph_def: tf.compat.v1.GraphDef, names: Container[str], ending: str
) -> None:
  """Append an ending to the names of some functions of a graph."""
  for function in graph_def.library.function:
    if function.signature.name in names:
      function.signature.name += ending
  for nodes in scopes(graph_def):
    for called in itertools.chain.from_iterable(map(named_functions, nodes)):
      if called.name in names:
        called.name += ending


def make_call(
  node: tf.compat.v1.NodeDef, function: Any, op: str = 'PartitionedCall'
) -> None:
  """Make a node call a function, with the inputs that it has."""
  node.op = op
  node.attr.clear()
  signature = function.signature
  for name, arguments in (
    ('Tin', signature.input_arg),
    ('Tout', signature.output_arg),
  ):
    node.attr[name].list.type.extend(argument.type for argument in arguments)
  node.attr['f'].func.name = signature.name


def rename_results(function: Any, calls: Container[str]) -> None:
  """Rename the results of nodes of a function that have become calls."""

  def renamed(tensor: str) -> str:
    node, _, result = tensor.partition(':')
    if node in calls and result:
      return f'{node}:output:{result.rpartition(":")[2]}'
    return tensor

  for node in function.node_def:
    node.input[:] = map(renamed, node.input)
  for key, tensor in function.ret.items():
    function.ret[key] = renamed(tensor)


def executed(
  graph_def: tf.compat.v1.GraphDef,
) -> Iterator[Sequence[tf.compat.v1.NodeDef]]:
  """Yield the nodes of a graph, then those of each function that it calls.

  A library may hold others, too: Keras's LSTM and GRU leave an unused one for
  cuDNN with each that runs.
  """
  uncalled = {
    function.signature.name: function.node_def
    for function in graph_def.library.function
  }
  waiting = [graph_def.node]
  while waiting:
    nodes = waiting.pop()
    yield nodes
    for node in nodes:
      for name in (node.op, *(each.name for each in named_functions(node))):
        if name in uncalled:
          waiting.append(uncalled.pop(name))


def source(name: str) -> str:
  """Return the name of the node that an input comes from."""
  return name.lstrip('^').split(':')[0]


def origin(known: Mapping[str, tf.compat.v1.NodeDef], tensor: str) -> str:
  """Follow a tensor back through nodes that pass it on."""
  node = known.get(source(tensor))
  while node is not None and node.op == 'Identity':
    tensor = node.input[0]
    node = known.get(source(tensor))
  return tensor


def draws(graph_def: tf.compat.v1.GraphDef) -> str | None:
  """Return an operation whose results may differ between equal calls."""
  for nodes in executed(graph_def):
    known = {node.name: node for node in nodes}
    for node in nodes:
      if _draws(node, known):
        return node.op
  return None


def _draws(
  node: tf.compat.v1.NodeDef, known: Mapping[str, tf.compat.v1.NodeDef]
) -> bool:
  if node.op in _SEEDED:
    return not any(
      _is_not_zero(known.get(source(name)))
      for name, argument in zip(
        node.input, definition(node).input_arg, strict=False
      )
      if argument.name in ('seed', 'seed2')
    )
  # Datasets that yield the element that is ready first.
  if 'deterministic' in node.attr:
    if node.attr['deterministic'].s == b'false':
      return True
  elif 'sloppy' in node.attr and node.attr['sloppy'].b:
    return True
  defined = definition(node)
  if defined is None or not defined.is_stateful:
    return False
  return node.op not in _PURE and not _PURE_FAMILY.match(node.op)


def _is_not_zero(node: tf.compat.v1.NodeDef | None) -> bool:
  if node is None or node.op != 'Const':
    return False
  return bool(tf.make_ndarray(node.attr['value'].tensor).any())


def check_resources(
  graph_def: tf.compat.v1.GraphDef, initializer: str, inputs: Iterable[str]
) -> None:
  """Refuse a graph that would pass state from one call to the next.

  Args:
    graph_def: A graph.
    initializer: The operation to run before each call, or an empty string.
    inputs: The names of the input tensors.

  Raises:
    UnsupportedComputationError: If a named resource is not filled by the
      initializer, or is filled from an argument.
  """
  known = {node.name: node for node in graph_def.node}
  initial = ancestors(known, [initializer] if initializer else [])
  filled = {
    source(known[name].input[0]) for name in initial if known[name].op in _FILLS
  }
  for nodes in executed(graph_def):
    for node in nodes:
      if _is_named(node) and not (
        nodes is graph_def.node and node.name in filled
      ):
        raise errors.UnsupportedComputationError(
          f'a resource without an initial value ({node.op})',
          'it would keep what one client leaves in it for the next',
        )
  if initial & {source(name) for name in inputs}:
    raise errors.UnsupportedComputationError(
      'a variable or a table that is made from an argument',
      'it would have to be made anew for each client',
    )


def _is_named(node: tf.compat.v1.NodeDef) -> bool:
  """Check whether a node makes, or finds, a resource by a name."""
  defined = definition(node)
  return defined is not None and any(
    attribute.name == 'shared_name' for attribute in defined.attr
  )


def ancestors(
  known: Mapping[str, tf.compat.v1.NodeDef], ends: Iterable[str]
) -> set[str]:
  """Return the names of the nodes that some nodes need, and of these."""
  found: set[str] = set()
  waiting = [source(name) for name in ends]
  while waiting:
    name = waiting.pop()
    if name in found or name not in known:
      continue
    found.add(name)
    waiting.extend(source(one) for one in known[name].input)
  return found
