"""Notes what programs say of themselves: `python -m tests.help_texts`.

The command `tff-partial` prints these texts, because nobody wants to wait until
TensorFlow is imported. For the same reason it knows the flags of `train`, by
which it says what a run is about to do.
"""

import json
import os
import subprocess
import sys
from typing import Any

from tasks.experiment.command_line import flags
from tests.support import commands
import tff_partial_programs
from tff_partial_programs import opening

_LIVE = """
import importlib, json, sys
from tests import help_texts
program = importlib.import_module(f'tasks.{sys.argv[1]}').PROGRAM
texts = [program.help(full=full) for full in (False, True)]
sys.stdout.write(json.dumps([*texts, help_texts.flags_of(program)]))
"""


def flags_of(program: Any) -> str:
  """The names, defaults and choices of a program's flags, as JSON.

  Args:
    program: The `PROGRAM` of its module.
  """
  said = {}
  for options in program.options:
    for name, choice in flags.define(options).items():
      # What comes from the environment or the task is no default of the flag.
      is_fixed = not (
        'Default:' in choice.text or choice.option.differs_by_task
      )
      said[name] = {
        'default': choice.on_command_line if is_fixed else None,
        'choices': choice.option.choices or [],
        'is_truth': choice.kind is bool,
      }
  lines = (f'"{name}": {json.dumps(said[name])}' for name in sorted(said))
  return '{\n' + ',\n'.join(lines) + '\n}\n'


def live(program: str) -> tuple[str, str, str]:
  """What a program says of itself, in a process of its own.

  Args:
    program: Its name.

  Returns:
    What `--help` says, what `--helpfull` says, and its flags.
  """
  done = subprocess.run(
    [sys.executable, '-c', _LIVE, program],
    check=True,
    cwd=commands.ROOT,
    env={**os.environ, 'TF_CPP_MIN_LOG_LEVEL': '3'},
    stdout=subprocess.PIPE,
    text=True,
  )
  short, full, noted = json.loads(done.stdout)
  return short, full, noted


def main() -> None:
  for program in sys.argv[1:] or tff_partial_programs.PROGRAMS:
    short, full, noted = live(program)
    file = tff_partial_programs.help_file
    file(program, full=True).write_text(full, encoding='utf-8')
    file(program).write_text(short, encoding='utf-8')
    if program == 'train':
      opening.FLAGS_FILE.write_text(noted, encoding='utf-8')


if __name__ == '__main__':
  main()
