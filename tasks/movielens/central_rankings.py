"""Popularity and neighbours of items: rankings to compare federated ones with.

Both see all users' interactions in one place, and nothing is trained. They rank
the held-out films of the task `movielens_ranking` with its own metrics:

  python -m tasks.movielens.central_rankings --data_set=ml-1m

Neighbours are as of Deshpande and Karypis ("Item-based top-N recommendation
algorithms", 2004): a film's score is the sum of its similarities to the user's
films, and of each film's similarities only the largest count. Their number, and
a count that shrinks similarities of few users, are chosen by validation.
"""

import argparse
from collections.abc import Callable
import itertools
import json
from typing import TypeAlias

import numpy as np
from scipy import sparse
import tensorflow as tf

from tasks import shared_options as shared
from tasks import task as tasks_lib
from tasks.movielens import ranking
from tasks.movielens.options import RankingOptions
from tff_partial.model import ranking_metrics

# (known interactions, 0 or 1, `[users, items]`) -> scores of the same shape.
Score: TypeAlias = Callable[[np.ndarray], np.ndarray]

SETTINGS = list(itertools.product((10, 20, 40, 80), (0.0, 20.0, 100.0)))
_USERS = 500


def popularity(train: np.ndarray) -> Score:
  """Score items by their users in `train`, 0 or 1, `[users, items]`."""
  counts = train.sum(0)
  return lambda known: np.broadcast_to(counts, known.shape)


def item_neighbours(both: np.ndarray, number: int, shrink: float) -> Score:
  """Return scores by similar items: cosines of their sets of users.

  Args:
    both: Number of users that two items share, float32 `[items, items]`.
    number: Number of most similar items that count for each item.
    shrink: Added to the denominator, in users.
  """
  counts = np.diag(both)
  similar = both / np.maximum(np.sqrt(np.outer(counts, counts)) + shrink, 1e-9)
  np.fill_diagonal(similar, 0.0)
  number = min(number, len(counts) - 1)
  smallest = -np.sort(-similar, axis=1)[:, number - 1 : number]
  nearest = sparse.csr_matrix(np.where(similar >= smallest, similar, 0.0))
  return lambda known: (sparse.csr_matrix(known) @ nearest).toarray()


def measure(
  score: Score, known: np.ndarray, held_out: np.ndarray
) -> dict[str, float]:
  """Return the metrics of the task for users with one held-out item each.

  Args:
    score: Scores items.
    known: Interactions that are known and not ranked, `[users, items]`.
    held_out: The held-out item of each user, `[users]`.
  """
  metrics = ranking_metrics.ranking_metrics()()
  for first in range(0, len(known), _USERS):
    seen, items = known[first:][:_USERS], held_out[first:][:_USERS]
    scores, users = score(seen), np.arange(len(items))
    of_item = scores[users, items][:, None]
    ranked = seen == 0
    ranked[users, items] = False
    counts = {
      'above': ((scores > of_item) & ranked).sum(1),
      'tied': ((scores == of_item) & ranked).sum(1),
      'others': ranked.sum(1),
    }
    ranks = {'all': counts, 'drawn': counts, 'held_out': np.ones(len(items))}
    for metric in metrics:
      metric.update_state(
        None, tf.nest.map_structure(lambda n: n.astype(np.float32), ranks)
      )
  return {metric.name: round(float(metric.result()), 4) for metric in metrics}


def interactions(
  task: ranking.MovieLensRanking, part: str
) -> tuple[np.ndarray, np.ndarray]:
  """Return what is known of each user, `[users, items]`, and held-out items.

  The task must measure users who took part in training.
  """
  frame = task.frames[part]
  users, places = np.unique(frame['user_id'], return_inverse=True)
  items, is_query = frame['item_id'].to_numpy(), frame['is_query'] == 1
  known = np.zeros([len(users), task.ratings.num_items], np.float32)
  known[places[~is_query], items[~is_query]] = 1.0
  held_out = np.zeros(len(users), np.int64)
  held_out[places[is_query]] = items[is_query]
  return known, held_out


def compare(task: ranking.MovieLensRanking) -> dict[str, dict[str, float]]:
  """Return the test metrics of popularity and of the best neighbours."""
  train, _ = interactions(task, tasks_lib.TRAIN)
  both = train.T @ train
  of_validation = interactions(task, tasks_lib.VALIDATION)
  tried = {
    setting: measure(item_neighbours(both, *setting), *of_validation)
    for setting in SETTINGS
  }
  best = max(SETTINGS, key=lambda setting: tried[setting]['ndcg_10'])
  of_test = interactions(task, tasks_lib.TEST)
  number, shrink = best
  return {
    'popularity': measure(popularity(train), *of_test),
    f'item neighbours, {number}, shrunk by {shrink:.0f}': measure(
      item_neighbours(both, *best), *of_test
    ),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  add = parser.add_argument
  add('--data_set', default='ml-1m', help='edition of MovieLens')
  add('--data_dir', default=shared.Data().data_dir, help='folder of the data')
  add('--random_tastes', action='store_true', help='the leak probe')
  add('--seed', type=int, default=0, help='draws random tastes')
  given = parser.parse_args()
  task = ranking.load(
    RankingOptions(data_set=given.data_set, random_tastes=given.random_tastes),
    shared.Data(data_dir=given.data_dir),
    given.seed,
  )
  for name, found in compare(task).items():
    print(f'{name}: {json.dumps(found)}')


if __name__ == '__main__':
  main()
