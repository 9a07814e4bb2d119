"""Time to the end of the first round, by stage.

MovieLens, the paper's recipe, each time in a new process. The import of TFF
alone, also in a new process, is the lower bound. Imports of this library and of
TensorFlow alone show what the library adds to TensorFlow.

  python -m benchmarks.startup
"""

import argparse
import json
import statistics
import time
from typing import Any

from benchmarks import measuring

IMPORT, DATA, BUILDING = 'import', 'data', 'building (tracing)'
WEIGHTS, COMPILING, ROUND = 'first weights', 'compiling', 'an ordinary round'
STAGES = (IMPORT, DATA, BUILDING, WEIGHTS, COMPILING, ROUND)


def start(options: Any) -> dict[str, float]:
  """Run one start-up and return the seconds of each stage."""
  ends = [options.started]

  def stage() -> float:
    ends.append(time.monotonic())
    return ends[-1] - ends[-2]

  seconds = {}
  from benchmarks import recipe
  from tff_partial import runtimes

  seconds[IMPORT] = stage()
  arguments = f'--clients_per_round={options.clients_per_round}'
  config, task = recipe.load_task(arguments)
  seconds[DATA] = stage()
  process = recipe.build(task.model_with('own'), config.flags())
  seconds[BUILDING] = stage()
  clients = task.clients('train', process.example_spec)
  seconds[DATA] += stage()
  jit: Any = {'true': True, 'false': False}.get(options.jit, 'auto')
  with runtimes.cohort(jit=jit) as context:
    run = measuring.Run(process, clients, options.clients_per_round, context)
    seconds[WEIGHTS] = stage()
    run.step()
    first = stage()
    later = []
    for _ in range(options.ordinary_rounds):
      run.step()
      later.append(stage())
  seconds[ROUND] = statistics.median(later)
  seconds[COMPILING] = first - seconds[ROUND]
  return seconds


def compare(options: Any) -> None:
  """Time start-ups in turn with bare imports."""
  measuring.begin('Start-up: MovieLens to the end of the first round')
  found: list[dict[str, float]] = []

  def ours() -> float:
    _, answer = measuring.new_process(
      '-m',
      'benchmarks.startup',
      f'--started={time.monotonic()!r}',
      f'--jit={options.jit}',
      f'--clients_per_round={options.clients_per_round}',
      f'--ordinary_rounds={options.ordinary_rounds}',
    )
    found.append(json.loads(answer))
    return sum(found[-1].values())

  def imported(module: str) -> measuring.Candidate:
    return lambda: measuring.new_process('-c', f'import {module}')[0]

  round_name, tff_name = 'first round', 'import of TFF alone'
  ours_name, tensorflow_name = 'import of tff_partial', 'import of TensorFlow'
  seconds = measuring.take_turns(
    {
      round_name: ours,
      tff_name: imported('tensorflow_federated'),
      ours_name: imported('tff_partial'),
      tensorflow_name: imported('tensorflow'),
    },
    repetitions=options.repetitions,
    warm_up=options.warm_up,
  )
  measuring.ratio(seconds, round_name, tff_name)
  more = statistics.median(
    mine - theirs
    for mine, theirs in zip(
      seconds[ours_name], seconds[tensorflow_name], strict=True
    )
  )
  measuring.say(
    f'  {ours_name} takes {measuring.in_seconds(more)} more than that of '
    'TensorFlow (goal: under 2 s)'
  )
  measuring.say('Of it, the medians of')
  for name in STAGES:
    taken = [stages[name] for stages in found[options.warm_up :]]
    measuring.say(
      f'  {name:20} {measuring.in_seconds(statistics.median(taken)):>9}'
    )


def main() -> None:
  """Read the arguments and compare, or run one start-up."""
  parser = measuring.parser(__doc__)
  add = parser.add_argument
  add('--repetitions', type=int, default=5, help='turns of each that count')
  add('--warm_up', type=int, default=1, help='turns of each before')
  add('--clients_per_round', type=int, default=100, help='size of a cohort')
  add('--ordinary_rounds', type=int, default=5, help='rounds after the first')
  add('--jit', default='true', choices=['auto', 'true', 'false'], help='XLA')
  add('--started', type=float, help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.started is None:
    compare(options)
  else:
    measuring.say(json.dumps(start(options)))


if __name__ == '__main__':
  main()
