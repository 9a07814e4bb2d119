"""A probe for leaks of held-out items into what ranks them.

Users with independent random tastes have nothing in common that could be
learned, so that each held-out item must rank as by chance. If an algorithm does
better, its protocol tells it which items are held out: for example because they
are the only ones never drawn as negatives.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tff_partial import evaluation as evaluations
from tff_partial.checks.split_personalization import CheckError
from tff_partial.data import packing
from tff_partial.data import splits
from tff_partial.processes import PartialProcess
from tff_partial.training import evaluation_sets
from tff_partial.training import programs


class LeakProbe(NamedTuple):
  """What the ranks of random users' held-out items are worth.

  Attributes:
    hit_rate: Mean hit rate.
    chance: The hit rate of any order that knows nothing.
    standard_error: Standard error of `hit_rate` between users.
  """

  hit_rate: float
  chance: float
  standard_error: float

  @property
  def leaks(self) -> bool:
    """True if the hit rate is four standard errors above chance."""
    return self.hit_rate > self.chance + 4 * self.standard_error


def probe_leak(
  process: PartialProcess,
  evaluation: evaluations.Evaluation,
  num_items: int,
  *,
  chance: float,
  metric: str = 'hit_rate_10',
  num_users: int = 400,
  num_interactions: int = 20,
  rounds: int = 5,
  labels: Any = np.float32(1.0),
  seed: int = 0,
) -> LeakProbe:
  """Train on random tastes, and measure by how much held-out items stand out.

  Args:
    process: The process, of a model from item ids to scores.
    evaluation: Its ranking evaluation with `splits.by_mark()`, from
      `templates.ranking.build_ranking_eval`.
    num_items: Number of items.
    chance: The value of the metric if the order is random, such as 0.1 for the
      first 10 of 100 items.
    metric: The metric.
    num_users: Number of users, all in each round.
    num_interactions: Number of items of each, of which one is held out.
    rounds: Number of rounds.
    labels: The label of each example.
    seed: Draws the tastes, and what training draws.

  Raises:
    CheckError: If the training of a user is not finite.
  """
  draw = np.random.default_rng(seed)
  items = [
    draw.permutation(num_items)[:num_interactions].astype(np.int32)
    for _ in range(num_users)
  ]

  def clients(part: slice) -> Mapping[str, Any]:
    return {
      str(user): {'x': mine[part], 'y': np.repeat(labels, len(mine[part]))}
      for user, mine in enumerate(items)
    }

  known, held_out = clients(slice(-1)), clients(slice(-1, None))
  spec = process.example_spec
  result = programs.train(
    process,
    packing.pack(known, spec, query={} if splits.MARK in spec else None),
    rounds=rounds,
    clients_per_round=num_users,
    seed=seed,
  )
  measured = evaluation_sets.evaluate(
    evaluation_sets.EvaluationSet(
      evaluation, packing.pack(known, evaluation.example_spec, query=held_out)
    ),
    result.weights,
    seed=seed,
  )
  if result.train.get('num_not_finite') or measured['num_not_finite']:
    raise CheckError(
      'The losses or weights of a user are not finite, so that it counts for '
      'nothing. Lower the learning rates.'
    )
  found = measured['per_client'][metric]
  return LeakProbe(found['mean'], chance, found['std'] / num_users**0.5)
