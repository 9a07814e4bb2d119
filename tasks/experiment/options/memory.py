"""Options of memories of a client's own examples."""

import dataclasses
from typing import ClassVar

from tasks.options import option
from tasks.options import Options


@dataclasses.dataclass(frozen=True)
class Memory(Options):
  """Options of predicting from a client's own examples without training."""

  title: ClassVar[str] = 'Algorithms *knn_per and *_cache'

  mixing: float = option(
    0.1,
    "Weight of the memory in a client's predictions, less than 1: lambda of "
    'kNN-Per; for the cache, its weight where it has seen much.',
    flag='memory_mixing',
    at_least=0,
    at_most=1,
  )
  neighbors: int | None = option(
    10,
    'k of kNN-Per: how many nearest examples a client consults; 0 for all.',
    flag='knn_neighbors',
    at_least=1,
    for_none=0,
  )
  scale: float = option(
    1.0,
    "Distance of features at which a neighbour's weight falls to 1 / e.",
    flag='knn_scale',
    at_least=0,
  )
