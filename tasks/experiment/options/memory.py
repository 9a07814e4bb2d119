"""Options of memories of a client's own examples."""

import dataclasses
from typing import ClassVar, TypedDict

from tasks.options import detail
from tasks.options import option
from tasks.options import Options


class KnnArguments(TypedDict):
  """Arguments of kNN-Per, which looks up the nearest examples."""

  mixing: float
  num_neighbors: int | None
  scale: float


class CacheArguments(TypedDict):
  """Arguments of the cache of n-grams."""

  mixing: float
  num_tokens: int
  smoothing: float


@dataclasses.dataclass(frozen=True)
class Memory(Options):
  """Options of predicting from a client's own examples without training."""

  title: ClassVar[str] = 'Algorithms knn_per, ngram_cache and fed_recon_* alike'

  mixing: float = option(
    0.1,
    "The memory's share in what a client predicts, less than 1: lambda of "
    'kNN-Per; of the cache, where it has seen much.',
    flag='memory_mixing',
    at_least=0,
    at_most=1,
  )
  neighbors: int | None = option(
    10,
    'k of kNN-Per: how many of its nearest examples a client asks; 0 for all.',
    flag='knn_neighbors',
    at_least=1,
    for_none=0,
  )
  scale: float = option(
    1.0,
    "The distance of features at which a neighbour's weight falls to 1 / e.",
    flag='knn_scale',
    at_least=0,
  )
  num_tokens: int = detail(
    2,
    'How many of the tokens before the next one the cache compares, at most.',
    flag='cache_tokens',
    at_least=1,
  )
  smoothing: float = detail(
    1.0,
    'How often the cache must have seen something for half of its share.',
    flag='cache_smoothing',
    at_least=0,
  )

  @property
  def knn_arguments(self) -> KnnArguments:
    """The arguments of kNN-Per."""
    return {
      'mixing': self.mixing,
      'num_neighbors': self.neighbors,
      'scale': self.scale,
    }

  @property
  def cache_arguments(self) -> CacheArguments:
    """The arguments of the cache."""
    return {
      'mixing': self.mixing,
      'num_tokens': self.num_tokens,
      'smoothing': self.smoothing,
    }
