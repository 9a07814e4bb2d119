"""Users who like one kind of examples and dislike all others.

As in section 4 of FedEmbed: half of a user's examples are of the kind that it
likes, its true sub-population, and the rest of any other kinds. Within a user
no example occurs twice.
"""

from collections.abc import Mapping, Sequence
import itertools

import numpy as np

from tasks.errors import OptionError
from tff_partial import random_bits
from tff_partial.data.partitions import Partition


def numbers_of_users(num_users: int, shares: Sequence[float]) -> list[int]:
  """Divide users by shares, without remainder."""
  ends = np.rint(np.cumsum(shares) * num_users).astype(int)
  return np.diff([0, *ends]).tolist()


def enough_users(num_users: int, shares: Sequence[float]) -> int:
  """Return the next larger number of users that divides without a zero."""
  return next(
    number
    for number in itertools.count(num_users)
    if 0 not in numbers_of_users(number, shares)
  )


def draw(
  kinds: np.ndarray,
  users_of: Sequence[int],
  sizes: Mapping[str, int],
  *,
  part_of: np.ndarray | None = None,
  seed: int = 0,
) -> dict[str, Partition]:
  """Give each user examples for every part, half of them liked.

  Args:
    kinds: Integers `[examples]`, from 0.
    users_of: Number of users that like each kind.
    sizes: Number of examples of a user by part; even.
    part_of: `[examples]`: the part that each example is for. By default any may
      be in any part.
    seed: Draws the examples.

  Returns:
    Examples by part, then user, in random order. User `3-0017` is number 17 of
    those who like kind 3.

  Raises:
    OptionError: If there are not enough examples.
  """
  parts: dict[str, Partition] = {part: {} for part in sizes}
  if part_of is not None:
    for part, size in sizes.items():
      there = np.flatnonzero(part_of == part)
      drawn = draw(kinds[there], users_of, {part: size}, seed=seed)[part]
      parts[part] = {user: there[held] for user, held in drawn.items()}
    return parts
  half = sum(sizes.values()) // 2
  piles = [np.flatnonzero(kinds == kind) for kind in range(len(users_of))]
  for kind, count in enumerate(users_of):
    others = np.concatenate([*piles[:kind], *piles[kind + 1 :]])
    if count and min(len(piles[kind]), len(others)) < half:
      raise OptionError(
        f'There are {len(piles[kind])} examples of kind {kind} and '
        f'{len(others)} others, and a user who likes it needs {half} of '
        'both. Give more examples.'
      )
    for number in range(count):
      user = f'{kind}-{number:04d}'
      choose = random_bits.generator(seed, 'preference', user).choice
      own = [
        choose(pile, half, replace=False) for pile in (piles[kind], others)
      ]
      order = random_bits.generator(seed, 'order', user)
      begin = 0
      for part, size in sizes.items():
        end = begin + size // 2
        mine = np.concatenate([pile[begin:end] for pile in own])
        parts[part][user] = order.permutation(mine)
        begin = end
  return parts


def kind_liked_by(user: str) -> int:
  return int(user.partition('-')[0])


def number_of(user: str) -> int:
  """Return a user's number among those who like the same, from its id."""
  return int(user.partition('-')[2])
