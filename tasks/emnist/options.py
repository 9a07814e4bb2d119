"""Options of the EMNIST task."""

import dataclasses
from typing import ClassVar

from tasks import shared_options as shared
from tasks.errors import OptionError
from tasks.options import detail
from tasks.options import option
from tasks.shared_options import SEEN
from tasks.shared_options import TaskOptions

NAME = 'emnist'
LABELS, WRITERS = 'labels', 'writers'
PARTITIONS = (LABELS, WRITERS)
MNIST, FEDERATED = 'mnist', 'federated_emnist'
EDITIONS = (MNIST, FEDERATED)
LINEAR, DENSE, CNN = 'linear', 'dense', 'cnn'
MODELS = (LINEAR, DENSE, CNN)


@dataclasses.dataclass(frozen=True)
class EmnistOptions(TaskOptions):
  """Options of the task."""

  name: ClassVar[str] = NAME
  loader: ClassVar[str] = 'tasks.emnist.task:load'
  title: ClassVar[str] = 'Task emnist'

  edition: str = shared.data_set(MNIST, choices=EDITIONS)
  partition: str = option(
    LABELS,
    'Whether users hold a few labels each, or what they wrote.',
    choices=PARTITIONS,
  )
  protocol: str = shared.protocol(SEEN)
  num_users: int = shared.users(20)
  labels_per_user: int = detail(
    2, 'Labels of a user of the partition labels.', at_least=1
  )
  size_deviation: float = detail(
    0.5,
    'How much the sizes of users of the partition labels differ: the deviation '
    'of their logarithm.',
    at_least=0,
  )
  max_examples: int | None = shared.max_examples(None)
  model: str = shared.model(LINEAR, choices=MODELS)
  hidden: int = detail(
    100, 'Units of the hidden layer of the dense model.', at_least=1
  )
  local: str = detail(
    '',
    "What is the user's where a part of the model is, as a regular expression "
    'over names of layers and variables; by default the last layer, and its '
    'biases in logistic regression.',
  )

  def flag_prefix(self) -> str:
    """Return the prefix of the flags."""
    return 'emnist_'

  def __post_init__(self) -> None:
    """Check that images can be divided."""
    super().__post_init__()
    if self.max_examples is not None and self.max_examples < 3:
      raise OptionError(
        f'max_examples: {self.max_examples} images a user cannot be divided '
        'into three parts. Give at least 3.'
      )
