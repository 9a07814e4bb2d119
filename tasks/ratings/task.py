"""The ratings task: a custom CSV file, from ids to recommendations.

Users are clients, a line of the file is an example. The model is the matrix
factorization of the MovieLens task, and users are divided as there: measured
users did not take part in training, or gave later ratings.

New users are measured on the second half of their ratings with every algorithm:
the later half if the file has times.
"""

from collections.abc import Callable
import functools
from typing import Any

import numpy as np
import pandas as pd
import tensorflow as tf

from tasks import task
from tasks.movielens import models as movielens_models
from tasks.movielens import task as movielens
from tasks.ratings import csv_files
from tasks.ratings import models as ratings_models
from tasks.ratings import tables
from tasks.ratings.options import NAME
from tasks.ratings.options import RatingsOptions
from tff_partial.data import examples
from tff_partial.data import populations
from tff_partial.data import splits
from tff_partial.data import vocabularies as vocabularies_lib


class RatingsTask(movielens.MovieLens):
  """Users as clients, under their names, with their ratings as examples.

  Attributes:
    ratings: All ratings with the names of users and items.
    vocabularies: Vocabulary of item ids, by the name of the item column.
  """

  name = NAME
  ratings: tables.NamedRatings

  def __init__(
    self, ratings: tables.NamedRatings, options: RatingsOptions, seed: int
  ):
    super().__init__(ratings, options, seed)
    self._names = np.array(ratings.user_names, object)
    self._users = pd.Index(self._names)
    if ratings.has_times and options.protocol == task.UNSEEN:
      self._frames = {
        part: frame.sort_values(
          ['user_id', 'timestamp'], kind='stable', ignore_index=True
        )
        for part, frame in self._frames.items()
      }
    self.vocabularies = {
      ratings.columns['item']: vocabularies_lib.Vocabulary(ratings.item_titles)
    }

  def _evaluation_clients(self, part: str) -> task.EvaluationClients:
    if self.protocol == task.UNSEEN:
      return task.EvaluationClients(part, False, splits.halves())
    return super()._evaluation_clients(part)

  @property
  def _unit(self) -> float:
    return ratings_models.unit_of(self.ratings.scale)

  def _loss(self) -> tf.keras.losses.Loss:
    return ratings_models.SquaredStars(self._unit)

  def _metrics(
    self, scale: movielens_models.Scale | None
  ) -> Callable[[], list[tf.keras.metrics.Metric]]:
    return functools.partial(
      ratings_models.build_metrics, scale, self.ratings.step
    )

  @property
  def counts(self) -> dict[str, Any]:
    return {
      **super().counts,
      'columns': dict(self.ratings.columns),
      'scale': list(self.ratings.scale),
      'left_out': dict(self.ratings.left_out),
    }

  def rated_by(self, user_id: str) -> pd.DataFrame:
    number = self.ratings.number_of(user_id)
    frame = self.ratings.frame
    # The frame is sorted by users.
    begin, end = np.searchsorted(frame['user_id'], [number, number + 1])
    return frame.iloc[begin:end]

  def everybody(
    self, example_spec: examples.ExampleSpec
  ) -> populations.Population:
    """Pack all users of all parts with all their ratings."""
    return self._pack(self.ratings.frame, example_spec, 1)

  def _pack(
    self,
    frame: pd.DataFrame,
    example_spec: examples.ExampleSpec,
    min_examples: int,
  ) -> populations.Population:
    named = frame.assign(user_id=self._names[frame['user_id']])
    return super()._pack(named, example_spec, min_examples)


def load(options: RatingsOptions, data: task.Data, seed: int) -> RatingsTask:
  if data.is_synthetic:
    options.csv.refuse_set(
      vars(options.csv),
      'a run with --data=synthetic reads no file. Leave one of the two out.',
    )
  table = (
    tables.generate() if data.is_synthetic else csv_files.read(options.csv)
  )
  ratings = tables.choose(table, options.min_per_user, options.min_per_item)
  if options.ends.top_n_user is not None:
    ratings.number_of(options.ends.top_n_user)
  return RatingsTask(ratings, options, seed)
