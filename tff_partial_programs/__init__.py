"""The command `tff-partial`: names the programs of `tasks`, and runs one.

A package of its own, because whoever asks for help should not wait until
TensorFlow is imported. In the wheel `tasks` lies inside of this folder, so
that it takes no such common name from anybody; in a clone it is its neighbour.
"""

import ast
from collections.abc import Sequence
import os
import pathlib
import runpy
import sys

from tff_partial_programs import opening
from tff_partial_programs import recipes
from tff_partial_programs import spelling

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
_FULL_HELP = ('-helpfull', '--helpfull')
# What has more flags than two screens can show.
_LONG = ('train',)


def description(program: str) -> str:
  """The first sentence of a program's docstring; nothing is imported."""
  path = recipes.root() / 'tasks' / f'{program}.py'
  docstring = ast.get_docstring(ast.parse(path.read_text('utf-8'))) or ''
  return docstring.splitlines()[0]


def asks_for_help(arguments: Sequence[str]) -> bool:
  """Whether a program is to say what it does, and nothing else."""
  return _has(arguments, _HELP + _FULL_HELP)


def asks_for_all(arguments: Sequence[str]) -> bool:
  """Whether a program is to name all of its flags."""
  return _has(arguments, _FULL_HELP)


def _has(arguments: Sequence[str], names: Sequence[str]) -> bool:
  """Whether a command line has a flag of these."""
  arguments = list(arguments)
  # What follows is for other programs.
  end = arguments.index('--') if '--' in arguments else len(arguments)
  return any(argument in names for argument in arguments[:end])


def help_file(program: str, *, full: bool = False) -> pathlib.Path:
  """Where `python -m tests.help_texts` notes what a program says of itself.

  Args:
    program: The program.
    full: Whether with all flags; the same of programs that have few.
  """
  name = f'{program}_full' if full and program in _LONG else program
  return pathlib.Path(__file__).resolve().parent / 'help' / f'{name}.txt'


def help_text(program: str, *, full: bool = False) -> str:
  """What `--help` says of a program, as `python -m tests.help_texts` noted it.

  So nobody waits until TensorFlow is imported.

  Args:
    program: The program.
    full: Whether with all flags, as `--helpfull` says it.
  """
  return help_file(program, full=full).read_text(encoding='utf-8')


def answer_early(command: Sequence[str]) -> None:
  """Says what can be said before TensorFlow is imported.

  Ends a process `python -m tasks.PROGRAM --help` with its answer, and of one
  that trains says what it is about to do.

  Args:
    command: The command line of the interpreter.

  Raises:
    SystemExit: If there is such an answer, or a flag is misspelt.
  """
  command = list(command)
  if '-m' not in command[:-1]:
    return
  place = command.index('-m') + 1
  package, _, program = command[place].partition('.')
  if package != 'tasks' or program not in PROGRAMS:
    return
  arguments = command[place + 1 :]
  if asks_for_help(arguments):
    sys.stdout.write(help_text(program, full=asks_for_all(arguments)))
    raise SystemExit(0)
  if program == 'train':
    opening.say(arguments)


def usage() -> str:
  """What `tff-partial --help` prints."""
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
  if asks_for_help(rest):
    sys.stdout.write(help_text(name, full=asks_for_all(rest)))
    return 0
  if name == 'train':
    opening.say(rest)
  folder = str(recipes.root())
  sys.path.insert(0, folder)
  # A sweep starts programs in processes of their own.
  before = os.environ.get('PYTHONPATH')
  os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, [folder, before]))
  sys.argv = [f'tff-partial {name}', *rest]
  runpy.run_module(f'tasks.{name}', run_name='__main__', alter_sys=True)
  return None
