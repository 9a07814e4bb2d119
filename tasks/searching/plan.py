"""Options of a search, and the plan that follows from them."""

from collections.abc import Callable, Sequence
import dataclasses
import operator
from typing import Any, ClassVar

from tasks.errors import OptionError
from tasks.experiment.command_line import arguments as command_line
from tasks.experiment.command_line import flags
from tasks.experiment.config import Config
from tasks.options import option
from tasks.options import Options
from tff_partial import analysis
from tff_partial_programs import spelling

# The file of a search's trials, in its folder.
JOURNAL = 'search.journal'
HALVING, MEDIAN, NEVER = 'halving', 'median', 'never'
MINIMIZE, MAXIMIZE = 'minimize', 'maximize'
_VALIDATION = 'validation'
# Metrics of which less is better.
_COSTS = ('loss', 'rmse', 'mse', 'mae', 'error', 'perplexity')
# The median pruner ends no trial before so many have finished.
_FINISHED_FIRST = 4
_FORMS = (
  'flag=float:LOW:HIGH, flag=log:LOW:HIGH, flag=int:LOW:HIGH, '
  'flag=logint:LOW:HIGH or flag=choice:A,B,...'
)
_NUMBERS: dict[str, tuple[type[int] | type[float], bool]] = {
  'float': (float, False),
  'log': (float, True),
  'int': (int, False),
  'logint': (int, True),
}
# The search decides these itself.
_TAKEN = ('rounds', 'output_dir')

# Draws the value of a flag for a trial of Optuna's.
Suggest = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Search(Options):
  title: ClassVar[str] = 'Search'

  search: tuple[str, ...] = option(
    (),
    'flag=log:LOW:HIGH: a flag of tff-partial train to search for, in place of '
    '--grid; float:, int: and logint: likewise, or choice:A,B,...',
    is_repeated=True,
  )
  trials: int = option(20, 'Number of runs of the search.', at_least=1)
  metric: str = option(
    'loss',
    'Metric of the validation clients that the search optimizes, and by which '
    '--tune chooses.',
  )
  direction: str | None = option(
    None,
    'By default losses and errors are minimized, and all else maximized.',
    choices=(MINIMIZE, MAXIMIZE),
  )
  pruner: str | None = option(
    None,
    'Which runs end early: at each rung all but the best 1 / --reduction of '
    'those so far; those worse than the median of the finished runs; or none. '
    'By default halving, with --target_epsilon never.',
    choices=(HALVING, MEDIAN, NEVER),
  )
  reduction: int = option(
    3, 'Factor in rounds from one rung to the next.', at_least=2
  )
  first_rung: int | None = option(
    None,
    'Rounds after which runs are first compared; by default --rounds divided '
    'by the square of --reduction.',
    at_least=1,
  )
  search_seed: int = option(0, 'Seed of the values that trials try.')


def optuna() -> Any:
  """Import Optuna, which only a search needs.

  Raises:
    OptionError: If it is not installed.
  """
  try:
    import optuna as found
  except ImportError as error:
    raise OptionError(
      '--search needs Optuna, which is not installed here. Install it with '
      '`pip install optuna`, or give --grid in place of --search.'
    ) from error
  # Hide Optuna's own messages.
  found.logging.set_verbosity(found.logging.ERROR)
  return found


@dataclasses.dataclass(frozen=True)
class Plan:
  """A search with consistent settings.

  Attributes:
    search: The options of the search.
    metric: The metric, by its name in `result.json`.
    direction: 'minimize' or 'maximize'.
    parameters: The flags that are varied, with what draws their values.
    tried: Their choices, or the ends of their ranges.
    pruner: The rule by which runs end early.
    rungs: The rounds after which runs are compared; the last is their end.
    arguments: Arguments of all runs.
    config: The experiment without the varied flags.
  """

  search: Search
  metric: str
  direction: str
  parameters: dict[str, Suggest]
  tried: dict[str, list[Any]]
  pruner: str
  rungs: Sequence[int]
  arguments: Sequence[str]
  config: Config

  def build_pruner(self) -> Any:
    """Build Optuna's rule by which runs end early.

    Successive halving is asynchronous (ASHA: Li et al., A System for Massively
    Parallel Hyperparameter Tuning, MLSys 2020, algorithm 2), for one worker.
    Unlike there, a trial that ended is never resumed.
    """
    pruners = optuna().pruners
    if self.pruner == HALVING:
      return pruners.SuccessiveHalvingPruner(
        min_resource=self.rungs[0], reduction_factor=self.search.reduction
      )
    if self.pruner == MEDIAN:
      return pruners.MedianPruner(n_startup_trials=_FINISHED_FIRST)
    return pruners.NopPruner()

  def settings(self) -> dict[str, Any]:
    """Return the settings that may not change when a search is resumed."""
    return {
      'search': sorted(self.search.search),
      'metric': self.metric,
      'direction': self.direction,
      'pruner': self.pruner,
      'reduction': self.search.reduction,
      'rungs': list(self.rungs),
      'search_seed': self.search.search_seed,
      **{
        name: str(value)
        for name, value in self.config.flags().items()
        if name not in self.config.may_change()
      },
    }


def make(search: Search, arguments: Sequence[str]) -> Plan:
  """Plan a search.

  Raises:
    OptionError: If the options contradict one another.
  """
  config = command_line.parse(arguments)
  known = [choice.flag for choice in config.choices()]
  space = _space(search.search, known)
  # What makes trials private, at its costliest.
  private = [
    flags.argument(name, max(space[name][1], key=epsilon))
    for name in space.keys() & {'target_epsilon', 'noise_multiplier'}
  ]
  config = command_line.parse([*arguments, *private])
  metric, direction = criterion(search)
  pruner = _pruner(search, config)
  return Plan(
    search=search,
    metric=metric,
    direction=direction,
    parameters={flag: suggest for flag, (suggest, _) in space.items()},
    tried={flag: tried for flag, (_, tried) in space.items()},
    pruner=pruner,
    rungs=rungs(
      config.loop.rounds,
      search.first_rung,
      search.reduction,
      is_pruned=pruner != NEVER,
    ),
    arguments=tuple(arguments),
    config=config,
  )


def epsilon(value: Any) -> float:
  """Return a value of --target_epsilon as a number; 0 if it is none."""
  return analysis.run_folders.order(str(value))[1]


def _space(
  texts: Sequence[str], known: Sequence[str]
) -> dict[str, tuple[Suggest, list[Any]]]:
  """Parse the flags to vary, such as `server_learning_rate=log:0.01:1`."""
  found: dict[str, tuple[Suggest, list[Any]]] = {}
  for text in texts:
    flag, _, values = text.partition('=')
    if flag not in known:
      raise OptionError(
        f'--search={text}: tasks.train has no flag {flag!r}.'
        f'{spelling.hint(flag, known)} Say what to vary as {_FORMS}.'
      )
    if flag in _TAKEN or flag in found:
      why = 'is searched twice' if flag in found else 'is for the search to set'
      raise OptionError(f'--search={text}: --{flag} {why}. Leave it out.')
    found[flag] = _suggestion(text, flag, values)
  return found


def _suggestion(text: str, flag: str, values: str) -> tuple[Suggest, list[Any]]:
  """Return what draws the value of a flag, and its choices or ends."""
  kind, _, rest = values.partition(':')
  if kind == 'choice':
    choices = rest.split(',')
    if len(set(choices)) < 2 or len(set(choices)) < len(choices):
      raise OptionError(f'--search={text}: give two different values or more.')
    suggest = operator.methodcaller('suggest_categorical', flag, choices)
    return suggest, choices
  if kind not in _NUMBERS:
    raise OptionError(f'--search={text}: expected {_FORMS}.')
  number, is_log = _NUMBERS[kind]
  try:
    low, high = map(number, rest.split(':'))
    is_range = low < high < float('inf') and (low > 0 or not is_log)
  except ValueError:
    is_range = False
  if not is_range:
    raise OptionError(
      f'--search={text}: give two numbers after {kind}:, the lower one first'
      f'{" and above 0" if is_log else ""}, such as {flag}={kind}:1:10.'
    )
  name = f'suggest_{number.__name__}'
  suggest = operator.methodcaller(name, flag, low, high, log=is_log)
  return suggest, [low, high]


def criterion(search: Search) -> tuple[str, str]:
  """Return the metric of the validation clients to choose by, and a direction.

  Raises:
    OptionError: If it is one of other clients.
  """
  name = text = search.metric
  for sign in ('.', '/', '_'):
    name = name.removeprefix(f'{_VALIDATION}{sign}')
  if name.split('.')[0].split('/')[0] in ('test', 'best', 'train'):
    raise OptionError(
      f'--metric={text}: a search may look at the validation clients alone; '
      'what it chose by the test clients would be better there than elsewhere. '
      'Name a metric such as validation.loss.'
    )
  is_cost = name.split('_')[-1] in _COSTS
  return name, search.direction or (MINIMIZE if is_cost else MAXIMIZE)


def _pruner(search: Search, config: Config) -> str:
  is_planned = config.privacy.target_epsilon is not None
  if is_planned and search.pruner not in (None, NEVER):
    raise OptionError(
      f'--pruner={search.pruner}: with --target_epsilon the noise is planned '
      'for all rounds, so that a run cannot be given more of them later. Use '
      '--pruner=never, or --noise_multiplier in place of --target_epsilon.'
    )
  pruner = search.pruner or (NEVER if is_planned else HALVING)
  if pruner == NEVER:
    search.refuse_set(
      ('first_rung', 'reduction'),
      'no run ends early, so that none is compared before its end. Leave it '
      'out, or give another --pruner.',
    )
  return pruner


def rungs(
  rounds: int, first: int | None, reduction: int, *, is_pruned: bool = True
) -> list[int]:
  """Return the rounds after which runs are compared: 100, 300 and 900 of 900.

  Args:
    rounds: The rounds of a whole run, which are the last rung.
    first: The first rung; by default `rounds` over the square of `reduction`.
    reduction: The ratio of successive rungs.
    is_pruned: True if there are rungs before the last.

  Raises:
    OptionError: If the first is after the last.
  """
  if first is not None and first > rounds:
    raise OptionError(
      f'--first_rung={first}: runs have {rounds} rounds. Give fewer, or more '
      '--rounds.'
    )
  found = []
  place = first or max(rounds // reduction**2, 1)
  while is_pruned and place < rounds:
    found.append(place)
    place *= reduction
  return [*found, rounds]
