"""Limits of the house, with their values in `limits.toml`."""

import ast
import collections
from collections.abc import Iterator
import functools
import pathlib
import re
import statistics
import tomllib

import pytest

from tests.support.sources import files_of
from tests.support.sources import parsed
from tests.support.sources import ROOT

_FILE = pathlib.Path(__file__).with_name('limits.toml')
LIMITS = tomllib.loads(_FILE.read_text(encoding='utf-8'))
PRODUCT = (
  *('baselines', 'distribution', 'tasks'),
  *('tff_partial', 'tff_partial_programs'),
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of(path: pathlib.Path) -> int:
  return len(path.read_text(encoding='utf-8').splitlines())


def functions() -> dict[str, int]:
  """The lines of each function, by where it is."""
  return {
    f'{path}:{node.lineno}: {node.name}': node.end_lineno - node.lineno + 1
    for path in files_of(*PRODUCT)
    for node in ast.walk(parsed(path))
    if isinstance(node, _FUNCTIONS)
  }


def class_names() -> list[str]:
  """The class names that a package has more than once."""
  names = collections.Counter(
    (path.relative_to(ROOT).parts[0], node.name)
    for path in files_of(*PRODUCT)
    for node in ast.walk(parsed(path))
    if isinstance(node, ast.ClassDef)
  )
  return [f'{package}: {name}' for (package, name), n in names.items() if n > 1]


def longest(lines: dict[str, int], limit: int) -> dict[str, int]:
  return {where: n for where, n in lines.items() if n > limit}


@functools.cache
def measured() -> dict[str, tuple[float, object]]:
  """The value of each limit, and what it counts."""
  lines = {str(path): lines_of(path) for path in files_of(*PRODUCT)}
  top = {path.stem for path in (ROOT / 'tff_partial').glob('*.py')}
  top -= {'__init__'}
  long_functions = longest(functions(), 80)
  long_files = longest(lines, 400)
  with_code = [n for path, n in lines.items() if '__init__' not in path]
  return {
    'top_modules': (len(top), top),
    'longest_file': (max(lines.values()), long_files),
    'files_over_400_lines': (len(long_files), long_files),
    'longest_function': (max(long_functions.values(), default=0), ()),
    'functions_over_80_lines': (len(long_functions), long_functions),
    'median_file': (statistics.median(with_code), ()),
    'class_names_twice': (len(class_names()), class_names()),
    'product_lines': (sum(lines.values()), ()),
    'test_lines': (sum(map(lines_of, files_of('tests'))), ()),
  }


@pytest.mark.parametrize('name', [name for name in LIMITS if name != 'words'])
def test_limits_are_kept(name):
  value, what = measured()[name]
  assert value <= LIMITS[name], (
    f'{name} is {value}, above its limit of {LIMITS[name]} in {_FILE.name}: '
    f'{what}'
  )


def texts() -> Iterator[tuple[str, str]]:
  """Pages, recipes, docstrings and help texts, with where they are."""
  recipes = (ROOT / 'tasks/recipes').glob('*.flags')
  pages = [*ROOT.glob('*.md'), *(ROOT / 'benchmarks').glob('*.md')]
  for page in [*pages, *(ROOT / 'docs').rglob('*.md'), *recipes]:
    if 'api' not in page.parts:
      yield str(page), page.read_text(encoding='utf-8')
  for path in files_of(*PRODUCT):
    for node in ast.walk(parsed(path)):
      if isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Module)):
        text = ast.get_docstring(node) or ''
        yield f'{path}: {getattr(node, "name", "")}', text
      elif isinstance(node, ast.Call) and ast.unparse(node.func) == 'option':
        yield f'{path}:{node.lineno}', ' '.join(_strings(node))


def _strings(call: ast.Call) -> Iterator[str]:
  for argument in call.args:
    for node in ast.walk(argument):
      if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def test_words_are_plain():
  banned = '|'.join(map(re.escape, LIMITS['words']['banned']))
  # Code in backquotes and blocks, such as `user_form='nobody'`, is not prose.
  code = re.compile(r'```.*?```|`[^`]*`|^--[^\n]*', re.DOTALL | re.MULTILINE)
  pattern = re.compile(rf'\b({banned})\b')
  found = [
    f'{where}: {match.group()}'
    for where, text in texts()
    for match in pattern.finditer(code.sub('', text))
  ]
  assert not found, '\n'.join(['', *found])
