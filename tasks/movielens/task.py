"""The MovieLens task: rating prediction by matrix factorization.

Two protocols of section 5.1.1 of the FedRecon paper. `unseen`: users are
divided, and test users never took part in training. `seen`: every user's
ratings are divided by time, and users are measured on their later ratings.
"""

from collections.abc import Callable, Mapping
import functools
import os
from typing import Any

import numpy as np
import pandas as pd
import tensorflow as tf

from tasks import task
from tasks.errors import DataError
from tasks.errors import OptionError
from tasks.movielens import data as movielens_data
from tasks.movielens import files as movielens_files
from tasks.movielens import models as movielens_models
from tasks.movielens import synthetic
from tasks.movielens.options import FactorizationOptions
from tasks.movielens.options import MovieLensOptions
from tasks.movielens.options import NAME
import tff_partial
from tff_partial.data import examples
from tff_partial.data import populations
from tff_partial.model import models
from tff_partial.templates import rating_intervals
from tff_partial.templates import rating_posteriors
from tff_partial.training import top_candidates

# Levels of the intervals whose coverage is measured.
_LEVELS = (0.5, 0.8, 0.95)

# Default edition to download.
_DOWNLOADED = 'ml-1m'

# Optional fields for splits, and their columns.
_FIELDS = {'time': 'timestamp', 'is_query': 'is_query'}


class MovieLens(task.MeasuredByProtocol):
  """Users as clients, their ratings as examples.

  Attributes:
    ratings: All ratings with titles and the scale.
  """

  name = NAME
  selection_metric = 'rmse'
  higher_is_better = False
  recommends = True
  forms = (
    task.OWN,
    task.TABLE,
    task.NOBODY,
    task.POSTERIOR,
    task.PUBLIC_POSTERIOR,
  )
  learned_from_training: tuple[str, ...] = ('list of items', 'scale of ratings')

  def __init__(
    self,
    ratings: movielens_data.Ratings,
    options: FactorizationOptions,
    seed: int,
  ):
    self.ratings = ratings
    self.protocol = options.protocol
    self._options = options
    shuffle = functools.partial(
      movielens_data.limit_per_user,
      max_examples=options.max_examples,
      seed=seed,
    )
    if options.protocol == task.UNSEEN:
      parts = movielens_data.split_users(ratings.frame, seed=seed)
      frames = [shuffle(part) for part in parts]
    else:
      past, *later = movielens_data.split_by_time(ratings.frame)
      past = shuffle(past)
      # The past ratings are marked 0, the later ones 1.
      marked = past.assign(is_query=0)
      frames = [
        past,
        *(pd.concat([marked, part.assign(is_query=1)]) for part in later),
      ]
    self._frames: dict[str, pd.DataFrame] = dict(
      zip(task.PARTS, frames, strict=True)
    )
    self._seed = seed
    # Users are numbered as rows of a table.
    self._users = pd.Index(np.unique(ratings.frame['user_id']))

  def _build_model(self, user: str) -> models.PartialModel:
    options = self._options
    mean = options.public_mean or 0.0
    if options.centred:
      mean = float(self._frames[task.TRAIN]['rating'].mean())
    scale = self.ratings.scale if options.clip_predictions else None
    if user in (task.POSTERIOR, task.PUBLIC_POSTERIOR):
      width, columns = 0, self.item_columns()
      if user == task.PUBLIC_POSTERIOR and columns is not None:
        width = columns.shape[1]
      return rating_posteriors.build_model(
        self.ratings.num_items,
        options.num_factors + width,
        mean=mean,
        unit=self._unit,
        user_attributes=dict(self._user_columns.max() + 1),
        rated_items=options.rated_items,
        metrics=lambda: [
          *self._metrics(scale)(),
          *map(rating_intervals.IntervalCoverage, _LEVELS),
        ],
        seed=self._seed,
      )
    if not options.num_factors:
      raise OptionError(
        '--num_factors=0: biases alone are for fed_als, fed_als_private and '
        'dp_als. Give at least 1, or choose one of them.'
      )
    return tff_partial.from_keras(
      functools.partial(
        movielens_models.build_matrix_factorization,
        self.ratings.num_items,
        options.num_factors,
        biases=options.biases,
        mean=mean,
        unit=self._unit,
        l2=options.l2,
        initial_scale=options.initial_scale,
        num_users=len(self._users) if user == task.TABLE else None,
      ),
      local=movielens_models.LOCAL_LAYERS if user == task.OWN else None,
      loss=self._loss(),
      metrics=self._metrics(scale),
      seed=self._seed,
    )

  def item_columns(self) -> np.ndarray | None:
    """Return genres of items, if they were asked for."""
    if not self._options.item_attributes:
      return None
    if self.ratings.item_attributes is None:
      raise OptionError(
        f'--item_attributes: {self.ratings.name} does not tell the genres '
        'of its items. Leave it out.'
      )
    return self.ratings.item_attributes

  @functools.cached_property
  def _user_columns(self) -> pd.DataFrame:
    """Numbered attributes of users; without columns unless asked for."""
    if not self._options.user_attributes:
      return pd.DataFrame()
    if self.ratings.users is None:
      raise OptionError(
        f'--user_attributes: {self.ratings.name} tells nothing about its '
        'users. Leave it out.'
      )
    return movielens_data.user_columns(self.ratings.users)

  @property
  def _unit(self) -> float:
    """Size of one star on the scale of the ratings."""
    return 1.0

  def _loss(self) -> tf.keras.losses.Loss:
    return tf.keras.losses.MeanSquaredError()

  def _metrics(
    self, scale: movielens_models.Scale | None
  ) -> Callable[[], list[tf.keras.metrics.Metric]]:
    """Return a factory of metrics, with predictions clipped to any scale."""
    return functools.partial(movielens_models.build_metrics, scale)

  @property
  def counts(self) -> dict[str, Any]:
    return {
      'name': self.ratings.name,
      **movielens_data.describe(self.ratings.frame),
      **{
        part: movielens_data.describe(frame)
        for part, frame in self._frames.items()
      },
    }

  def clients(
    self, part: str, example_spec: examples.ExampleSpec
  ) -> populations.Population:
    return self._pack(
      self._frames[part], example_spec, self._options.min_examples
    )

  def from_labels_alone(
    self, num_support: int, num_reserved: int
  ) -> dict[str, dict[str, float]]:
    """Measure a predictor of a new user's mean rating for all its items.

    With none known, the mean of the training ratings replaces the user's.
    """
    frame = self._frames[task.TEST]
    users = frame.groupby('user_id')['rating']
    place = users.cumcount()
    known = frame[place < num_support].groupby('user_id')['rating'].mean()
    predicted = frame['user_id'].map(known)
    predicted = predicted.fillna(self._frames[task.TRAIN]['rating'].mean())
    is_measured = (place >= num_reserved) & (
      users.transform('size') >= self._options.min_examples
    )
    squares = (frame['rating'] - predicted)[is_measured] ** 2
    return {'support_mean': {self.protocol: float(squares.mean() ** 0.5)}}

  def one_user(
    self, user_id: str, example_spec: examples.ExampleSpec
  ) -> populations.Population:
    return self._pack(self.rated_by(user_id), example_spec, 1)

  def rated_by(self, user_id: str) -> pd.DataFrame:
    frame = self.ratings.frame
    mine = frame[frame['user_id'].astype(str) == user_id]
    if mine.empty:
      raise OptionError(
        f'--user={user_id}: there is no user {user_id!r} in '
        f'{self.ratings.name}. Users are '
        f'numbered from {frame["user_id"].min()} to {frame["user_id"].max()}.'
      )
    columns = self._user_columns
    return mine.join(columns, 'user_id') if len(columns) else mine

  def recommend(
    self, keras_model: tf.keras.Model, user_id: str, number: int
  ) -> list[task.Recommendation]:
    rated = self.rated_by(user_id)
    unrated = np.setdiff1d(np.arange(self.ratings.num_items), rated['item_id'])
    if not 1 <= number <= len(unrated):
      raise OptionError(
        f'--top_n={number}: cannot name {number} of the {len(unrated)} items '
        f'that user {user_id} has not rated.'
      )
    low, high = self.ratings.scale
    has_variances = isinstance(keras_model.output_shape, Mapping)
    return [
      task.Recommendation(
        int(item),
        self.ratings.item_titles[item],
        float(np.clip(score, low, high)),
      )
      for item, score in top_candidates.top_n(
        keras_model,
        unrated,
        number,
        context=dict(rated[list(self._user_columns)].iloc[0]),
        output=rating_posteriors.RATING if has_variances else None,
      )
    ]

  def _pack(
    self,
    frame: pd.DataFrame,
    example_spec: examples.ExampleSpec,
    min_examples: int,
  ) -> populations.Population:
    inputs: Any = 'item_id'
    columns = self._user_columns
    if isinstance(example_spec['x'], Mapping) and len(columns):
      inputs = {rating_posteriors.ITEM_ID: 'item_id', **{c: c for c in columns}}
      frame = frame[frame.columns.difference(list(columns))].join(
        columns, 'user_id'
      )
    elif isinstance(example_spec['x'], Mapping):
      inputs = {movielens_models.ITEM: 'item_id', movielens_models.USER: 'row'}
      frame = frame.assign(row=self._users.get_indexer(frame['user_id']))
    return tff_partial.from_pandas(
      frame,
      example_spec,
      client_id='user_id',
      inputs=inputs,
      labels='rating',
      fields={
        field: column
        for field, column in _FIELDS.items()
        if field in example_spec and column in frame.columns
      },
      min_examples=min_examples,
    )


def data_folder(data: task.Data, data_set: str) -> str:
  """Return the folder of real data, fetched into it if it holds none.

  Args:
    data: Their source.
    data_set: The edition; '' for the one in the folder.

  Raises:
    DataError: If no folder is named, or the data cannot be fetched.
  """
  if not data.data_dir:
    raise DataError(
      f'MovieLens: no data folder is named. {movielens_files.REMEDY_NO_DATA}'
    )
  if data.download:
    try:
      movielens_files.locate(data.data_dir, data_set)
    except DataError:
      movielens_data.download(
        os.path.join(data.data_dir, NAME), data_set or _DOWNLOADED
      )
  return data.data_dir


def load_ratings(data: task.Data, data_set: str) -> movielens_data.Ratings:
  """Load, download or invent ratings; arguments as for `data_folder`."""
  if data.is_synthetic:
    return synthetic.generate()
  return movielens_data.load(data_folder(data, data_set), data_set)


def load(options: MovieLensOptions, data: task.Data, seed: int) -> MovieLens:
  """Load the ratings and make the task.

  Data are in the folder `movielens/<data_set>` below `data_dir`.
  """
  return MovieLens(load_ratings(data, options.data_set), options, seed)
