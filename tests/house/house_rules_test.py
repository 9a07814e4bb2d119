"""Rules of the house that no linter knows, read off the sources."""

import ast
from collections.abc import Iterator
import pathlib
import re
import subprocess

import pytest

from tests.support.sources import files_of
from tests.support.sources import parsed
from tests.support.sources import ROOT

# ---- `==` between tensors ----------------------------------------------------
#
# Inside TFF's computations `==` compares which tensor, not what it holds, so it
# is False without a word. What follows finds comparisons of parameters that are
# tensors, and of what TensorFlow's functions return.

_TENSOR_FUNCTIONS = re.compile(
  r'tf\.('
  r'(math|linalg|nn|strings|bitwise)\.\w+|random\.stateless_\w+|reduce_\w+'
  r'|logical_\w+|arg(max|min|sort)|(greater|less|not)(_equal)?|zeros(_like)?'
  r'|cast|concat|constant|equal|fill|gather|matmul|maximum|minimum|one_hot'
  r'|range|reshape|shape|size|stack|where)'
)


def _is_tensor(node: ast.expr, names: set[str]) -> bool:
  """Whether an expression is sure to be a tensor, given names that are."""
  if isinstance(node, ast.Subscript):
    node = node.value
  if isinstance(node, ast.BinOp):
    return _is_tensor(node.left, names) or _is_tensor(node.right, names)
  if isinstance(node, ast.Call):
    return bool(_TENSOR_FUNCTIONS.fullmatch(ast.unparse(node.func)))
  return isinstance(node, ast.Name) and node.id in names


def tensor_comparisons(tree: ast.AST) -> Iterator[tuple[int, str]]:
  """Every `==` and `!=` with a sure tensor on either side, with its line."""
  for scope in ast.walk(tree):
    if not isinstance(scope, ast.FunctionDef):
      continue
    decorators = map(ast.unparse, scope.decorator_list)
    in_computation = any('tff.tensorflow.computation' in d for d in decorators)
    names = {
      parameter.arg
      for parameter in scope.args.args
      if in_computation
      or parameter.annotation
      and 'tf.Tensor' in ast.unparse(parameter.annotation).split(' | ')
    }
    for node in ast.walk(scope):
      if isinstance(node, ast.Compare) and any(
        isinstance(operator, ast.Eq | ast.NotEq) for operator in node.ops
      ):
        if any(_is_tensor(s, names) for s in [node.left, *node.comparators]):
          yield node.lineno, ast.unparse(node)


@pytest.mark.slow
def test_tensors_are_compared_by_functions():
  offences = [
    f'{path}:{line}: `{comparison}`: compare tensors with tf.equal or '
    'tf.not_equal.'
    for package in ('baselines', 'tasks', 'tff_partial')
    for path in files_of(package)
    for line, comparison in tensor_comparisons(parsed(path))
  ]
  assert not offences, '\n'.join(['', *offences])


@pytest.mark.parametrize(
  ('code', 'number'),
  [
    ('def f(x: tf.Tensor, n: int): return x == n', 1),
    ('@tff.tensorflow.computation(tf.int32)\ndef f(x): return 0 != x[0]', 1),
    ('def f(x): return tf.shape(x)[0] % 2 == 0', 1),
    ('def f(x: tf.Tensor): return x.shape[0] == 3 and len(x) == 1', 0),
    ('@tf.function\ndef f(x): return x == 0', 0),
  ],
)
def test_comparisons_of_tensors_are_found(code, number):
  assert len(list(tensor_comparisons(ast.parse(code)))) == number


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
    *('python=/root/.venv/bin/python', '(/work/data)', '"/home/ada/data"'),
    *('https://pypi.org/simple', 'https://files.pythonhosted.org/x.whl'),
    'pip install --extra-index-url https://example.org',
  ],
)
def test_addresses_are_found(text):
  assert _FOREIGN_TEXT.search(text)
