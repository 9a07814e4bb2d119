"""Options of the MovieLens task, and those that tasks of ratings share."""

from collections.abc import Iterator
import dataclasses
from typing import ClassVar

from tasks import shared_options as shared
from tasks.errors import OptionError
from tasks.options import detail
from tasks.options import Leak
from tasks.shared_options import TaskOptions
from tasks.shared_options import UNSEEN

NAME = 'movielens'
# Of `templates.ranking`.
RANKING_LOSSES = ('binary', 'bpr', 'softmax')


@dataclasses.dataclass(frozen=True)
class FactorizationOptions(TaskOptions):
  """Options of the matrix factorization of ratings."""

  protocol: str = shared.protocol(UNSEEN)
  max_examples: int | None = shared.max_examples(300, at_least=2)
  num_factors: int = shared.num_factors(50)
  biases: bool = shared.biases(False)
  centred: bool = shared.centred(False)
  public_mean: float | None = shared.public_mean(None)
  l2: float = shared.l2(0.0)
  clip_predictions: bool = shared.clip_predictions(False)
  initial_scale: float = shared.initial_scale(0.05)
  rated_items: bool = shared.rated_items(False)

  # Options of MovieLens alone.
  min_examples: ClassVar[int] = 1
  item_attributes: ClassVar[bool] = False
  user_attributes: ClassVar[bool] = False

  def __post_init__(self) -> None:
    """Check that at most one mean is set."""
    super().__post_init__()
    if self.centred and self.public_mean is not None:
      raise OptionError(
        f'--public_mean={self.public_mean}: it would take the place of the '
        'mean that is computed. Give --nocentred, too.'
      )

  def leaks(self) -> Iterator[Leak]:
    if self.centred:
      yield Leak(
        'centred',
        self.centred,
        'the mean of all training ratings is computed before training',
        'Give --nocentred, perhaps with --public_mean.',
      )


@dataclasses.dataclass(frozen=True)
class MovieLensOptions(FactorizationOptions):
  """Options of the task; the defaults are the paper's."""

  name: ClassVar[str] = NAME
  loader: ClassVar[str] = 'tasks.movielens.task:load'
  title: ClassVar[str] = 'Task movielens'

  data_set: str = shared.data_set('')
  min_examples: int = shared.min_examples(1)  # type: ignore[misc]
  item_attributes: bool = shared.item_attributes(False)  # type: ignore[misc]
  user_attributes: bool = shared.user_attributes(False)  # type: ignore[misc]


@dataclasses.dataclass(frozen=True)
class RankingOptions(TaskOptions):
  name: ClassVar[str] = 'movielens_ranking'
  loader: ClassVar[str] = 'tasks.movielens.ranking:load'
  title: ClassVar[str] = 'Task movielens_ranking'

  data_set: str = shared.data_set('')
  protocol: str = shared.protocol(shared.SEEN)
  max_examples: int | None = shared.max_examples(None, at_least=4)
  min_examples: int = shared.min_examples(4)
  num_factors: int = shared.num_factors(64, at_least=1)
  biases: bool = shared.biases(False)
  ranking_loss: str = detail(
    'binary',
    'Loss of interactions and drawn negatives, in training by gradients.',
    choices=RANKING_LOSSES,
  )
  num_negatives: int = detail(
    4, 'Negatives drawn for each interaction in each step.', at_least=1
  )
  random_tastes: bool = detail(
    False,
    "Replace each user's items by random ones, so that nothing can be learned: "
    'a hit rate above chance, 0.1 for 10 of 100 items, shows a leak.',
  )
