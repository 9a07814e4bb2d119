"""Options that tasks share, and the base of their classes of options.

An option that several tasks have is one flag, with the task's own default; each
function below makes the field of a task's class from that default.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import functools
import os
import pathlib
import pkgutil
from typing import Any, ClassVar, NamedTuple, TypeVar

from tasks.options import option
from tasks.options import Options

_Cost = TypeVar('_Cost')

TITLE = 'Data and model of the task'
SEEN, UNSEEN = 'seen', 'unseen'
# Of exported models.
FORMATS = ('saved_model', 'tflite')
PROTOCOLS = (UNSEEN, SEEN)


def data_name(flags: Mapping[str, Any]) -> str:
  """Return the name of the data that flags choose; '' if they name none."""
  if flags.get('data') == SYNTHETIC:
    return SYNTHETIC
  return pathlib.PurePath(flags.get('csv') or flags.get('data_set') or '').name


def by_data(
  costs: Iterable[tuple[str, str, _Cost]],
) -> dict[tuple[str, str], list[_Cost]]:
  """Group costs by task and data set; data without a name may be any.

  Args:
    costs: Task, name of its data or '', and cost.
  """
  of_tasks: dict[str, list[tuple[str, _Cost]]] = {}
  for task, data, cost in costs:
    of_tasks.setdefault(task, []).append((data, cost))
  return {
    (task, data): [cost for name, cost in of_task if name in ('', data)]
    for task, of_task in of_tasks.items()
    for data in sorted({name for name, _ in of_task if name}) or ['']
  }


def _shared(flag: str, text: str, **limits: Any) -> Callable[..., Any]:
  return functools.partial(option, text=text, flag=flag, group=TITLE, **limits)


data_set = _shared(
  'data_set',
  'The data set: of MovieLens ml-1m, ml-100k or another edition, by default '
  'the one in --data_dir; of emnist mnist, fashion_mnist, federated_emnist or '
  'femnist; of next_word lean_chat, subreddit, stackoverflow, shakespeare, or '
  'a file or folder of JSON lines with the fields author, time and text.',
)
protocol = _shared(
  'protocol',
  'Measure users who never took part in training, or further or later examples '
  'of those who did.',
  choices=PROTOCOLS,
)
users = _shared(
  'users',
  'How many users the images are divided among, or how many authors are drawn; '
  '0 for all, or for as many as the paper has.',
  at_least=1,
  for_none=0,
)
max_examples = _shared(
  'max_examples',
  'The most examples used of each user; 0 for all.',
  at_least=1,
  for_none=0,
)
min_examples = _shared(
  'min_examples', 'Users with fewer examples are left out.', at_least=1
)
model = _shared(
  'model',
  'The model: for emnist linear, dense (one hidden layer), cnn or fed_avg_cnn; '
  'for next_word lstm or transformer; for assist and movielens_hpfl gum, ncd, '
  'ncf, or bias (biases alone).',
)
num_factors = _shared(
  'num_factors',
  'Length of the vectors of items and users; 0 for biases alone (fed_als).',
  at_least=0,
)
biases = _shared(
  'biases', 'Give items and users biases; in GUM also attributes, and a mean.'
)
item_attributes = _shared(
  'item_attributes',
  'Use genres of items: fed_als predicts vectors from them; fed_als_private '
  'and dp_als, for which they must be public, make them columns of vectors.',
)
user_attributes = _shared(
  'user_attributes',
  'fed_als: predict vectors of users from gender, age and occupation.',
)
rated_items = _shared(
  'rated_items',
  'fed_als: predict vectors of users from the set of items they rated.',
)
centred = _shared('centred', 'Predict around the mean training rating.')
public_mean = _shared(
  'public_mean', 'Predict around this number, which is known without the data.'
)
l2 = _shared('l2', 'L2 regularization of user weights, in stars.', at_least=0)
clip_predictions = _shared(
  'clip_predictions', 'Clip predictions to the rating scale in evaluations.'
)
initial_scale = _shared(
  'initial_scale',
  'Initial vectors are uniform between plus and minus this, in stars.',
  python_only=True,
  at_least=0,
)
lstm_units = _shared(
  'lstm_units',
  'Units of the LSTM, in each direction if it is bidirectional.',
  at_least=1,
)


REAL, SYNTHETIC = 'real', 'synthetic'


@dataclasses.dataclass(frozen=True)
class Data(Options):
  """Options of the source of the data."""

  title: ClassVar[str] = 'Data and task'

  data: str = option(
    REAL,
    'Real data of the task, or invented data of the same form.',
    choices=(REAL, SYNTHETIC),
    is_common=True,
  )
  data_dir: str | None = option(
    os.environ.get('TFF_PARTIAL_DATA_DIR'),
    'Folder with a folder for each task. Default: $TFF_PARTIAL_DATA_DIR.',
    may_change=True,
    is_common=True,
  )
  download: bool = option(
    False,
    'Download the data from their official address into --data_dir if they are '
    'not there.',
    may_change=True,
    is_common=True,
  )

  @property
  def is_synthetic(self) -> bool:
    """True if the data are invented, or come with a library."""
    return self.data == SYNTHETIC


class Spent(NamedTuple):
  """The privacy that a task spends before the first round of a private run.

  Attributes:
    noise_multipliers: Noise multipliers of what is released once about all
      users in training.
    delta: The probability that this fails; a part of the run's delta.
  """

  noise_multipliers: tuple[float, ...] = ()
  delta: float = 0.0


def _forget(drawn: Mapping[str, Any]) -> None:
  """Keep no release."""


class Release(NamedTuple):
  """Options of a task's noisy release about its users, which happens once.

  Attributes:
    noise_seed: The seed of the noise; by default the operating system draws it.
    simulated_population: The number of users to assume; by default the real
      one.
    kept: An earlier release, as it was passed to `keep`. It is used, and
      nothing is drawn. None by default.
    keep: Called with the release, a value that JSON can represent, before it is
      used. With None nothing is drawn: a placeholder of the same form, which
      follows from the options alone, serves to check and to plan a run. With
      `kept`, None means to use it even if the data differ now.
  """

  noise_seed: int | None = None
  simulated_population: int | None = None
  kept: Mapping[str, Any] | None = None
  keep: Callable[[Mapping[str, Any]], None] | None = _forget


class TaskOptions(Options):
  """Options of a task, which also make it.

  Attributes:
    name: The value of `--task`.
    loader: The function that loads it, `module:name`, which is imported when it
      is called: options do not wait for TensorFlow.
    releases: True if the task can make a noisy release, of which the loader is
      told as its last argument.
  """

  name: ClassVar[str]
  loader: ClassVar[str]
  releases: ClassVar[bool] = False

  @property
  def spent(self) -> Spent:
    """The privacy that a noisy release about the task's users spends."""
    return Spent()

  def load(self, data: Data, seed: int, release: Release = Release()) -> Any:
    """Load the data and make the task, a `tasks.task.Task`.

    Raises:
      DataError: If the data are missing or damaged; says where and what to do.
      OptionError: If they cannot be divided as the options require.
    """
    given = (release,) if self.releases else ()
    return pkgutil.resolve_name(self.loader)(self, data, seed, *given)
