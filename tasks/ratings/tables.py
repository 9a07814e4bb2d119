"""Ratings of users with names, and their selection for a run."""

import bisect
from collections.abc import Mapping
import dataclasses
import difflib
from typing import NamedTuple

from absl import logging
import numpy as np
import pandas as pd

from tasks.errors import DataError
from tasks.errors import OptionError
from tasks.movielens import data as movielens_data
from tasks.movielens import synthetic


class Table(NamedTuple):
  """Ratings as found in the file.

  Attributes:
    name: Name of the data.
    frame: Columns user and item (sorted categories), rating (float64) and, if
      known, time (int64, larger for later ratings).
    columns: Column names of the file by their meaning: user, item, rating,
      time.
    left_out: Number of lines left out in reading, by reason.
  """

  name: str
  frame: pd.DataFrame
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
    place = bisect.bisect_left(self.user_names, user)
    if place < len(self.user_names) and self.user_names[place] == user:
      return place
    hint = f'Users are called like {self.user_names[0]!r}.'
    for meant in difflib.get_close_matches(user, self.user_names, 1):
      hint = f'Did you mean {meant!r}?'
    raise OptionError(
      f'user: there is no user {user!r} among the {len(self.user_names):,} of '
      f'{self.name} that are not left out. {hint}'
    )


def choose(
  table: Table, min_per_user: int = 2, min_per_item: int = 1
) -> NamedRatings:
  """Leave out unusable ratings, with counts in the log.

  Of several ratings of an item by one user the last one is kept: by time, or in
  the order of the file. Then users and items with too few ratings are left out,
  repeatedly, until all remaining ones have enough.
  """
  left_out = dict(table.left_out)
  kept = table.frame
  has_times = 'time' in kept
  if has_times:
    kept = kept.sort_values('time', kind='stable')
  kept = kept.drop_duplicates(['user', 'item'], keep='last').sort_index()
  left_out['earlier ratings of the same item'] = len(table.frame) - len(kept)
  while True:
    is_few = [
      kept.groupby(name, observed=True)['rating'].transform('size') < number
      for name, number in (('user', min_per_user), ('item', min_per_item))
    ]
    left = kept[~(is_few[0] | is_few[1])]
    if len(left) == len(kept):
      break
    kept = left
  user = kept['user'].cat.remove_unused_categories().cat
  item = kept['item'].cat.remove_unused_categories().cat
  for column, names in (('user', user), ('item', item)):
    left_out[f'{column}s with few ratings'] = len(
      table.frame[column].cat.categories
    ) - len(names.categories)
  left_out = {why: number for why, number in left_out.items() if number}
  for why, number in left_out.items():
    logging.warning('%s: left out %d %s.', table.name, number, why)
  rating = kept['rating'].to_numpy(np.float32)
  if not len(rating):
    raise DataError(
      f'{table.name}: none of {len(table.frame):,} ratings is left, since each '
      f'user takes {min_per_user} and each item {min_per_item}. Lower '
      '--min_examples and --ratings_min_per_item, or give more ratings.'
    )
  if rating.min() == rating.max():
    raise DataError(
      f'{table.name}: all ratings are {rating[0]:g}, so that there is nothing '
      'to learn. Name the column of the ratings with --csv_rating.'
    )
  frame = pd.DataFrame(
    {
      'user_id': user.codes.astype(np.int64),
      'item_id': item.codes.astype(np.int32),
      'rating': rating,
      'timestamp': kept['time'] if has_times else np.int64(0),
    }
  ).sort_values(['user_id', 'timestamp'], kind='stable', ignore_index=True)
  return NamedRatings(
    name=table.name,
    frame=frame,
    item_titles=tuple(item.categories),
    original_item_ids=np.unique(kept['item'].cat.codes).astype(np.int64),
    users=None,
    scale=(float(rating.min()), float(rating.max())),
    user_names=tuple(user.categories),
    has_times=has_times,
    columns=table.columns,
    left_out=left_out,
  )


def generate() -> Table:
  """Invent ratings by planted tastes, of users and items with names."""
  ratings = synthetic.generate()
  frame = ratings.frame
  frame = pd.DataFrame(
    {
      'user': frame['user_id'].map('user {:04d}'.format).astype('category'),
      'item': pd.Categorical.from_codes(
        frame['item_id'].tolist(), pd.Index(ratings.item_titles)
      ),
      'rating': frame['rating'].astype(np.float64),
      'time': frame['timestamp'].astype(np.int64),
    }
  )
  return Table('synthetic', frame, {str(name): str(name) for name in frame}, {})
