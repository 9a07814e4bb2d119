"""Ratings of users with names, and their selection for a run."""

import bisect
from collections.abc import Mapping
import dataclasses
import difflib

from absl import logging
import numpy as np
import pandas as pd

from tasks.errors import DataError
from tasks.errors import OptionError
from tasks.movielens import data as movielens_data
from tasks.movielens import synthetic


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
  """Ratings as found in the file.

  Attributes:
    name: Name of the data.
    users: The users' names, sorted.
    items: The items' names, sorted.
    user: int64 `[ratings]`: position of the user in `users`.
    item: int64 `[ratings]`: position of the item in `items`.
    rating: float64 `[ratings]`.
    time: int64 `[ratings]`, larger for later ratings; None if unknown.
    columns: Column names by their meaning: user, item, rating, time.
    left_out: Number of lines left out in reading, by reason.
  """

  name: str
  users: tuple[str, ...]
  items: tuple[str, ...]
  user: np.ndarray
  item: np.ndarray
  rating: np.ndarray
  time: np.ndarray | None
  columns: Mapping[str, str]
  left_out: Mapping[str, int]


@dataclasses.dataclass(frozen=True, eq=False)
class NamedRatings(movielens_data.Ratings):
  """Ratings in MovieLens's form, of users with names.

  In `frame` users are numbered from 0 in the order of their names; without
  times, each `timestamp` is 0.

  Attributes:
    user_names: The users' names, by their numbers.
    has_times: True if the times of the ratings are known.
    columns: Column names by their meaning.
    left_out: Number of ratings, users or items left out, by reason.
  """

  user_names: tuple[str, ...] = ()
  has_times: bool = False
  columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
  left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)

  @property
  def step(self) -> float | None:
    """Smallest distance of ratings; None if they are not in a few steps."""
    levels = np.unique(self.frame['rating'])
    return float(np.diff(levels).min()) if len(levels) <= 21 else None

  def number_of(self, user: str) -> int:
    """Return the number of a user.

    Raises:
      OptionError: If there is no such user.
    """
    place = bisect.bisect_left(self.user_names, user)
    if place < len(self.user_names) and self.user_names[place] == user:
      return place
    meant = difflib.get_close_matches(user, self.user_names, 1)
    raise OptionError(
      f'user: there is no user {user!r} among the {len(self.user_names):,} of '
      f'{self.name} that are not left out. '
      + (
        f'Did you mean {meant[0]!r}?'
        if meant
        else f'Users are called like {self.user_names[0]!r}.'
      )
    )


def choose(
  table: Table, min_per_user: int = 2, min_per_item: int = 1
) -> NamedRatings:
  """Leave out unusable ratings, with counts in the log.

  Of several ratings of an item by one user the last one is kept: by time, or in
  the order of the file. Then users and items with too few ratings are left out,
  repeatedly, until all remaining ones have enough.

  Args:
    table: All ratings.
    min_per_user: Minimum number of ratings of a user.
    min_per_item: Minimum number of ratings of an item.

  Raises:
    DataError: If nothing is left, or nothing to learn from.
  """
  left_out = dict(table.left_out)
  order = (
    np.arange(len(table.rating))
    if table.time is None
    else np.argsort(table.time, kind='stable')
  )
  pairs = table.user[order] * len(table.items) + table.item[order]
  # The first ones in reversed order are the last ones.
  last = np.unique(pairs[::-1], return_index=True)[1]
  kept = np.sort(order[len(order) - 1 - last])
  left_out['earlier ratings of the same item'] = len(order) - len(kept)
  while True:
    few_users = _few(table.user[kept], min_per_user)
    few_items = _few(table.item[kept], min_per_item)
    left = kept[~(few_users | few_items)]
    if len(left) == len(kept):
      break
    kept = left
  users, user = np.unique(table.user[kept], return_inverse=True)
  items, item = np.unique(table.item[kept], return_inverse=True)
  left_out['users with few ratings'] = len(table.users) - len(users)
  left_out['items with few ratings'] = len(table.items) - len(items)
  left_out = {why: number for why, number in left_out.items() if number}
  for why, number in left_out.items():
    logging.warning('%s: left out %d %s.', table.name, number, why)
  rating = table.rating[kept].astype(np.float32)
  _check(table, rating, min_per_user, min_per_item)
  time = None if table.time is None else table.time[kept]
  frame = pd.DataFrame(
    {
      'user_id': user.astype(np.int64),
      'item_id': item.astype(np.int32),
      'rating': rating,
      'timestamp': np.zeros(len(kept), np.int64) if time is None else time,
    }
  ).sort_values(['user_id', 'timestamp'], kind='stable', ignore_index=True)
  return NamedRatings(
    name=table.name,
    frame=frame,
    item_titles=tuple(table.items[place] for place in items),
    original_item_ids=items.astype(np.int64),
    users=None,
    scale=(float(rating.min()), float(rating.max())),
    user_names=tuple(table.users[place] for place in users),
    has_times=time is not None,
    columns=table.columns,
    left_out=left_out,
  )


def _few(whose: np.ndarray, at_least: int) -> np.ndarray:
  """Return a mask of the ratings whose user or item has too few."""
  return np.bincount(whose)[whose] < at_least if len(whose) else whose > 0


def _check(
  table: Table, rating: np.ndarray, min_per_user: int, min_per_item: int
) -> None:
  if not len(rating):
    raise DataError(
      f'{table.name}: none of {len(table.rating):,} ratings is left, since '
      f'each user takes {min_per_user} and each item {min_per_item}. Lower '
      '--ratings_min_per_user and --ratings_min_per_item, or give more ratings.'
    )
  if rating.min() == rating.max():
    raise DataError(
      f'{table.name}: all ratings are {rating[0]:g}, so that there is nothing '
      'to learn. Name the column of the ratings with --csv_rating.'
    )


def generate() -> Table:
  """Invent ratings by planted tastes, of users and items with names."""
  ratings = synthetic.generate()
  frame = ratings.frame
  numbers, user = np.unique(frame['user_id'], return_inverse=True)
  return Table(
    name='synthetic',
    users=tuple(f'user {number:04d}' for number in numbers),
    items=ratings.item_titles,
    user=user,
    item=frame['item_id'].to_numpy(np.int64),
    rating=frame['rating'].to_numpy(np.float64),
    time=frame['timestamp'].to_numpy(np.int64),
    columns={n: n for n in ('user', 'item', 'rating', 'time')},
    left_out={},
  )
