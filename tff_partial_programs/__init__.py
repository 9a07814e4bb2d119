"""The command `tff-partial`, which lists the programs of `tasks` and runs one.

A separate package, so that help does not wait for the import of TensorFlow. In
the wheel `tasks` is inside this folder, since its name is too common for a
top-level package; in a clone it is next to this folder.
"""

import ast
from collections.abc import Sequence
import importlib
import os
import pathlib
import runpy
import sys
import types

from tff_partial_programs import recipes
from tff_partial_programs import spelling

# In the order of typical use.
PROGRAMS = (
  'train',
  'evaluate',
  'new_users',
  'users',
  'clients',
  'sweep',
  'report',
  'audit',
  'export',
)
_HELP = ('-h', '-help', '--help', '-?')


def __getattr__(name: str) -> types.ModuleType:
  """Import `baselines` or `tasks`, from a clone or from an installed wheel."""
  if name not in ('baselines', 'tasks'):
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  folder = str(recipes.root())
  if folder not in sys.path:
    sys.path.append(folder)
  return importlib.import_module(name)


def description(program: str) -> str:
  """Return the first line of a program's docstring without importing it."""
  path = recipes.root() / 'tasks' / f'{program}.py'
  docstring = ast.get_docstring(ast.parse(path.read_text('utf-8'))) or ''
  return docstring.splitlines()[0]


def usage() -> str:
  """Return the text of `tff-partial --help`."""
  width = max(map(len, PROGRAMS))
  return '\n'.join(
    [
      'Partially local federated learning: tff-partial PROGRAM [FLAGS]',
      '',
      *(f'  {name:<{width}}  {description(name)}' for name in PROGRAMS),
      '',
      'tff-partial PROGRAM --help names the flags of a program. To begin with:',
      '',
      '  tff-partial train --recipe=demo',
      '',
    ]
  )


def main(arguments: Sequence[str] | None = None) -> int | None:
  """Run a program, as `python -m tasks.PROGRAM` does in a clone.

  Args:
    arguments: The command line without the name of the command; by default
      that of the process.

  Returns:
    The exit status, if no program was run.
  """
  arguments = list(sys.argv[1:] if arguments is None else arguments)
  if not arguments or arguments[0] in (*_HELP, 'help'):
    sys.stdout.write(usage())
    return 0
  name, *rest = arguments
  if name not in PROGRAMS:
    sys.stderr.write(
      f'error: there is no program {name!r}.{spelling.hint(name, PROGRAMS)} '
      f'Choose one of {", ".join(PROGRAMS)}.\n'
    )
    return 1
  folder = str(recipes.root())
  sys.path.insert(0, folder)
  # A sweep starts programs in new processes.
  before = os.environ.get('PYTHONPATH')
  os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, [folder, before]))
  sys.argv = [f'tff-partial {name}', *rest]
  runpy.run_module(f'tasks.{name}', run_name='__main__', alter_sys=True)
  return None
