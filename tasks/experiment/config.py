"""The configuration of an experiment: all that decides its numbers.

docs/experiments.md has examples.
"""

from collections.abc import Iterator, Mapping
import dataclasses
from typing import Any, ClassVar, Self

from tasks import task as tasks_lib
from tasks.emnist.options import EmnistOptions
from tasks.errors import OptionError
from tasks.experiment.methods import algorithms
from tasks.experiment.methods import building
from tasks.experiment.options.hyperparameters import Hyperparameters
from tasks.experiment.options.loop import Loop
from tasks.experiment.options.privacy import LOCAL
from tasks.experiment.options.privacy import Privacy
from tasks.experiment.options.server import Server
from tasks.experiment.options.training import LocalTraining
from tasks.experiment.options.training import unread_beside
from tasks.movielens.options import MovieLensOptions
from tasks.movielens.options import RankingOptions
from tasks.next_word.options import NextWordOptions
from tasks.options import Choice
from tasks.options import detail
from tasks.options import Leak
from tasks.options import Option
from tasks.options import option
from tasks.options import Options
from tasks.preference.options import MnistOptions
from tasks.preference.options import SpeechOptions
from tasks.ratings.options import RatingsOptions
from tasks.subreddit.options import StickerOptions
from tasks.subreddit.options import SubredditOptions
from tasks.user_modeling.options import AssistOptions
from tasks.user_modeling.options import MovielensOptions
from tasks.user_modeling.options import UserModelingOptions
from tff_partial_programs import spelling

TASK = 'task'

# A new task is one class here.
_TASKS: tuple[type[tasks_lib.TaskOptions], ...] = (
  EmnistOptions,
  MovieLensOptions,
  RankingOptions,
  NextWordOptions,
  MnistOptions,
  SpeechOptions,
  RatingsOptions,
  SubredditOptions,
  StickerOptions,
  AssistOptions,
  MovielensOptions,
)
TASKS = {task.name: task for task in _TASKS}

# Defaults of the flags that are not always read.
_USUAL = {
  choice.flag: choice.value
  for options in (LocalTraining(), Server(), Hyperparameters(), Privacy())
  for choice in options.choices()
}


@dataclasses.dataclass(frozen=True)
class Runtime(Options):
  """Options of the runtime that executes the rounds."""

  title: ClassVar[str] = 'Speed'

  runtime: str = option(
    'cohort',
    "Run a round as one compiled program, in TFF's own worker, or on the "
    'processes of a Ray cluster.',
    choices=('cohort', 'native', 'ray'),
    is_common=True,
  )
  jit: str = option(
    'auto',
    'Whether the cohort runtime compiles with XLA; auto keeps the faster.',
    choices=('auto', 'true', 'false'),
  )
  ray_address: str | None = option(
    None,
    'With --runtime=ray, the address of the cluster; by default one is started '
    'on this machine and ends with the run.',
  )
  ray_workers: int | None = detail(
    None,
    'With --runtime=ray, how many processes run clients; by default the number '
    'of processors of the cluster.',
    at_least=1,
  )
  ray_folder: str | None = detail(
    None,
    'With --runtime=ray, a folder that all machines see, for files of client '
    'states; without one they are sent, except on this machine.',
  )

  def __post_init__(self) -> None:
    """Refuse options that the runtime does not support."""
    super().__post_init__()
    if self.runtime != 'ray':
      of_ray = ('ray_address', 'ray_workers', 'ray_folder')
      self.refuse_set(of_ray, 'give it with --runtime=ray.')
    if self.runtime == 'native' and self.jit == 'true':
      raise OptionError(
        '--jit=true: the native runtime does not compile rounds. Leave the '
        'flag out, or use --runtime=cohort.'
      )


@dataclasses.dataclass(frozen=True)
class Config(Options):
  """An experiment.

  Attributes:
    task: The task to learn.
    algorithm: The algorithm, a name of `algorithms.ALGORITHMS`.
    user_form: The place of the parameters of one user, of `USER_FORMS`.
    seed: The seed of everything random.
    data: The source of the data.
    loop: Rounds, cohorts and stopping.
    local: Training on clients.
    server: Aggregation at the server.
    hyperparameters: Hyperparameters of single algorithms.
    privacy: Differential privacy, if any.
    runtime: The runtime that executes the rounds.
  """

  title: ClassVar[str] = 'Method'

  task: tasks_lib.TaskOptions = MovieLensOptions()
  algorithm: str = option(
    'fed_recon',
    'The algorithm that trains the model.',
    choices=algorithms.names(),
    is_common=True,
  )
  user_form: str | None = option(
    None,
    'Where the parameters of one user are: at the user, in a row of a table at '
    'the server, or nowhere. By default as the algorithm needs it.',
    choices=tasks_lib.USER_FORMS,
  )
  seed: int = option(
    0, 'Seed of everything that is drawn.', group=Loop.title, is_common=True
  )
  data: tasks_lib.Data = tasks_lib.Data()
  loop: Loop = Loop()
  local: LocalTraining = LocalTraining()
  server: Server = Server()
  hyperparameters: Hyperparameters = Hyperparameters()
  privacy: Privacy = Privacy()
  runtime: Runtime = Runtime()

  def __post_init__(self) -> None:
    """Refuse flags that the algorithm ignores, and leaks of a private run."""
    super().__post_init__()
    if self.privacy.is_on:
      for leak in self.leaks():
        raise OptionError(
          f'--{leak.flag}={leak.value}: {leak.why}, which is not covered by '
          f'--target_epsilon and --noise_multiplier. {leak.remedy}'
        )
      if self.privacy.dp == LOCAL and self.spent.noise_multipliers:
        raise OptionError(
          f'--dp=local: --task={self.task.name} would release something with '
          'the noise of a trusted server, which local noise does without. Give '
          '--dp=central, or choose no noise in the task.'
        )
      reason = self.how.why_not_private
      if reason is not None:
        raise OptionError(f'--algorithm={self.algorithm}: {reason}')
    elif self.spent.noise_multipliers:
      raise OptionError(
        f'--task={self.task.name}: it would release something with noise in '
        'a run that is not private and counts no epsilon. Give '
        '--target_epsilon or --noise_multiplier, or choose no noise.'
      )
    if self.data.is_synthetic:
      self.task.refuse_set(
        ('data_set', 'edition', 'corpus'),
        'with --data=synthetic none is read. Leave one of the two out.',
      )
    readers = {
      'item_attributes': ('dp_als', 'fed_als', 'fed_als_private'),
      'user_attributes': ('fed_als',),
      'rated_items': ('fed_als',),
    }
    for flag, names in readers.items():
      if getattr(self.task, flag, False) and self.algorithm not in names:
        raise OptionError(
          f'--{flag}: only {" or ".join(names)} reads it. Leave it out.'
        )
    if self.how.user in (tasks_lib.POSTERIOR, tasks_lib.PUBLIC_POSTERIOR):
      self.task.refuse_set(
        ('biases', 'l2', 'initial_scale'),
        f'{self.algorithm} always has biases, and estimates how far weights '
        'spread. Leave it out.',
      )
    if self.how.user == tasks_lib.IMPLICIT:
      self.task.refuse_set(
        ('biases', 'ranking_loss', 'num_negatives'),
        f'{self.algorithm} solves for vectors by all items, and has no biases '
        'and no drawn negatives. Leave it out.',
      )
    for choice in self._unread():
      raise OptionError(
        f'{choice.argument}={choice.value}: the algorithm {self.algorithm} '
        'does not read it. Leave it out, or choose one that does: '
        f'{", ".join(algorithms.readers(choice.flag))}.'
      )

  def _unread(self) -> Iterator[Choice]:
    """Yield each setting that only other algorithms read."""
    unread = algorithms.unread(self.algorithm)
    for part in (self.local, self.server, self.hyperparameters):
      for choice in part.choices():
        if choice.flag in unread and choice.value != _USUAL[choice.flag]:
          yield choice

  def without_effect(self) -> frozenset[str]:
    """Return flags that change nothing here, but that recipes may set.

    They do so for other algorithms, to which `algorithm` may change.
    """
    personalises = (
      self.how.personal is not None
      # New users reconstruct, and clients train the tables that they keep.
      or self.user_form == tasks_lib.TABLE
      or isinstance(self.task, UserModelingOptions)
    )
    of_local = [f for f in self.local.flags() if 'reconstruction_' in f]
    if self.local.tuning_learning_rate is not None:
      # Passes and steps are also those of tuning.
      of_local = [*self.local.reconstruction.flags()]
    return frozenset() if personalises else frozenset(of_local)

  def leaks(self) -> Iterator[Leak]:
    yield from self.server.leaks()
    for leak in self.hyperparameters.leaks():
      if leak.flag.removeprefix('set=') in self.how.reads:
        yield leak
    yield from self.task.leaks()

  @property
  def spent(self) -> tasks_lib.Spent:
    """The privacy that the task spends before the first round."""
    return self.task.spent

  @property
  def how(self) -> building.Algorithm:
    return algorithms.ALGORITHMS[self.algorithm]

  def choices(self) -> Iterator[Choice]:
    """Yield all choices: the task, and those of the fields that are options."""
    yield Choice(
      path=(TASK,),
      flag=TASK,
      title=tasks_lib.Data.title,
      text='What to learn.',
      value=self.task.name,
      kind=str,
      may_be_none=False,
      option=Option('', choices=tuple(sorted(TASKS)), is_common=True),
    )
    yield from super().choices()

  def with_flags(self, values: Mapping[str, Any]) -> Self:
    """Return a copy with some choices changed.

    Args:
      values: New values by flag name. Another `task` comes with its own
        defaults; another `algorithm` resets the flags that it does not read,
        an exact reconstruction those of steps, a split without a share the
        share, a fixed clip those of an adaptive one, and synthetic data the
        data set.

    Raises:
      OptionError: If there is no such flag, or the value is impossible.
    """
    others = dict(values)
    name = others.pop(TASK, self.task.name)
    if name not in TASKS:
      raise OptionError(f'--task={name}: {spelling.choose(name, TASKS)}')
    if name != self.task.name:
      changed = dataclasses.replace(self, task=TASKS[name]())
      return changed.with_flags(others)
    algorithm = others.get('algorithm', self.algorithm)
    if algorithm != self.algorithm and algorithm in algorithms.ALGORITHMS:
      for flag in algorithms.unread(algorithm):
        others.setdefault(flag, _USUAL[flag])
    of_task = {choice.flag: choice.value for choice in TASKS[name]().choices()}
    usual = {**_USUAL, **of_task}
    for flag in usual.keys() & unread_beside(others):
      others.setdefault(flag, usual[flag])
    return super().with_flags(others)

  def may_change(self) -> set[str]:
    # More rounds would need more noise from the first round on.
    is_planned = self.privacy.target_epsilon is not None
    return super().may_change() - ({'rounds'} if is_planned else set())

  def to_json(self) -> dict[str, Any]:
    """Return the choices in the form of `result.json`."""
    said: dict[str, Any] = {}
    for choice in self.choices():
      *rooms, field = choice.path
      if choice.flag == TASK:
        rooms, field = [TASK], 'name'
      inner = said
      for room in rooms:
        inner = inner.setdefault(room, {})
      inner[field] = choice.value
    return said
