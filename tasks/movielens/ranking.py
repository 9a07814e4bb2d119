"""The task of ranking films: who rated a film is interested in it.

Ratings count as interactions, without their stars. Protocol `seen`: of each
user the latest interaction is held out for the test and the one before it for
validation; those who took part in training are measured. `unseen`: test users
never took part, and a fifth of their interactions, the latest, is held out.
Held-out items are ranked among all that the user has not interacted with, and
among 99 drawn ones, whose value is the expectation over all draws. Films that
`--max_examples` leaves out count as such that the user has not seen.
"""

import functools
from typing import Any

import numpy as np
import pandas as pd
import tensorflow as tf

from tasks import task
from tasks.movielens import data as movielens_data
from tasks.movielens import models as movielens_models
from tasks.movielens import task as movielens
from tasks.movielens.options import RankingOptions
import tff_partial
from tff_partial import evaluation as evaluations
from tff_partial.data import examples
from tff_partial.data import populations
from tff_partial.data import splits
from tff_partial.model import models
from tff_partial.templates import implicit_factors
from tff_partial.templates import ranking

_RANDOM_TASTES = 4
# One in so many of new users' interactions is held out.
_HELD_OUT = 5


class MovieLensRanking(task.MeasuredByProtocol):
  """Users as clients, the films that they rated as examples.

  Attributes:
    ratings: All ratings.
    frames: The interactions of each part, held-out ones with `is_query` 1.
  """

  name = RankingOptions.name
  selection_metric = 'ndcg_10'
  higher_is_better = True
  # Exact solves; vectors of users that are trained by gradients, alone or with
  # a table of items for each user; items alone.
  forms = (task.IMPLICIT, task.OWN, task.ADDITIVE, task.NOBODY)
  learned_from_training: tuple[str, ...] = ('list of items',)

  def __init__(
    self, ratings: movielens_data.Ratings, options: RankingOptions, seed: int
  ):
    self.ratings = ratings
    self.protocol = options.protocol
    self._options = options
    self._seed = seed
    frame = ratings.frame.assign(rating=np.float32(1.0), is_query=0)
    number = frame.groupby('user_id')['user_id'].transform('size')
    frame = frame[number >= options.min_examples]
    if options.random_tastes:
      frame = _with_random_tastes(frame, ratings.num_items, seed)
    self.frames = self._divided(frame)

  def _divided(self, frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the frame of each part, with held-out interactions marked."""
    options = self._options

    def latest(frame: pd.DataFrame) -> pd.DataFrame:
      # The held-out interactions are the last ones.
      most = options.max_examples or len(frame)
      return frame.groupby('user_id').tail(most)

    from_end = frame.groupby('user_id').cumcount(ascending=False)
    if self.protocol == task.SEEN:
      held_out = [
        frame[from_end >= last].assign(
          is_query=(from_end[from_end >= last] == last).astype(np.int32)
        )
        for last in (0, 1)
      ]
      test, validation = map(latest, held_out)
      train = latest(frame[from_end >= 2])
      return {task.TRAIN: train, task.VALIDATION: validation, task.TEST: test}
    frame = latest(frame)
    number = frame.groupby('user_id')['user_id'].transform('size')
    is_query = from_end[frame.index] < np.maximum(number // _HELD_OUT, 1)
    frame = frame.assign(is_query=is_query.astype(np.int32))
    parts = movielens_data.split_users(frame, seed=self._seed)
    return dict(zip(task.PARTS, parts, strict=True))

  @property
  def counts(self) -> dict[str, Any]:
    return {
      'name': self.ratings.name,
      'items': self.ratings.num_items,
      **{
        part: {
          'users': frame['user_id'].nunique(),
          'interactions': len(frame),
          'held_out': int(frame['is_query'].sum()) if part != task.TRAIN else 0,
        }
        for part, frame in self.frames.items()
      },
    }

  def _evaluation_clients(self, part: str) -> task.EvaluationClients:
    seen = self.protocol == task.SEEN
    return task.EvaluationClients(part, seen, splits.by_mark())

  def _build_model(self, user: str) -> models.PartialModel:
    options, num_items = self._options, self.ratings.num_items
    if user == task.IMPLICIT:
      return implicit_factors.build_model(
        num_items, options.num_factors, seed=self._seed
      )
    return tff_partial.from_keras(
      functools.partial(
        build_ranking_model,
        num_items,
        options.num_factors,
        num_negatives=options.num_negatives,
        biases=options.biases or user == task.NOBODY,
        own_table=user == task.ADDITIVE,
      ),
      local=None if user == task.NOBODY else movielens_models.LOCAL_LAYERS,
      loss=ranking.loss_with_negatives(options.ranking_loss),
      labels=tf.TensorSpec([]),
      seed=self._seed,
    )

  def measured(
    self, evaluation: evaluations.Evaluation, clients: task.EvaluationClients
  ) -> evaluations.Evaluation:
    """Return the evaluation by ranking of the same personalisation."""
    outputs = evaluation.model.prediction_spec
    return ranking.build_ranking_eval(
      evaluation,
      self.ratings.num_items,
      split=clients.split or splits.by_mark(),
      output=None if isinstance(outputs, tf.TensorSpec) else ranking.SCORE,
      # Users have one held-out film, or a fifth of theirs.
      batch_size=1 if self.protocol == task.SEEN else 8,
    )

  def clients(
    self, part: str, example_spec: examples.ExampleSpec
  ) -> populations.Population:
    return tff_partial.from_pandas(
      self.frames[part],
      example_spec,
      client_id='user_id',
      inputs='item_id',
      labels='rating',
      fields={'is_query': 'is_query'} if 'is_query' in example_spec else {},
    )


def build_ranking_model(
  num_items: int,
  num_factors: int,
  *,
  num_negatives: int,
  biases: bool,
  own_table: bool = False,
) -> tf.keras.Model:
  """Build a model from item ids to scores of these and of drawn negatives.

  Args:
    num_items: Number of items.
    num_factors: Length of the vectors.
    num_negatives: Number of negatives drawn for each item.
    biases: True if items have biases.
    own_table: True if a table of the user's own, at first of zeros, is added to
      the items' vectors.
  """
  layers = tf.keras.layers
  item = layers.Input((), dtype=tf.int32, name=movielens_models.ITEM)
  items = ranking.NegativeItems(num_items, num_negatives, name='items')(item)
  uniform = tf.keras.initializers.RandomUniform(-0.05, 0.05)
  vectors = layers.Embedding(num_items, num_factors, uniform, name='item')(
    items
  )
  if own_table:
    own = layers.Embedding(num_items, num_factors, 'zeros', name='user_item')
    vectors = layers.Add(name='views')([vectors, own(items)])
  scores = movielens_models.UserEmbedding(
    initializer=uniform, name='user_embedding'
  )(vectors)
  if biases:
    bias = layers.Embedding(num_items, 1, 'zeros', name='item_bias')(items)
    scores = layers.Add(name='scores')(
      [scores, layers.Reshape([1 + num_negatives])(bias)]
    )
  return tf.keras.Model(
    item, {ranking.SCORE: scores[:, 0], ranking.NEGATIVES: scores[:, 1:]}
  )


def _with_random_tastes(
  frame: pd.DataFrame, num_items: int, seed: int
) -> pd.DataFrame:
  """Return as many interactions of each user with items drawn at random."""
  draw = np.random.default_rng([_RANDOM_TASTES, seed])
  drawn = [
    draw.permutation(num_items)[:number]
    for number in frame.groupby('user_id', sort=False).size()
  ]
  return frame.assign(item_id=np.concatenate(drawn).astype(np.int32))


def load(
  options: RankingOptions, data: task.Data, seed: int
) -> MovieLensRanking:
  """Load the ratings, as the task movielens does, and make the task."""
  ratings = movielens.load_ratings(data, options.data_set)
  return MovieLensRanking(ratings, options, seed)
