"""A round of MovieLens 1M under one Python version against another.

Each Python has an environment (`make env PYTHON=...`) in its own clone, and one
process; the processes take turns.

  python -m benchmarks.pythons --other=CLONE/.venv/bin/python
"""

import contextlib
import os
import platform
import statistics
import subprocess
import sys
import time
from typing import Any

import tensorflow as tf

from benchmarks import measuring
from benchmarks import recipe
from tff_partial import runtimes

_TURN = 'turn\n'


def serve(rounds: int, clients_per_round: int) -> None:
  """Run some rounds for each input line and print their median seconds."""
  paper = recipe.load(f'--clients_per_round={clients_per_round}')
  with runtimes.cohort(jit=paper.jit) as context:
    run = measuring.Run(
      paper.trainable.process, paper.clients, clients_per_round, context
    )
    measuring.say(f'{platform.python_version()} {tf.__version__}')
    for _ in sys.stdin:
      taken = []
      for _ in range(rounds):
        started = time.perf_counter()
        run.step()
        taken.append(time.perf_counter() - started)
      measuring.say(str(statistics.median(taken)))


class _Server:
  """Child process that runs rounds on request."""

  def __init__(self, python: str, options: Any, stack: contextlib.ExitStack):
    """Start the process and wait until it is ready."""
    command = [python, '-m', 'benchmarks.pythons', '--serve']
    command += [f'--rounds={options.rounds}']
    command += [f'--clients_per_round={options.clients_per_round}']
    self._process: Any = stack.enter_context(
      subprocess.Popen(
        command,
        cwd=measuring.ROOT,
        # The same sources, regardless of the other environment's packages.
        env={**os.environ, 'PYTHONPATH': str(measuring.ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
      )
    )
    stack.callback(self._process.kill)
    version, tensorflow = self._read().split()
    self.name = f'Python {version}, TensorFlow {tensorflow}'

  def _read(self) -> str:
    line = self._process.stdout.readline()
    if not line:
      raise measuring.BenchmarkError('A process ended before it was measured.')
    return line

  def turn(self) -> float:
    """Have it run its rounds and return their median in seconds."""
    self._process.stdin.write(_TURN)
    self._process.stdin.flush()
    return float(self._read())


def main() -> None:
  """Read the arguments and run the benchmark."""
  parser = measuring.parser(__doc__)
  add = parser.add_argument
  add('--other', help='the interpreter of the other environment')
  add('--serve', action='store_true', help='be one of the two processes')
  add('--rounds', type=int, default=20, help='rounds in a turn')
  add('--turns', type=int, default=15, help='turns of each that count')
  add('--clients_per_round', type=int, default=100, help='size of a cohort')
  options = parser.parse_args()
  if options.serve:
    serve(options.rounds, options.clients_per_round)
    return
  if not options.other:
    parser.error('--other: name the interpreter of another environment')
  measuring.begin('MovieLens, one round, under two Pythons')
  with contextlib.ExitStack() as stack:
    here, other = (
      _Server(python, options, stack)
      for python in (sys.executable, options.other)
    )
    seconds = measuring.take_turns(
      {here.name: here.turn, other.name: other.turn},
      repetitions=options.turns,
      warm_up=2,
    )
  measuring.ratio(seconds, other.name, here.name, 'at most 1.15')


if __name__ == '__main__':
  main()
