"""Users who like one kind of examples and dislike all others.

As in section 4 of FedEmbed: half of a user's examples are of the kind that it
likes, its true sub-population, and the rest of any other kinds. Within a user
no example occurs twice.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from tasks.errors import OptionError
from tff_partial import random_bits
from tff_partial.data.partitions import Partition


def numbers_of_users(num_users: int, shares: Sequence[float]) -> list[int]:
  """Divide users by shares, without remainder."""
  ends = np.rint(np.cumsum(shares) * num_users).astype(int)
  return np.diff([0, *ends]).tolist()


def draw(
  kinds: np.ndarray,
  users_of: Sequence[int],
  sizes: Mapping[str, int],
  *,
  part_of: np.ndarray | None = None,
  repeat: bool = True,
  seed: int = 0,
) -> dict[str, Partition]:
  """Give each user examples for every part, half of them liked.

  Args:
    kinds: Integers `[examples]`, from 0.
    users_of: Number of users that like each kind.
    sizes: Number of examples of a user by part; even.
    part_of: `[examples]`: the part that each example is for. By default any may
      be in any part.
    repeat: True if users may share examples. Otherwise each is used at most
      once overall.
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
      drawn = draw(
        kinds[there], users_of, {part: size}, repeat=repeat, seed=seed
      )[part]
      parts[part] = {user: there[held] for user, held in drawn.items()}
    return parts
  half = sum(sizes.values()) // 2
  users = [
    (f'{kind}-{number:04d}', kind)
    for kind, count in enumerate(users_of)
    for number in range(count)
  ]
  piles = [np.flatnonzero(kinds == kind) for kind in range(len(users_of))]
  rule = _drawn_anew if repeat else _drawn_once
  liked, others = rule(piles, users, half, seed)
  for user, _ in users:
    order = random_bits.generator(seed, 'order', user)
    begin = 0
    for part, size in sizes.items():
      mine = slice(begin, begin + size // 2)
      begin += size // 2
      parts[part][user] = order.permutation(
        np.concatenate([liked[user][mine], others[user][mine]])
      )
  return parts


def _drawn_anew(
  piles: Sequence[np.ndarray],
  users: Sequence[tuple[str, int]],
  half: int,
  seed: int,
) -> tuple[Partition, Partition]:
  """Draw each user's examples from all, regardless of other users."""
  rest = [
    np.concatenate([*piles[:kind], *piles[kind + 1 :]])
    for kind in range(len(piles))
  ]
  liked, others = {}, {}
  for user, kind in users:
    if min(len(piles[kind]), len(rest[kind])) < half:
      raise OptionError(
        f'There are {len(piles[kind])} examples of kind {kind} and '
        f'{len(rest[kind])} others, and a user who likes it needs {half} of '
        'both. Give more examples.'
      )
    choose = random_bits.generator(seed, 'preference', user).choice
    liked[user] = choose(piles[kind], half, replace=False)
    others[user] = choose(rest[kind], half, replace=False)
  return liked, others


def _drawn_once(
  piles: Sequence[np.ndarray],
  users: Sequence[tuple[str, int]],
  half: int,
  seed: int,
) -> tuple[Partition, Partition]:
  """Divide the examples among users: first the liked ones, then the others.

  Users in turn draw their disliked examples from those left, each kind in
  proportion to its examples left, but never so many that those who like some
  kind would later find too few others. By Hall's theorem nothing else can go
  wrong.
  """
  waiting = np.bincount([kind for _, kind in users], minlength=len(piles))
  _refuse_too_many(np.array([len(pile) for pile in piles]), waiting, half)
  once = random_bits.generator(seed, 'once')
  stacks = [once.permutation(pile).tolist() for pile in piles]
  liked = {
    user: np.array([stacks[kind].pop() for _ in range(half)])
    for user, kind in users
  }
  others: Partition = {}
  for place in once.permutation(len(users)):
    user, kind = users[place]
    left = np.array([len(stack) for stack in stacks])
    # Surplus for the users who like a kind, beyond their needs.
    spare = np.where(waiting > 0, left.sum() - left - half * waiting, half)
    forced = np.maximum(half - spare, 0)
    forced[kind] = left[kind] = 0
    numbers = forced + once.multivariate_hypergeometric(
      left - forced, half - forced.sum()
    )
    others[user] = np.array(
      [
        stack.pop()
        for stack, number in zip(stacks, numbers, strict=True)
        for _ in range(number)
      ]
    )
    waiting[kind] -= 1
  return liked, others


def _refuse_too_many(
  examples: np.ndarray, users: np.ndarray, half: int
) -> None:
  """Raise an error if not all users can have separate examples."""
  number, total = users.sum(), examples.sum()
  there = np.flatnonzero(users)
  most = min(
    total / (2 * half),
    # Of the kind that they like, and of all others.
    *(examples[there] * number / (half * users[there])),
    *((total - examples[there]) / half),
  )
  if number > most:
    raise OptionError(
      f'{number} users cannot have {2 * half} examples each that no '
      f'other shares, half of them of the kind that they like: {total:,} '
      f'examples are enough for {int(most)}. Give fewer users, or let '
      'examples repeat.'
    )


def kind_liked_by(user: str) -> int:
  """Return the kind that a user likes, from its id."""
  return int(user.partition('-')[0])


def number_of(user: str) -> int:
  """Return a user's number among those who like the same, from its id."""
  return int(user.partition('-')[2])
