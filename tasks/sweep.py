r"""Trains a grid of runs one after another; run it again to resume.

  tff-partial sweep --sweep_dir=OUT --grid=seed=0,1,2 \
      --grid=reconstruction_steps=0,1,5 -- --recipe=movielens_fed_recon \
      --rounds=2000
  tff-partial sweep --sweep_dir=OUT --grid=seed=0,1,2 \
      --recipes=movielens_furl,movielens_ditto
  tff-partial sweep --sweep_dir=OUT --trials=30 --metric=validation.rmse \
      --search=update_learning_rate=log:0.01:1 --search=update_steps=int:1:50 \
      -- --recipe=movielens_fed_recon

Flags after `--` are given to every run of `tff-partial train`, and win over
recipes. Each run has its own folder below OUT; finished runs are skipped, and
an interrupted one resumes. A run that fails does not stop the others. At the
end, `tff-partial report` makes a table of them. With --search the runs are
trials of Optuna, of which poor ones end early (docs/hyperparameter_search.md).
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import itertools
import math
import os
import pathlib
import subprocess
import sys

from tasks.errors import OptionError
from tasks.experiment.command_line import arguments as command_line
from tasks.experiment.command_line import flags
from tasks.experiment.command_line.program import Program
from tasks.experiment.config import Config
from tasks.experiment.options.privacy import Privacy
from tasks.experiment.runs.folder import Folder
from tasks.experiment.runs.folder import write_whole
from tasks.options import option
from tasks.options import Options
from tasks.searching import plan as plans
from tasks.shared_options import data_name
from tff_partial import analysis
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


# The most bytes of a folder's name on usual disks.
_LONGEST_NAME = 255
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
    name = argument.lstrip('-').removeprefix('grid=').partition('=')[0]
    if name == 'output_dir':
      raise OptionError(
        f'{argument}: each run has its own folder below --sweep_dir. Leave it '
        'out.'
      )
  known = {
    f.name for kind in (Sweep, plans.Search) for f in dataclasses.fields(kind)
  }
  for argument in arguments:
    name, _, value = argument.lstrip('-').partition('=')
    is_of_runs = name == 'recipe'
    if name == 'flagfile' and pathlib.Path(value).is_file():
      lines = pathlib.Path(value).read_text(encoding='utf-8').splitlines()
      given = {line.strip().lstrip('-').partition('=')[0] for line in lines}
      is_of_runs = not given & known
    if is_of_runs:
      raise OptionError(
        f'{argument}: flags of the runs follow `--`: tff-partial sweep '
        f'--sweep_dir=OUT --grid=seed=0,1 -- {argument}'
      )
  return arguments


def settings(grid: Sequence[str]) -> Iterator[dict[str, str]]:
  """Yield the value of every varied flag, for each run of a grid.

  Args:
    grid: Strings `flag=value,value,...`.

  Raises:
    OptionError: If a string is not of this form or names a flag twice.
  """
  names, choices = [], []
  for text in grid:
    name, equals, values = text.partition('=')
    if not equals or not name or '' in values.split(','):
      raise OptionError(
        f'--grid={text}: expected flag=value,value,... such as seed=0,1,2.'
      )
    if name in names:
      raise OptionError(f'--grid={text}: {name} is in the grid twice.')
    names.append(name)
    choices.append(values.split(','))
  for chosen in itertools.product(*choices):
    yield dict(zip(names, chosen, strict=True))


def folder_name(recipe: str, setting: dict[str, str]) -> str:
  """Name a run's folder after its recipe and varied flags."""
  parts = [recipe] if recipe else []
  parts += [f'{name}={value}' for name, value in setting.items()]
  return ','.join(parts).replace('/', '_') or 'run'


def planned(
  names: Sequence[str], grid: Sequence[str], passed_on: Sequence[str]
) -> dict[str, list[str]]:
  """Plan the runs of a grid.

  Each run leaves out the flags that `expand` drops, varied ones without effect
  and, if they are of several algorithms, those that only other algorithms read.
  Runs that differ only by such a flag become one.

  Args:
    names: Names of recipes, to run each of them.
    grid: Strings `flag=value,value,...`.
    passed_on: Arguments of all runs.

  Returns:
    The flags of each run, by the name of its folder.

  Raises:
    OptionError: If a string of the grid is not of this form, varies a flag that
      has no effect in any run, or two runs would share a folder.
  """
  runs = []
  for recipe in names or ['']:
    for setting in settings(grid):
      own = {n: flags.argument(n, value) for n, value in setting.items()}
      arguments = [f'--recipe={recipe}'] if recipe else []
      written = [*passed_on, *own.values()]
      arguments = command_line.expand([*arguments, *written], written)
      runs.append((recipe, setting, own, arguments))
  chosen = {command_line.algorithm_of(arguments) for *_, arguments in runs}
  if len(chosen) > 1:
    for *_, arguments in runs:
      algorithm = command_line.algorithm_of(arguments)
      arguments[:] = command_line.without_unread(arguments, algorithm)
  varied = {text.partition('=')[0] for text in grid if ',' in text}
  idle = [varied & _without_effect(arguments) for *_, arguments in runs]
  for name in sorted(varied.intersection(*idle)):
    raise OptionError(
      f'--grid: {name} has no effect: neither training nor evaluations of '
      f'{" and ".join(sorted(chosen))} train local weights. Leave it out.'
    )
  todo: dict[str, list[str]] = {}
  for (recipe, setting, own, arguments), unused in zip(runs, idle, strict=True):
    left_out = {own[name] for name in unused}
    arguments = [a for a in arguments if a not in left_out]
    setting = {n: v for n, v in setting.items() if own[n] in arguments}
    name = folder_name(recipe, setting)
    if todo.setdefault(name, arguments) != arguments:
      raise OptionError(
        f'--grid: two runs would share the folder {name}, as / becomes _ '
        'there. Run one of them in another --sweep_dir.'
      )
    if (size := len(os.fsencode(name))) > _LONGEST_NAME:
      raise OptionError(
        f'--grid: the folder {name:.80}... would have a name of {size} bytes, '
        f'and {_LONGEST_NAME} are the most. Vary fewer flags, or give recipes '
        'of their values by --recipes.'
      )
  return todo


def _without_effect(arguments: Sequence[str]) -> frozenset[str]:
  """Return the flags that change nothing in a run; none if it is refused."""
  try:
    return command_line.parse(arguments).without_effect()
  except OptionError:
    return frozenset()


def _run(binary: str, *arguments: str) -> int:
  """Run a binary in a process that ends with this one; return its status."""
  command = [sys.executable, '-m', binary, *arguments]
  environment = {**os.environ, command_line.OF_SWEEP: str(os.getpid())}
  return subprocess.run(command, check=False, env=environment).returncode


def _search(search: plans.Search, sweep: Sweep, root: pathlib.Path) -> None:
  """Search for the best values of flags."""
  for text in sweep.grid:
    name, _, values = text.partition('=')
    raise OptionError(
      f'--grid={text}: with --search there is no grid. Search for the flag, '
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
  from tasks.searching import trials

  if not (root / trials.JOURNAL).exists():
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
  _run('tasks.report', f'--sweep_dir={root}')
  failed = [str(t.number) for t in study.trials if trials.has_failed(t)]
  if failed:
    raise OptionError(
      f'{len(failed)} of {len(study.trials)} trials failed, and said why: '
      f'{", ".join(failed)}. If their runs failed by something else than their '
      'values, such as missing data, the same command tries them again.'
    )


def cost(configs: Sequence[Config], runs: str, what: str) -> list[str]:
  """Warn of the total cost of private runs to users who are in all of them.

  Args:
    configs: The experiments, private or not.
    runs: The word for the runs, such as 'trials'.
    what: The word for what trains them, such as 'search'.

  Returns:
    A line for each task and data set with private runs.
  """
  costs: dict[str, list[tuple[str, Privacy]]] = {}
  for config in configs:
    if config.privacy.is_on:
      one = data_name(config.flags()), config.privacy
      costs.setdefault(config.task.name, []).append(one)
  by_data = {
    # Data without a name may be any.
    (task, data): [each for name, each in of_task if name in ('', data)]
    for task, of_task in costs.items()
    for data in sorted({name for name, _ in of_task if name}) or ['']
  }
  lines = []
  for data, private in by_data.items():
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
    of = f' of {": ".join(filter(None, data))}' if len(by_data) > 1 else ''
    lines.append(
      f'WARNING: the runs are private, and each of the {len(private)} {runs}'
      f'{of} costs the same users {each}. Only a {what} on public or '
      'invented data costs nothing.'
    )
  return lines


def _refused(
  todo: dict[str, list[str]], written: Sequence[str]
) -> dict[str, str]:
  """Check all runs before the first, and print what to know about them.

  Args:
    todo: The flags of each run, by the name of its folder.
    written: The flags that the user wrote.

  Returns:
    Names of the folders of runs that cannot begin, with the reasons.

  Raises:
    OptionError: If none can.
  """
  configs, refused = [], {}
  for name, arguments in todo.items():
    try:
      configs.append(command_line.parse(arguments))
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
  write_whole(root / analysis.run_folders.FAILED_FILE, ''.join(lines))


def main(sweep: Sweep, search: plans.Search) -> None:
  """Run the search, or the runs of the grid."""
  if not sweep.sweep_dir:
    raise OptionError('--sweep_dir: name a folder for the runs.')
  root = pathlib.Path(sweep.sweep_dir)
  if search.search:
    _search(search, sweep, root)
    return
  if search != plans.Search():
    raise OptionError(
      '--search: flags of a search are given, but nothing to search for. Say '
      'what to vary, such as --search=update_learning_rate=log:0.01:1.'
    )
  for name in sweep.recipes:
    recipes.path(name)
  todo = planned(sweep.recipes, sweep.grid, _passed_on)
  failed = _refused(todo, [*sweep.grid, *_passed_on])
  # Slow, since they import TensorFlow.
  from tasks.searching import trials
  from tff_partial.training import files

  if (root / trials.JOURNAL).exists():
    raise OptionError(
      f'--sweep_dir={root}: the folder holds a search, whose report leaves '
      'other runs out. Choose another one.'
    )
  root.mkdir(parents=True, exist_ok=True)
  lock = files.locked(root)
  try:
    _train_all(todo, failed, root)
  finally:
    os.close(lock)
  if failed:
    raise OptionError(
      f'{len(failed)} of {len(todo)} runs failed, their messages are above: '
      f'{", ".join(str(root / name) for name in failed)}.'
    )


def _train_all(
  todo: Mapping[str, Sequence[str]], failed: dict[str, str], root: pathlib.Path
) -> None:
  """Train the runs that are not refused, note which fail, and report."""
  planned_file = root / analysis.run_folders.PLANNED_FILE
  write_whole(planned_file, ''.join(f'{name}\n' for name in todo))
  _note_failed(root, failed)
  for number, (name, arguments) in enumerate(todo.items(), 1):
    if name in failed:
      continue
    folder = root / name
    print(f'[{number}/{len(todo)}] {folder}', flush=True)
    status = _run('tasks.train', *arguments, f'--output_dir={folder}')
    if status and not Folder(str(folder)).has_diverged:
      failed[name] = f'exit status {status}, see its messages'
      _note_failed(root, failed)
  if len(failed) < len(todo):
    _run('tasks.report', f'--sweep_dir={root}')


PROGRAM = Program(main, (Sweep(), plans.Search()), take_rest)

if __name__ == '__main__':
  PROGRAM.run()
