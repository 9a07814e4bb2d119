"""Detection of inputs for which XLA may compute something else.

A graph that is compiled gets one more result: whether any of the doubts that
`agreement` has about its operations came true. The graph is rewritten, with the
functions in it: a branch or the body of a loop passes its doubt on. If one came
true, the loop runs again without XLA, which yields the value, or the error,
that kernels yield.
"""

from collections.abc import Iterable, Iterator, Sequence
import contextlib
import contextvars
import copy
import functools
import inspect
import itertools
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial.runtimes.graphs import graphs
from tff_partial.runtimes.graphs import operations
from tff_partial.runtimes.xla import agreement
from tff_partial.runtimes.xla import loops_for_xla
from tff_partial.runtimes.xla import substitutes

_BOOL = tf.bool.as_datatype_enum

_serial = itertools.count()

_noticed: contextvars.ContextVar[list[tf.Tensor] | None] = (
  contextvars.ContextVar('doubts noticed', default=None)
)


@contextlib.contextmanager
def noticed() -> Iterator[list[tf.Tensor]]:
  """Collect the doubts of the graphs that are called inside."""
  found: list[tf.Tensor] = []
  token = _noticed.set(found)
  try:
    yield found
  finally:
    _noticed.reset(token)


def notice(doubt: tf.Tensor) -> None:
  """Add a doubt to those that are collected."""
  collected = _noticed.get()
  if collected is not None:
    doubt.set_shape([])  # Importing a graph loses the shape.
    collected.append(doubt)


def added(
  graph_def: tf.compat.v1.GraphDef, outputs: Sequence[str]
) -> tuple[tf.compat.v1.GraphDef, str | None]:
  """Add to a graph a result that is true if XLA may compute something else.

  Args:
    graph_def: A graph, which is not changed.
    outputs: The names of the output tensors. Nodes that they do not need are
      never run, and not doubted.

  Returns:
    The graph with the result, and the result's name; None if there is no doubt.

  Raises:
    UnfitForXlaError: If XLA computes something else, or may do so.
  """
  adder = _Adder(graph_def)
  scope = _Scope(adder.graph_def.node, is_function=False)
  doubts = adder.doubts(scope, outputs)
  return adder.graph_def, scope.either(doubts) if doubts else None


class _Scope:
  """Nodes of a graph or of a function."""

  def __init__(self, nodes: Any, is_function: bool):
    self._nodes, self._is_function = nodes, is_function
    self._known = {node.name: node for node in nodes}

  def needed(self, ends: Iterable[str]) -> list[Any]:
    """Return the nodes that some tensors need."""
    found = operations.ancestors(self._known, ends)
    return [node for node in self._nodes if node.name in found]

  def constant(self, name: str) -> np.ndarray | None:
    """Return the value of a tensor, if it is a constant of the graph."""
    origin = operations.origin(self._known, name)
    node = self._known.get(operations.source(origin))
    if node is None or node.op != 'Const':
      return None
    return tf.make_ndarray(node.attr['value'].tensor)

  def tensor(self, node: Any, output: str = 'output', index: int = 0) -> str:
    """Return the name by which other nodes read a node's result."""
    inner = f'{output}:' if self._is_function else ''
    return f'{node.name}:{inner}{index}'

  def add(self, op: str, inputs: Sequence[str]) -> Any:
    """Add a node."""
    number = len(self._known)
    while f'doubt_{number}' in self._known:
      number += 1
    node = self._nodes.add(name=f'doubt_{number}', op=op, input=inputs)
    self._known[node.name] = node
    return node

  def false(self) -> str:
    """Add a constant."""
    node = self.add('Const', [])
    node.attr['dtype'].type = _BOOL
    node.attr['value'].tensor.CopyFrom(tf.make_tensor_proto(False))
    return self.tensor(node)

  def either(self, doubts: Sequence[str]) -> str:
    """Add nodes that compute whether any doubt is true."""
    return functools.reduce(
      lambda one, other: self.tensor(self.add('LogicalOr', [one, other]), 'z'),
      doubts,
    )


class _Adder:
  """Rewriter of a graph and its functions."""

  def __init__(self, graph_def: tf.compat.v1.GraphDef):
    # Graphs of equal functions may have different doubts.
    self._serial = next(_serial)
    self.graph_def = loops_for_xla.prepared(graph_def, f'_{self._serial}')
    substitutes.insert(self.graph_def)
    self._functions = {
      function.signature.name: function
      for function in self.graph_def.library.function
    }
    # Maps a function to one with a doubt as its last result, if it has any.
    self._doubting: dict[str, str | None] = {}

  def doubts(self, scope: _Scope, ends: Iterable[str]) -> list[str]:
    """Add the doubts about what some tensors of a scope need."""
    doubts = []
    for node in scope.needed(ends):
      if operations.definition(node) is None:
        raise agreement.UnfitForXlaError(
          f'it is unknown what XLA makes of the operation {node.op}'
        )
      called = (
        [node.attr['f'].func]
        if node.op in operations.CALLS
        else operations.branches(node)
      )
      if called:
        is_doubtful = self._doubting_branches(called)
        types = node.attr['Tout'].list.type
      elif node.op in operations.LOOPS:
        is_doubtful = self._doubting_loop(node, scope)
        types = node.attr['T'].list.type
      else:
        doubt = agreement.doubt(node, scope.constant)
        if doubt is not None:
          doubts.append(scope.tensor(self._call(node, doubt, scope)))
        continue
      if is_doubtful:
        doubts.append(scope.tensor(node, index=len(types)))
        types.append(_BOOL)
        for name in ('output_shapes', '_input_shapes', '_output_shapes'):
          _forget(node.attr, name)
    return doubts

  def _doubting_branches(self, branches: Sequence[Any]) -> bool:
    """Make functions return their doubts, if any of them has one."""
    if not any(self._function(branch.name) for branch in branches):
      return False
    for branch in branches:
      branch.name = self._function(branch.name) or self._undoubting(branch.name)
    return True

  def _doubting_loop(self, node: Any, scope: _Scope) -> bool:
    """Make a loop carry its doubt on, if its body has one."""
    condition, body = node.attr['cond'].func, node.attr['body'].func
    if self._function(condition.name):
      raise agreement.UnfitForXlaError(
        'XLA may end a loop elsewhere than kernels do'
      )
    doubting = self._function(body.name)
    if doubting is None:
      return False
    for function, name in ((condition, condition.name), (body, doubting)):
      function.name = self._with_doubt_before(name, function is body)
    data = [name for name in node.input if not name.startswith('^')]
    control = [name for name in node.input if name.startswith('^')]
    del node.input[:]
    node.input.extend([*data, scope.false(), *control])
    return True

  def _call(self, node: Any, doubt: agreement.Doubt, scope: _Scope) -> Any:
    """Add a node that computes whether a doubt about another is true."""
    number = sum(
      parameter.kind is parameter.POSITIONAL_OR_KEYWORD
      for parameter in inspect.signature(doubt).parameters.values()
    )
    dtypes = operations.input_dtypes(node)[:number]
    function = _function_of(doubt, tuple(dtypes))
    if function.signature.name not in self._functions:
      self._add(function)
    call = scope.add('PartitionedCall', node.input[: len(dtypes)])
    operations.make_call(call, function)
    return call

  def _function(self, name: str) -> str | None:
    """Return a function that also returns its doubts; None if it has none."""
    if name not in self._doubting:
      function = self._copy(name, 'doubting')
      scope = _Scope(function.node_def, is_function=True)
      doubts = self.doubts(
        scope, [*function.ret.values(), *function.control_ret.values()]
      )
      self._doubting[name] = None
      if doubts:
        self._end(function, scope.either(doubts))
        self._doubting[name] = self._add(function)
    return self._doubting[name]

  def _undoubting(self, name: str) -> str:
    """Return a function whose doubt is always false."""
    function = self._copy(name, 'undoubting')
    if function.signature.name in self._functions:
      return function.signature.name
    scope = _Scope(function.node_def, is_function=True)
    self._end(function, scope.false())
    return self._add(function)

  def _with_doubt_before(self, name: str, is_body: bool) -> str:
    """Return a loop's condition or body that takes the doubt so far."""
    function = self._copy(name, 'going_on')
    if function.signature.name in self._functions:
      return function.signature.name
    function.signature.input_arg.add(name='doubt_before', type=_BOOL)
    if is_body:
      last = function.signature.output_arg[-1].name
      scope = _Scope(function.node_def, is_function=True)
      function.ret[last] = scope.either(['doubt_before', function.ret[last]])
    return self._add(function)

  def _copy(self, name: str, ending: str) -> Any:
    function = copy.deepcopy(self._functions[name])
    function.signature.name = f'{name}_{ending}'
    _forget(function.attr, '_input_shapes')
    return function

  def _end(self, function: Any, doubt: str) -> None:
    function.signature.output_arg.add(name='doubt', type=_BOOL)
    function.ret['doubt'] = doubt

  def _add(self, function: Any) -> str:
    self.graph_def.library.function.append(function)
    self._functions[function.signature.name] = function
    return function.signature.name


def _forget(attributes: Any, name: str) -> None:
  """Remove an attribute that TensorFlow can do without."""
  if name in attributes:
    del attributes[name]


@functools.cache
def _function_of(doubt: agreement.Doubt, dtypes: tuple[tf.DType, ...]) -> Any:
  """Trace a doubt as a function of a graph."""
  specs = [tf.TensorSpec(None, dtype) for dtype in dtypes]
  return graphs.trace(doubt, specs).function_def
