"""What may be relied on is in an `__all__`, and the pages use nothing else."""

import ast
from collections.abc import Iterator
import importlib
import inspect
import json
import re
import tomllib
import types

import pytest

import baselines
from tests.support.sources import dotted_names
from tests.support.sources import ROOT
import tff_partial

PACKAGES = (
  'baselines',
  'tff_partial',
  *(
    f'tff_partial.{name}'
    for name in (
      'algorithms analysis checks data dp exporting model runtimes sparse '
      'templates training training.client_store'
    ).split()
  ),
)

ROOTS = ('baselines', 'tff_partial', 'tff_partial_programs')
MODULES = [
  name
  for name in tff_partial.__all__
  if isinstance(getattr(tff_partial, name), types.ModuleType)
]


@pytest.mark.parametrize('package', PACKAGES)
def test_all_that_a_package_promises_is_there(package):
  module = importlib.import_module(package)
  assert module.__doc__
  assert module.__all__ == sorted(set(module.__all__))
  for name in module.__all__:
    assert not name.startswith('_') and hasattr(module, name), name


@pytest.mark.parametrize('package', [baselines, tff_partial.algorithms])
def test_builders_say_what_they_take(package):
  for name in package.__all__:
    for argument in inspect.signature(
      getattr(package, name)
    ).parameters.values():
      is_keyword = argument.kind is inspect.Parameter.KEYWORD_ONLY
      assert argument.name == 'model' or is_keyword, name


def test_a_wrong_name_of_a_package_is_refused():
  with pytest.raises(AttributeError, match=r"tff_partial\.dp.*'cliping'"):
    tff_partial.dp.cliping  # noqa: B018


# ---- what the pages name -----------------------------------------------------


def _sources() -> Iterator[tuple[str, str, bool]]:
  """What readers copy: where it stands, its text, and whether it is code."""
  pages = [ROOT / 'README.md', *sorted((ROOT / 'docs').rglob('*.md'))]
  for path in pages:
    if path.is_relative_to(ROOT / 'docs' / 'api'):
      continue  # Copies that Sphinx made.
    where, text = str(path.relative_to(ROOT)), path.read_text('utf-8')
    for block in re.findall(r'^```python\n(.*?)^```', text, re.M | re.S):
      yield where, block, True
    prose = re.sub(r'^```.*?^```', '', text, flags=re.M | re.S)
    for span in re.findall(r'`([^`\n]+)`', prose):
      yield where, span, False
  for path in sorted((ROOT / 'notebooks').glob('*.ipynb')):
    cells = json.loads(path.read_text('utf-8'))['cells']
    for cell in cells:
      text = ''.join(cell['source'])
      text = re.sub(r'^[%!].*', '', text, flags=re.M)
      yield str(path.relative_to(ROOT)), text, cell['cell_type'] == 'code'
  for path in sorted((ROOT / 'examples').glob('*.py')):
    yield str(path.relative_to(ROOT)), path.read_text('utf-8'), True


def _chains(code: str) -> set[str]:
  """Dotted names of the library in a block of code, in full."""
  tree = ast.parse(code)
  known, found = {}, set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Import | ast.ImportFrom):
      prefix = f'{node.module}.' if isinstance(node, ast.ImportFrom) else ''
      for alias in node.names:
        found.add(whole := prefix + alias.name)
        # `import a.b` makes `a` known, and all other forms what they name.
        first = alias.name.split('.')[0]
        known[alias.asname or first] = (
          whole if alias.asname or prefix else first
        )
  for _, name in dotted_names(tree):
    first, _, rest = name.partition('.')
    if first in known:
      found.add(f'{known[first]}.{rest}')
  return {name for name in found if name.split('.')[0] in ROOTS}


def _names() -> dict[str, str]:
  """Each name of the library that a page has, and one page that has it."""
  found = {}
  for where, text, is_code in _sources():
    if is_code:
      names = _chains(text)
    else:
      names = set(re.findall(r'\btff_partial(?:\.[A-Za-z_]\w*)+', text))
      for module, name in re.findall(r'^(\w+)\.([A-Za-z_]\w*)\b', text):
        is_file = name in ('md', 'py')
        if module in MODULES and not is_file:
          names.add(f'tff_partial.{module}.{name}')
    found |= dict.fromkeys(names, where)
  return found


def problem_of(name: str) -> str | None:
  """Why a dotted name may not be relied on, or None."""
  first, *rest = name.split('.')
  value = importlib.import_module(first)
  if first == 'tff_partial_programs' and rest:
    return None if rest[0] in ('baselines', 'tasks') else f'{name} is private'
  for part in rest:
    promised = getattr(value, '__all__', None)
    if part.startswith('_') and part != '__version__':
      return f'{part} is private'
    if promised is not None and part not in promised:
      return f'{value.__name__}.__all__ has no {part!r}'
    if not hasattr(value, part):
      return f'{value.__name__} has no {part!r}'
    value = getattr(value, part)
    if not isinstance(value, types.ModuleType):
      return None
  return None


def test_pages_name_only_what_is_promised():
  names = _names()
  assert len(names) > 60
  offences = [
    f'{where}: {name}: {problem}.'
    for name, where in sorted(names.items())
    if (problem := problem_of(name))
  ]
  assert not offences, '\n'.join(['', *offences])


@pytest.mark.parametrize(
  'name',
  [
    'tff_partial._environment',
    'tff_partial.client.descent',
    'tff_partial.dp.dp_trees',
    'tff_partial.training.client_store.nothing',
    'tff_partial.nothing',
  ],
)
def test_private_and_absent_names_are_found(name):
  assert problem_of(name)


def test_the_version_stands_in_one_place():
  version = tff_partial.__version__
  assert re.fullmatch(r'\d+\.\d+\.\d+', version)
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text('utf-8'))
  assert 'version' not in project['project']
  assert project['tool']['setuptools']['dynamic'] == {
    'version': {'attr': 'tff_partial.__version__'}
  }
