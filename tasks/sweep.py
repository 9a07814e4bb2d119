r"""Trains a grid of runs one after another; run it again to resume.

  tff-partial sweep --sweep_dir=OUT --grid=seed=0,1,2 \
      --grid=reconstruction_steps=0,1,5 -- --recipe=movielens_fed_recon \
      --rounds=2000
  tff-partial sweep --sweep_dir=OUT --grid=seed=0,1,2 \
      --recipes=movielens_furl,movielens_ditto
  tff-partial sweep --sweep_dir=OUT --recipes=movielens_furl,movielens_ditto \
      --tune=update_learning_rate=0.1,0.5 --repeat=seed=0,1,2 --metric=rmse
  tff-partial sweep --sweep_dir=OUT --trials=30 --metric=validation.rmse \
      --search=update_learning_rate=log:0.01:1 --search=update_steps=int:1:50 \
      -- --recipe=movielens_fed_recon

Flags after `--` are given to every run of `tff-partial train`, and win over
recipes. Each run has its own folder below OUT; finished runs are skipped, and
an interrupted one resumes. A run that fails does not stop the others. At the
end, `tff-partial report` makes a table of them. With --search the runs are
trials of Optuna, of which poor ones end early (docs/hyperparameter_search.md).
"""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import math
import os
import pathlib
import subprocess
import sys

from tasks.errors import OptionError
from tasks.experiment.command_line import arguments as command_line
from tasks.experiment.command_line.program import Program
from tasks.experiment.config import Config
from tasks.experiment.runs.folder import Folder
from tasks.options import option
from tasks.options import Options
from tasks.searching import grids
from tasks.searching import plan as plans
from tasks.shared_options import by_data
from tasks.shared_options import data_name
from tff_partial import analysis
from tff_partial.training import files
from tff_partial_programs import recipes


@dataclasses.dataclass(frozen=True)
class Sweep(Options):
  """Options of the runs of a sweep."""

  sweep_dir: str | None = option(None, 'Folder for the folders of the runs.')
  recipes: tuple[str, ...] = option(
    (), 'Names of recipes, each of which is run.'
  )
  grid: tuple[str, ...] = option(
    (),
    'flag=value,value,...: a flag of tff-partial train to vary.',
    is_repeated=True,
  )
  tune: tuple[str, ...] = option(
    (),
    'flag=value,value,...: a flag to tune. For each recipe and value of --grid '
    'the best setting by --metric is reported. flag+flag= varies both alike.',
    is_repeated=True,
  )
  repeat: tuple[str, ...] = option(
    (),
    'flag=value,value,...: a flag to repeat by, such as the seed. --tune '
    'chooses with the first value and repeats its choice with the others.',
    is_repeated=True,
  )


# The arguments after `--` on the command line.
_passed_on: list[str] = []


def take_rest(arguments: Sequence[str]) -> list[str]:
  """Keep the arguments after `--` for the runs, and return the rest.

  Raises:
    OptionError: If a recipe, or a flagfile of the runs, is not after it, or the
      folder of runs is given.
  """
  arguments = list(arguments)
  if '--' in arguments:
    place = arguments.index('--')
    _passed_on[:] = arguments[place + 1 :]
    arguments = arguments[:place]
  for argument in (*arguments, *_passed_on):
    name, *more = argument.lstrip('-').split('=')
    if 'output_dir' in (name, *more[:-1]):
      raise OptionError(
        f'{argument}: each run has its own folder below --sweep_dir. Leave it '
        'out.'
      )
  known = {*Sweep().flags(), *plans.Search().flags()}
  for argument in arguments:
    name, _, value = argument.lstrip('-').partition('=')
    is_of_runs = name == 'recipe'
    if name == 'flagfile' and pathlib.Path(value).is_file():
      text = pathlib.Path(value).read_text(encoding='utf-8', errors='replace')
      lines = text.splitlines()
      given = {line.strip().lstrip('-').partition('=')[0] for line in lines}
      is_of_runs = not given & known
    if is_of_runs:
      raise OptionError(
        f'{argument}: flags of the runs follow `--`: tff-partial sweep '
        f'--sweep_dir=OUT --grid=seed=0,1 -- {argument}'
      )
  return arguments


def _run(binary: str, *arguments: str) -> int:
  """Run a binary in a process that ends with this one; return its status."""
  command = [sys.executable, '-m', binary, *arguments]
  environment = {**os.environ, command_line.OF_SWEEP: str(os.getpid())}
  return subprocess.run(command, check=False, env=environment).returncode


def _search(search: plans.Search, sweep: Sweep, root: pathlib.Path) -> int:
  """Search for the best values of flags; return the status of the report."""
  for text in (*sweep.grid, *sweep.tune):
    name, _, values = text.partition('=')
    raise OptionError(
      f'{text}: with --search there is no grid. Search for the flag, '
      f'too: --search={name}=choice:{values}.'
    )
  if len(sweep.recipes) > 1:
    raise OptionError(
      f'--recipes={",".join(sweep.recipes)}: a search is of one recipe. '
      'Search each in a folder of its own.'
    )
  if (root / analysis.run_folders.FAILED_FILE).exists():
    raise OptionError(
      f'--sweep_dir={root}: the folder holds the runs of a grid, which the '
      'report of a search leaves out. Choose another one.'
    )
  arguments = [f'--recipe={name}' for name in sweep.recipes]
  plan = plans.make(search, [*arguments, *_passed_on])
  from tasks.searching import trials  # Slow, since it imports TensorFlow.

  if not (root / plans.JOURNAL).exists():
    trials.check(plan)
  when = 'at the end'
  if plan.pruner != plans.NEVER:
    when = f'after rounds {", ".join(map(str, plan.rungs))} ({plan.pruner})'
  print(
    f'{plan.config.task.name} by {plan.config.algorithm}: {search.trials} '
    f'trials to {plan.direction} the validation {plan.metric}, compared {when}.'
  )
  for line in cost([plan.config] * search.trials, 'trials', 'search'):
    print(line, flush=True)
  study = trials.run(plan, root, lambda flags: _run('tasks.train', *flags))
  status = _run('tasks.report', f'--sweep_dir={root}')
  failed = [str(t.number) for t in study.trials if trials.has_failed(t)]
  if failed:
    raise OptionError(
      f'{len(failed)} of {len(study.trials)} trials failed, and said why: '
      f'{", ".join(failed)}. If their runs failed by something else than their '
      'values, such as missing data, the same command tries them again.'
    )
  return status


def cost(configs: Sequence[Config], runs: str, what: str) -> list[str]:
  """Return warnings of what private runs cost, by task and data set, if any.

  Args:
    configs: The experiments, private or not.
    runs: The word for the runs, such as 'trials'.
    what: The word for what trains them, such as 'search'.
  """
  costs = by_data(
    (config.task.name, data_name(config.flags()), config.privacy)
    for config in configs
    if config.privacy.is_on
  )
  lines = []
  for data, private in costs.items():
    each = 'as much as its noise says, see result.json; they add up'
    targets = [
      one.target_epsilon for one in private if one.target_epsilon is not None
    ]
    if len(targets) == len(private):
      first = private[0]
      each = f'epsilon {first.target_epsilon:g} at delta {first.delta:g}'
      if len({(one.target_epsilon, one.delta) for one in private}) > 1:
        each = 'what its flags say'
      each += (
        f', together up to epsilon {math.fsum(targets):g} at delta '
        f'{math.fsum(one.delta for one in private):.3g} by their sum'
      )
    of = f' of {": ".join(filter(None, data))}' if len(costs) > 1 else ''
    lines.append(
      f'WARNING: the runs are private, and each of the {len(private)} {runs}'
      f'{of} costs the same users {each}. Only a {what} on public or '
      'invented data costs nothing.'
    )
  return lines


def _refused(
  todo: Mapping[str, grids.Run], written: Sequence[str]
) -> dict[str, str]:
  """Check all runs before the first, and print what to know about them.

  Returns:
    Names of the folders of runs that cannot begin, with the reasons.

  Raises:
    OptionError: If none can.
  """
  configs, refused = [], {}
  for name, run in todo.items():
    try:
      configs.append(command_line.parse(run.arguments))
    except OptionError as error:
      refused[name] = str(error)
    else:
      command_line.warn_without_effect(configs[-1], written)
  if not configs:
    raise OptionError('; '.join(dict.fromkeys(refused.values())))
  for name, why in refused.items():
    print(f'WARNING: {name} is not run: {why}')
  for line in cost(configs, 'runs', 'sweep'):
    print(line, flush=True)
  return refused


def _note_failed(root: pathlib.Path, failed: Mapping[str, str]) -> None:
  """Write which runs of the sweep failed so far, and why."""
  lines = [f'{n}\t{" ".join(why.split())}\n' for n, why in failed.items()]
  files.write_whole(root / analysis.run_folders.FAILED_FILE, ''.join(lines))


def main(sweep: Sweep, search: plans.Search) -> int:
  if not sweep.sweep_dir:
    raise OptionError('--sweep_dir: name a folder for the runs.')
  root = pathlib.Path(sweep.sweep_dir)
  if search.search:
    return _search(search, sweep, root)
  if sweep.repeat and not sweep.tune:
    raise OptionError(
      f'--repeat={sweep.repeat[0]}: nothing is chosen by --tune. Give it as '
      '--grid.'
    )
  read = {'metric', 'direction'} if sweep.tune else set()
  search.refuse_set(
    {field.name for field in dataclasses.fields(search)} - read,
    'there is nothing to search for. Say what to vary, such as '
    '--search=update_learning_rate=log:0.01:1.',
  )
  criterion = plans.criterion(search)
  for name in sweep.recipes:
    recipes.path(name)
  first = [text.partition(',')[0] for text in sweep.repeat]
  grid = [*sweep.grid, *sweep.tune, *first]
  todo = grids.planned(sweep.recipes, grid, _passed_on)
  rows = grids.rows(todo, grids.names_of([*sweep.tune, *first]))
  costliest = [
    max(runs, key=lambda run: plans.epsilon(run.setting.get('target_epsilon')))
    for runs in rows.values()
  ]
  again = grids.repeated(costliest, sweep.repeat)
  refused = _refused({**todo, **again}, [*grid, *_passed_on])
  failed = {name: why for name, why in refused.items() if name in todo}
  if (root / plans.JOURNAL).exists():
    raise OptionError(
      f'--sweep_dir={root}: the folder holds a search, whose report leaves '
      'other runs out. Choose another one.'
    )
  root.mkdir(parents=True, exist_ok=True)
  lock = files.locked(root)
  try:
    _train_all(todo, failed, root)
    reported = [f'--sweep_dir={root}'] if len(failed) < len(todo) else []
    if sweep.tune:
      best = grids.choose(root, rows, grids.names_of(sweep.tune), *criterion)
      again = grids.repeated(best, sweep.repeat)
      todo = {**todo, **again}
      _train_all(again, failed, root, todo)
      names = (*(run.name() for run in best), *again)
      reported = [f'--sweep_dir={root / n}' for n in names if n not in failed]
    status = 0
    if reported:
      chosen = [f'--report_dir={root}', '--of=best'] if sweep.tune else []
      status = _run('tasks.report', *reported, *chosen)
  finally:
    os.close(lock)
  if failed:
    raise OptionError(
      f'{len(failed)} of {len(todo)} runs failed, their messages are above: '
      f'{", ".join(str(root / name) for name in failed)}.'
    )
  return status


def _train_all(
  todo: Mapping[str, grids.Run],
  failed: dict[str, str],
  root: pathlib.Path,
  of: Collection[str] = (),
) -> None:
  """Train the runs that are not refused, and note which fail, in `failed`.

  `of` are the names of all runs of the sweep; by default of these.
  """
  planned_file = root / analysis.run_folders.PLANNED_FILE
  files.write_whole(planned_file, ''.join(f'{name}\n' for name in of or todo))
  _note_failed(root, failed)
  for number, (name, run) in enumerate(todo.items(), 1):
    if name in failed:
      continue
    folder = root / name
    print(f'[{number}/{len(todo)}] {folder}', flush=True)
    status = _run('tasks.train', *run.arguments, f'--output_dir={folder}')
    if status and not Folder(str(folder)).has_diverged:
      failed[name] = f'exit status {status}, see its messages'
      _note_failed(root, failed)


PROGRAM = Program(main, (Sweep(), plans.Search()), take_rest)

if __name__ == '__main__':
  PROGRAM.run()
