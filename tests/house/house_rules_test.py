"""Rules of the house that no linter knows, read off the sources."""

import ast
from collections.abc import Iterator
import pathlib
import re
import subprocess
import textwrap

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# ---- `==` between tensors ----------------------------------------------------
#
# Inside TFF's computations `==` compares which tensor, not what it holds, so it
# is False without a word. What follows finds comparisons of names that are sure
# to be tensors, and says nothing where it cannot tell.

_TENSOR_FUNCTIONS = re.compile(
  r'tf\.('
  r'(math|linalg|nn|strings|bitwise)\.\w+|random\.stateless_\w+|reduce_\w+'
  r'|(argmax|argmin|argsort|cast|clip_by_value|concat|constant'
  r'|convert_to_tensor|equal|eye|fill|floor|gather|gather_nd|greater'
  r'|greater_equal|identity|less|less_equal|logical_and|logical_not|logical_or'
  r'|matmul|maximum|minimum|not_equal|one_hot|ones|ones_like|pad|range|repeat'
  r'|reshape|round|scatter_nd|searchsorted|shape|sign|size|sort|sqrt|square'
  r'|squeeze|stack|stop_gradient|tile|transpose|where|zeros|zeros_like))'
)
_COMPUTATIONS = ('tff.tensorflow.computation', 'tff.tf_computation')
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _is_tensor_type(annotation: ast.expr | None) -> bool:
  if annotation is None:
    return False
  text = ast.unparse(annotation).strip('\'"')
  return text in ('tf.Tensor', 'tf.Tensor | None')


def _is_tensor(node: ast.expr, tensors: set[str]) -> bool:
  """Whether an expression is sure to be a tensor, given names that are."""
  if isinstance(node, ast.Name):
    return node.id in tensors
  if isinstance(node, ast.Call):
    return bool(_TENSOR_FUNCTIONS.fullmatch(ast.unparse(node.func)))
  if isinstance(node, ast.Subscript):
    return _is_tensor(node.value, tensors)
  if isinstance(node, ast.UnaryOp):
    return not isinstance(node.op, ast.Not) and _is_tensor(
      node.operand, tensors
    )
  if isinstance(node, ast.BinOp):
    # A string on the left makes a string: '%d clients' % number.
    if isinstance(node.left, ast.JoinedStr) or (
      isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
    ):
      return False
    return _is_tensor(node.left, tensors) or _is_tensor(node.right, tensors)
  return False


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
  """The nodes of a scope, without those of the functions inside it."""
  body = scope.body if isinstance(scope.body, list) else [scope.body]
  pending = list(body)
  while pending:
    node = pending.pop()
    yield node
    if not isinstance(node, _FUNCTIONS):
      pending.extend(ast.iter_child_nodes(node))


def _parameters(scope: ast.AST) -> list[ast.arg]:
  if not isinstance(scope, _FUNCTIONS):
    return []
  arguments = scope.args
  extra = [arguments.vararg, arguments.kwarg]
  return [
    *arguments.posonlyargs,
    *arguments.args,
    *arguments.kwonlyargs,
    *(argument for argument in extra if argument is not None),
  ]


def _is_computation(scope: ast.AST) -> bool:
  for decorator in getattr(scope, 'decorator_list', []):
    if isinstance(decorator, ast.Call):
      decorator = decorator.func
    if ast.unparse(decorator) in _COMPUTATIONS:
      return True
  return False


def _tensor_names(scope: ast.AST, outer: set[str]) -> set[str]:
  """The names that are tensors wherever the scope uses them."""
  # Each name bound here with what is bound to it: an expression, or whether it
  # is sure to be a tensor.
  bound: dict[str, list[ast.expr | bool]] = {}

  def bind(name: str, value: ast.expr | bool) -> None:
    bound.setdefault(name, []).append(value)

  in_computation = _is_computation(scope)
  for parameter in _parameters(scope):
    annotation = parameter.annotation
    untyped = annotation is None
    bind(
      parameter.arg, in_computation if untyped else _is_tensor_type(annotation)
    )
  explained = set()
  for node in _own_nodes(scope):
    if isinstance(node, ast.Assign):
      for target in node.targets:
        if isinstance(target, ast.Name):
          bind(target.id, node.value)
          explained.add(target)
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
      sure = _is_tensor_type(node.annotation)
      bind(node.target.id, sure or node.value or False)
      explained.add(node.target)
    elif isinstance(node, ast.AugAssign):
      explained.add(node.target)  # It stays what it was.
  # Loops, `with`, unpacking and comprehensions bind what cannot be told.
  for node in _own_nodes(scope):
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
      if node not in explained:
        bind(node.id, False)
    elif isinstance(node, ast.FunctionDef | ast.ClassDef):
      bind(node.name, False)

  # Suppose that all are tensors, and give up one after the other.
  tensors = outer | set(bound)
  while True:
    doubtful = {
      name
      for name in tensors & set(bound)
      for value in bound[name]
      if value is not True and not (value and _is_tensor(value, tensors))
    }
    if not doubtful:
      return tensors
    tensors -= doubtful


def tensor_comparisons(
  scope: ast.AST, outer: frozenset[str] = frozenset()
) -> Iterator[tuple[int, str]]:
  """Every `==` and `!=` with a sure tensor on either side, with its line."""
  tensors = _tensor_names(scope, set(outer))
  for node in _own_nodes(scope):
    if isinstance(node, _FUNCTIONS):
      yield from tensor_comparisons(node, frozenset(tensors))
    elif isinstance(node, ast.Compare):
      sides = [node.left, *node.comparators]
      for operator, left, right in zip(
        node.ops, sides[:-1], sides[1:], strict=True
      ):
        if isinstance(operator, ast.Eq | ast.NotEq) and (
          _is_tensor(left, tensors) or _is_tensor(right, tensors)
        ):
          yield node.lineno, ast.unparse(node)


@pytest.mark.slow
def test_tensors_are_compared_by_functions():
  offences = [
    f'{path}:{line}: `{comparison}`: compare tensors with tf.equal or '
    'tf.not_equal.'
    for package in ('tff_partial', 'tasks')
    for path in sorted((ROOT / package).rglob('*.py'))
    for line, comparison in tensor_comparisons(
      ast.parse(path.read_text(encoding='utf-8'))
    )
  ]
  assert not offences, '\n'.join(['', *offences])


@pytest.mark.parametrize(
  'code',
  [
    """
    def f(x: tf.Tensor, n: int):
      return x == n
    """,
    """
    def f(x: 'tf.Tensor | None'):
      return 0 != x
    """,
    """
    @tff.tensorflow.computation(tf.int32)
    def f(x):
      return tf.cond(x == 0, a, b)
    """,
    """
    @tff.tensorflow.computation
    def f(x):
      return data.filter(lambda i: x[0] % 2 == 0)
    """,
    """
    def f(mask):
      count = tf.reduce_sum(mask)
      rest = 10 - count
      rest += 1
      return rest == 0
    """,
    """
    def f(x):
      return tf.shape(x)[0] == 3
    """,
    """
    def outer(x):
      total = tf.reduce_sum(x)
      def inner():
        return 1 < 2 and total != 0
    """,
    """
    class A:
      def f(self, x: tf.Tensor):
        return x == 1
    """,
  ],
)
def test_comparisons_of_tensors_are_found(code):
  assert len(list(tensor_comparisons(ast.parse(textwrap.dedent(code))))) == 1


@pytest.mark.parametrize(
  'code',
  [
    """
    def f(x: tf.Tensor):
      return x.shape[0] == 3 and x.dtype == tf.int32 and len(x) == 1
    """,
    """
    def f(x: tf.Tensor, *, name: str):
      return x if name == 'mean' else '%s' % x == 'a'
    """,
    """
    def f(x):
      x = tf.cast(x, tf.int32)
      x = x.numpy()
      return x == 3
    """,
    """
    def f(x: tf.Tensor):
      for x in range(3):
        yield x == 2
    """,
    """
    def f(x: tf.Tensor):
      def g(x):
        return x == 3
      return [x == 1 for x in range(3)], lambda x: x == 2
    """,
    """
    @tff.tensorflow.computation
    def f(x):
      if tf.nest.flatten(x) == [] or tf.is_tensor(x) == 1:
        return tf.equal(x, 0)
    """,
    """
    @tf.function
    def f(x):
      return x == 0
    """,
  ],
)
def test_other_comparisons_are_left_alone(code):
  assert not list(tensor_comparisons(ast.parse(textwrap.dedent(code))))


# ---- text that belongs to one machine ----------------------------------------

_FOREIGN_TEXT = re.compile(
  r'(?<![\w.~*}>-])/(?:work|root|home/\w+)\b'
  r'|pypi\.(?:org|python)|pythonhosted'
  r'|--(?:extra-)?index-url|--find-links',
  re.IGNORECASE,
)


def _project_files() -> list[pathlib.Path]:
  """The files of the project: tracked, or about to be."""
  try:
    listing = subprocess.run(
      ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard'],
      cwd=ROOT,
      capture_output=True,
      check=True,
      text=True,
    )
  except (OSError, subprocess.CalledProcessError):
    pytest.skip('This is no git checkout.')
  paths = [ROOT / name for name in listing.stdout.split('\0') if name]
  return [path for path in paths if path.is_file()]


def test_no_address_of_a_machine_or_an_index():
  offences = []
  for path in _project_files():
    if path == pathlib.Path(__file__):
      continue  # It has them to try them out.
    try:
      text = path.read_text(encoding='utf-8')
    except UnicodeDecodeError:
      continue  # No text.
    for number, line in enumerate(text.splitlines(), start=1):
      found = _FOREIGN_TEXT.search(line)
      if found:
        offences.append(f'{path}:{number}: {found.group()!r} is not ours.')
  assert not offences, '\n'.join(['', *offences])


@pytest.mark.parametrize(
  'text',
  [
    'python=/root/.venv/bin/python',
    '(/work/data)',
    '"/home/ada/data"',
    'https://pypi.org/simple',
    'https://files.pythonhosted.org/x.whl',
    'pip install --extra-index-url https://example.org',
  ],
)
def test_addresses_are_found(text):
  assert _FOREIGN_TEXT.search(text)


@pytest.mark.parametrize(
  'text',
  [
    'client_work/train/rmse',
    'client/work/train',
    '--no-emit-index-url',
    'https://example.org/work',
    'square/root/mean',
    '$HOME/work',
  ],
)
def test_other_text_is_left_alone(text):
  assert not _FOREIGN_TEXT.search(text)
