"""Intervals that cover what they promise, also where the model is wrong.

Split conformal prediction (Vovk et al., 2005; Lei et al., 2018): a score is the
distance of a rating that was held out from its prediction, in predicted
standard deviations. An interval of level 80 % has the 80 % quantile of the
scores in place of that of a normal distribution. Each client counts its scores
in a histogram, and all have the same weight, so that the coverage is that of a
new user's ratings, averaged over users. Nothing else leaves a client, and the
sum can be noised.

Predicted deviations have a factor of each user's own (`rating_posteriors.py`),
shrunk to that of all, so that intervals are valid also by user.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial import contexts
from tff_partial import errors
from tff_partial import evaluation as evaluation_lib
from tff_partial import phases
from tff_partial.data import cohorts
from tff_partial.dp import dp_queries
from tff_partial.dp import private_rows
from tff_partial.templates import rating_posteriors
from tff_partial.training import evaluation_sets

# Scores from 0 to the largest are in bins of equal width; others in one more.
_LARGEST, _BINS = 8.0, 160
_EDGES = np.linspace(0.0, _LARGEST, _BINS + 1)
_SHARE_OF_WORST = 0.1
_DRAWS = 100


class CalibrationError(errors.UserError, ValueError):
  """Raised for intervals that cannot be calibrated, or a wrong argument."""


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class ErrorHistogram(tf.keras.metrics.Metric):
  """Histogram of errors in predicted standard deviations, `[bins]`."""

  def __init__(self, name: str = 'scores', **kwargs: Any):
    super().__init__(name=name, **kwargs)
    self.counts = self.add_weight('counts', [_BINS + 1], initializer='zeros')

  def update_state(
    self, y_true: Any, y_pred: Any, sample_weight: Any = None
  ) -> Any:
    """Add a batch of labels and of outputs of the model."""
    error = tf.abs(tf.reshape(y_true, [-1]) - y_pred[rating_posteriors.RATING])
    score = error / tf.sqrt(y_pred[rating_posteriors.VARIANCE])
    place = tf.minimum(score * (_BINS / _LARGEST), float(_BINS))
    weight = tf.ones_like(error)
    if sample_weight is not None:
      weight *= tf.reshape(tf.cast(sample_weight, weight.dtype), [-1])
    counts = tf.math.unsorted_segment_sum(
      weight, tf.cast(place, tf.int32), _BINS + 1
    )
    return self.counts.assign_add(counts)

  def result(self) -> tf.Tensor:
    """Return the counts."""
    return tf.identity(self.counts)


def histograms(
  evaluation: evaluation_lib.Evaluation,
  clients: cohorts.ClientSource,
  weights: Any,
  seed: int = 0,
  server_state: Any = None,
) -> np.ndarray:
  """Count the scores of each client's query set, `[clients, bins]`.

  Args:
    evaluation: An evaluation of a model with posteriors.
    clients: The clients; those without a query set are left out.
    weights: The model's weights at the server, `ModelWeights`.
    seed: The run's seed; a client's draws follow from it and its id.
    server_state: Server state other than weights, as for `evaluate`.

  Raises:
    CalibrationError: If the model predicts no variances.
  """
  model, (*before, last) = evaluation.model, evaluation.parts.work
  spec = model.prediction_spec
  is_known = isinstance(spec, Mapping) and rating_posteriors.VARIANCE in spec
  if not (is_known and isinstance(last, phases.Phase)):
    raise CalibrationError(
      'calibrate: the model predicts no variances. Train one of '
      '`algorithms.build_fed_als` (--algorithm=fed_als).'
    )
  measured = evaluation_lib.build_evaluation(
    model.with_replaced_predictions(
      spec, lambda same: same, lambda: [ErrorHistogram()]
    ),
    work=[*before, dataclasses.replace(last, predict_fn=_predictions)],
    client_state=evaluation.parts.client_state,
    server_state=evaluation.parts.server_state,
  )
  found: list[evaluation_lib.ByClient] = []
  evaluation_sets.evaluate(
    evaluation_sets.EvaluationSet(measured, clients),
    weights,
    seed=seed,
    on_clients=found.append,
    server_state=server_state,
  )
  # Nothing is there for clients without examples to measure.
  scores = list(found[0].get('scores', {}).values())
  return np.reshape(scores, [-1, _BINS + 1])


def _predictions(client: contexts.ClientContext) -> Any:
  return contexts.batch_of(client).predictions


@dataclasses.dataclass(frozen=True)
class Calibration:
  """Distribution of scores over clients.

  Attributes:
    mass: Sum of the clients' shares of scores in each bin, noised or not.
  """

  mass: Sequence[float]

  def quantile(self, level: float) -> float:
    """Return the number of deviations within which a share of ratings is.

    Args:
      level: The share.

    Raises:
      CalibrationError: If the level is not between 0 and 1, or so large that
        the quantile is beyond the histogram.
    """
    # Noise may make a bin negative, but no distribution falls.
    below = np.maximum.accumulate(np.cumsum([0.0, *self.mass]))
    wanted = level * below[-1]
    place = int(np.searchsorted(below, wanted))
    if not (0 < level < 1 and 0 < place <= _BINS):
      raise CalibrationError(
        f'quantile: level={level}: expected a share between 0 and '
        f'{below[_BINS] / max(below[-1], 1e-9):.4f}, the share of scores up to '
        f'{_LARGEST:g} deviations.'
      )
    return float(
      np.interp(
        wanted, below[place - 1 : place + 1], _EDGES[place - 1 : place + 1]
      )
    )

  def coverage(self, counts: np.ndarray, level: float) -> dict[str, float]:
    """Measure intervals on clients.

    Args:
      counts: Their `histograms`; those of clients without ratings do not count.
      level: The level of the intervals.

    Returns:
      `coverage` of all their ratings; `worst_tenth`, the mean coverage of the
      tenth of clients with the worst; `worst_tenth_by_chance`, the same if each
      rating of each client were covered with the probability `level`: clients
      have few ratings to measure; and `worst_tenth_held_out`, the coverage of
      half of their ratings, of the tenth of clients that is worst on the other
      half, which is free of that chance, in the mean over random halves. Of
      clients with one rating no half is held out; NaN if all are such clients.
    """
    counts = counts[counts.sum(1) > 0]
    below = np.pad(np.cumsum(counts, 1), [[0, 0], [1, 0]])[:, :-1]
    inside = np.array(
      [np.interp(self.quantile(level), _EDGES, row) for row in below]
    )
    number = counts.sum(1)
    worst = max(int(_SHARE_OF_WORST * len(number)), 1)
    random = np.random.default_rng(0)
    # Weights may sum to less than one rating.
    whole = np.maximum(np.round(number).astype(int), 1)
    draws = random.binomial(whole, level, [_DRAWS, len(number)])
    hits = np.minimum(np.round(inside).astype(int), whole)
    return {
      'coverage': float(inside.sum() / number.sum()),
      'worst_tenth': float(np.sort(inside / number)[:worst].mean()),
      'worst_tenth_by_chance': float(
        np.sort(draws / whole, 1)[:, :worst].mean()
      ),
      'worst_tenth_held_out': _held_out(hits, whole, random),
    }


def _held_out(
  hits: np.ndarray, whole: np.ndarray, random: np.random.Generator
) -> float:
  """Return the coverage of half the ratings of those worst on the other half.

  Args:
    hits: Number of covered ratings of each client, `[clients]`.
    whole: Number of its ratings; those of clients with one are left out.
    random: Draws the halves.
  """
  hits, whole = hits[whole > 1], whole[whole > 1]
  if not len(whole):
    return np.nan
  worst = max(int(_SHARE_OF_WORST * len(whole)), 1)
  shown = whole // 2
  seen = random.hypergeometric(hits, whole - hits, shown, [_DRAWS, len(whole)])
  chosen = np.argsort(seen / shown, 1)[:, :worst]
  unseen = np.take_along_axis(hits - seen, chosen, 1).sum(1)
  return float((unseen / (whole - shown)[chosen].sum(1)).mean())


def calibrate(
  evaluation: evaluation_lib.Evaluation,
  clients: cohorts.ClientSource,
  weights: Any,
  *,
  noise_multiplier: float = 0.0,
  noise_seed: int | None = None,
  seed: int = 0,
  server_state: Any = None,
) -> Calibration:
  """Learn by how much intervals are too narrow or too wide.

      calibration = calibrate(evaluation, validation, result.best_weights)
      predictor.interval('ann', items, 0.8, calibration=calibration)

  Args:
    evaluation: An evaluation of a model with posteriors, which measures each
      client on its query set.
    clients: Clients that did not take part in training: items fit those that
      did better than new ones.
    weights: The model's weights at the server, `ModelWeights`.
    noise_multiplier: Standard deviation of the noise that the server adds to
      each bin. A client changes all bins together by at most 1 (in L2), so
      that a plan counts it with `once=(noise_multiplier,)`.
    noise_seed: Makes a simulation's noise reproducible; by default the
      operating system draws it.
    seed: The run's seed; a client's draws follow from it and its id.
    server_state: Server state other than weights, such as
      `result.best_server_state`, for an evaluation whose clients read it.

  Raises:
    CalibrationError: If the model predicts no variances, there are no scores,
      or the noise is not possible.
  """
  if not 0 <= noise_multiplier < np.inf:
    raise CalibrationError(
      f'calibrate: noise_multiplier={noise_multiplier}: expected a finite '
      'number of at least 0.'
    )
  counts = histograms(evaluation, clients, weights, seed, server_state)
  counts = counts[counts.sum(1) > 0]
  if not len(counts):
    raise CalibrationError(
      'calibrate: no client has ratings to measure. Give clients with two '
      'ratings or more.'
    )
  mass = tf.constant((counts / counts.sum(1, keepdims=True)).sum(0), tf.double)
  if noise_multiplier:
    drawn = dp_queries.standard_normal(
      private_rows.seed_maker(noise_seed, 'calibration')(), mass.shape
    )
    mass = dp_queries.on_grid(mass + noise_multiplier * drawn, noise_multiplier)
  return Calibration(tuple(mass.numpy().tolist()))
