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
LABELS, DIRICHLET, WRITERS = 'labels', 'dirichlet', 'writers'
PARTITIONS = (LABELS, DIRICHLET, WRITERS)
MNIST, FASHION = 'mnist', 'fashion_mnist'
FEDERATED, FEMNIST = 'federated_emnist', 'femnist'
EDITIONS = (MNIST, FASHION, FEDERATED, FEMNIST)
LINEAR, DENSE, CNN, FED_AVG_CNN = 'linear', 'dense', 'cnn', 'fed_avg_cnn'
MODELS = (LINEAR, DENSE, CNN, FED_AVG_CNN)


@dataclasses.dataclass(frozen=True)
class EmnistOptions(TaskOptions):
  name: ClassVar[str] = NAME
  loader: ClassVar[str] = 'tasks.emnist.task:load'
  title: ClassVar[str] = 'Task emnist'
  flag_prefix: ClassVar[str] = 'emnist_'

  edition: str = shared.data_set(MNIST, choices=EDITIONS)
  partition: str = option(
    LABELS,
    'Users have images of two labels each, shares of each label from a '
    'Dirichlet distribution, or the images that one writer wrote.',
    choices=PARTITIONS,
  )
  alpha: float = detail(
    0.1, 'Dirichlet concentration; the smaller, the more users differ.'
  )
  protocol: str = shared.protocol(SEEN)
  num_users: int = shared.users(20)
  max_examples: int | None = shared.max_examples(None)
  model: str = shared.model(LINEAR, choices=MODELS)
  num_groups: int = option(
    5,
    'Copies of the model, for ifca and fed_em; or of its head, for ifca_head '
    'and fed_em_head.',
    at_least=2,
  )

  def __post_init__(self) -> None:
    """Check that images can be divided."""
    super().__post_init__()
    few = self.max_examples is not None and self.max_examples < 3
    # Of unseen users all images are in one part.
    if few and self.protocol == SEEN:
      raise OptionError(
        f'--max_examples={self.max_examples}: so few images of a user cannot '
        'be divided into three parts. Give at least 3, or --protocol=unseen.'
      )
    if self.partition == WRITERS:
      self.refuse_set(
        ('num_users',),
        'each writer is a user. Leave it out, or choose another '
        '--emnist_partition.',
      )
    if self.partition != DIRICHLET:
      self.refuse_set(
        ('alpha',), 'it is of --emnist_partition=dirichlet. Leave it out.'
      )
