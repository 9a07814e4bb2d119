"""Notes what `--help` says of each program: `python -m tests.help_texts`.

The command `tff-partial` prints these texts, because nobody wants to wait until
TensorFlow is imported.
"""

import os
import subprocess
import sys

from tests import commands
import tff_partial_programs

FOLDER = commands.ROOT / 'tff_partial_programs' / 'help'
_LIVE = """
import importlib, sys
program = importlib.import_module(f'tasks.{sys.argv[1]}').PROGRAM
sys.stdout.write(program.help())
"""


def live(program: str) -> str:
  """What a program says of itself, in a process of its own."""
  return subprocess.run(
    [sys.executable, '-c', _LIVE, program],
    check=True,
    cwd=commands.ROOT,
    env={**os.environ, 'TF_CPP_MIN_LOG_LEVEL': '3'},
    stdout=subprocess.PIPE,
    text=True,
  ).stdout


def main() -> None:
  for program in tff_partial_programs.PROGRAMS:
    (FOLDER / f'{program}.txt').write_text(live(program), encoding='utf-8')


if __name__ == '__main__':
  main()
