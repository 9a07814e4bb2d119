"""Merge of shards' totals, always in the same tree.

Floating-point sums depend on their order. The tree over n shards has on its
left as many shards as the largest power of two below n, and so on within each
side. So 2^k shards that start at a multiple of 2^k are a subtree: the process
that ran them may merge them and send one accumulator, and the bits of the whole
are the same.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

Total = TypeVar('Total')


class Tree(Generic[Total]):
  """Merge tree that takes totals one after the other and keeps few."""

  def __init__(self, merge: Callable[[Total, Total], Total]):
    """Start from no totals.

    Args:
      merge: Merges a total and the next one. It is always called with two:
        TensorFlow reorders sums of more.
    """
    self._merge = merge
    # Subtrees that wait to be merged, with their heights, in falling order.
    self._waiting: list[tuple[int, Total]] = []

  def add(self, total: Total) -> None:
    """Add the next total: of a shard, or of as many shards as all others."""
    height = 0
    while self._waiting and self._waiting[-1][0] == height:
      total = self._merge(self._waiting.pop()[1], total)
      height += 1
    self._waiting.append((height, total))

  def root(self) -> Total:
    """Merge the remaining totals; the last may be of fewer shards."""
    _, total = self._waiting.pop()
    while self._waiting:
      total = self._merge(self._waiting.pop()[1], total)
    return total
