"""Cost of privacy accounting relative to the private run.

A private run of MovieLens, from process start to end, against the accounting
alone in its own process: finding the noise for the epsilon, and the ledger's
count after each round.

  python -m benchmarks.accounting
"""

import argparse
import json
import pathlib
import tempfile
import time
from typing import Any

from benchmarks import measuring
from benchmarks import recipe
from tasks.experiment.runs import folder as folders
from tff_partial.dp import clipping as clipping_lib
from tff_partial.dp import privacy_plans

_RECIPE = 'movielens_fed_recon_dp'
COUNTING, RUN = 'counting privacy', 'the whole run'


def count(folder: pathlib.Path) -> float:
  """Repeat the accounting of the run in a folder and return the seconds."""
  spent = json.loads((folder / folders.RESULT_FILE).read_text())['privacy']
  started = time.perf_counter()
  plan = privacy_plans.plan(
    clipping_lib.AdaptiveClip(),
    target_epsilon=spent['epsilon'],
    sampling=spent['sampling'],
    **{
      name: spent[name]
      for name in ('delta', 'population', 'clients_per_round', 'rounds')
    },
  )
  ledger = privacy_plans.PrivacyLedger(plan)
  for number in range(1, plan.rounds + 1):
    ledger.columns(number)
  return time.perf_counter() - started


def compare(options: Any, root: pathlib.Path) -> None:
  """Time the run and its accounting in turn."""
  measuring.begin('Accounting: its share of a private run of MovieLens')
  folders: list[pathlib.Path] = []
  # Prints a note and changes `data` if ratings have to be invented.
  config, _ = recipe.load_task(name=_RECIPE)
  arguments = [
    f'--flagfile={recipe.flags_file(_RECIPE)}',
    f'--data={config.data.data}',
  ]
  if config.data.is_synthetic:
    # The same share of the users, who are a tenth of the real ones.
    arguments.append('--clients_per_round=100')

  def run() -> float:
    folders.append(root / str(len(folders)))
    return measuring.new_process(
      *('-m', 'tasks.train', *arguments, f'--output_dir={folders[-1]}')
    )[0]

  def counting() -> float:
    command = ('-m', 'benchmarks.accounting', f'--count={folders[-1]}')
    return float(measuring.new_process(*command)[1])

  seconds = measuring.take_turns(
    {RUN: run, COUNTING: counting},
    repetitions=options.repetitions,
    warm_up=options.warm_up,
  )
  measuring.ratio(seconds, COUNTING, RUN, goal='under 0.01')


def main() -> None:
  """Read the arguments and compare, or time the accounting once."""
  parser = measuring.parser(__doc__)
  add = parser.add_argument
  add('--repetitions', type=int, default=3, help='turns of each that count')
  add('--warm_up', type=int, default=0, help='turns of each before')
  add('--count', type=pathlib.Path, help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.count is None:
    with tempfile.TemporaryDirectory() as root:
      compare(options, pathlib.Path(root))
  else:
    measuring.say(repr(count(options.count)))


if __name__ == '__main__':
  main()
