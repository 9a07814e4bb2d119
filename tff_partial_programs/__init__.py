"""The command `tff-partial`: names the programs of `tasks`, and runs one.

A package of its own, because whoever asks for help should not wait until
TensorFlow is imported. In the wheel `tasks` lies inside of this folder, so
that it takes no such common name from anybody; in a clone it is its neighbour.
"""

import ast
from collections.abc import Sequence
import difflib
import os
import pathlib
import runpy
import sys

# In the order in which one uses them.
PROGRAMS = (
  'train',
  'evaluate',
  'new_users',
  'users',
  'private_tables',
  'clients',
  'sweep',
  'report',
  'audit',
  'export',
)
_HELP = ('-h', '-help', '--help', '-?')


def root() -> pathlib.Path:
  """The folder that `tasks` is imported from."""
  here = pathlib.Path(__file__).resolve().parent
  return here if (here / 'tasks').is_dir() else here.parent


def description(program: str) -> str:
  """The first sentence of a program's docstring; nothing is imported."""
  source = (root() / 'tasks' / f'{program}.py').read_text(encoding='utf-8')
  docstring = ast.get_docstring(ast.parse(source)) or ''
  return docstring.splitlines()[0]


def asks_for_help(arguments: Sequence[str]) -> bool:
  """Whether a program is to say what it does, and nothing else."""
  arguments = list(arguments)
  # What follows is for other programs.
  end = arguments.index('--') if '--' in arguments else len(arguments)
  return any(argument in _HELP for argument in arguments[:end])


def help_text(program: str) -> str:
  """What `--help` says of a program, as `python -m tests.help_texts` noted it.

  So nobody waits until TensorFlow is imported.
  """
  folder = pathlib.Path(__file__).resolve().parent / 'help'
  return (folder / f'{program}.txt').read_text(encoding='utf-8')


def answer_help(command: Sequence[str]) -> None:
  """Ends a process `python -m tasks.PROGRAM --help` with its answer.

  Args:
    command: The command line of the interpreter.

  Raises:
    SystemExit: If there is such an answer.
  """
  command = list(command)
  if '-m' not in command[:-1]:
    return
  place = command.index('-m') + 1
  package, _, program = command[place].partition('.')
  if package != 'tasks' or program not in PROGRAMS:
    return
  if asks_for_help(command[place + 1 :]):
    sys.stdout.write(help_text(program))
    raise SystemExit(0)


def usage() -> str:
  """What `tff-partial --help` prints."""
  width = max(map(len, PROGRAMS))
  recipes = root() / 'tasks' / 'recipes'
  return '\n'.join(
    [
      'Partially local federated learning: tff-partial PROGRAM [FLAGS]',
      '',
      *(f'  {name:<{width}}  {description(name)}' for name in PROGRAMS),
      '',
      'tff-partial PROGRAM --help names the flags of a program. To begin with:',
      '',
      f'  tff-partial train --flagfile={recipes / "demo.flags"}',
      '',
    ]
  )


def main(arguments: Sequence[str] | None = None) -> int | None:
  """Runs a program, as `python -m tasks.PROGRAM` does in a clone.

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
    meant = difflib.get_close_matches(name, PROGRAMS, 1)
    sys.stderr.write(
      f'error: there is no program {name!r}'
      f'{f"; did you mean {meant[0]!r}?" if meant else "."} '
      f'Choose one of {", ".join(PROGRAMS)}.\n'
    )
    return 1
  if asks_for_help(rest):
    sys.stdout.write(help_text(name))
    return 0
  folder = str(root())
  sys.path.insert(0, folder)
  # A sweep starts programs in processes of their own.
  before = os.environ.get('PYTHONPATH')
  os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, [folder, before]))
  sys.argv = [f'tff-partial {name}', *rest]
  runpy.run_module(f'tasks.{name}', run_name='__main__', alter_sys=True)
  return None
