"""DP-ALS: alternating least squares with noisy matrices of items.

In the first round, clients send a count of the items that they rated. In each
later one they send, for each of these items, the normal equations of its bias
and vector: `(1, u) (1, u)'` and `(1, u)` times the rating less the user's part
of it, as in Chien et al. ("Private alternating least squares: practical private
matrix completion with tighter rates", ICML 2021). The server raises small or
negative eigenvalues of the noisy matrices, and solves. It is here to compare
with `fed_als_private.py`, with which it shares all else: the cost in epsilon,
the bound of a user's message as a whole, and clients' solves.

Deviations: users and items have biases, and items may have public columns that
are not learned. A user's ratings are not sampled but weighted, by the root of
their number and by what the noisy counts say, as in Krichene et al.
("Multi-task differential privacy under distribution skew", ICML 2023). The
floor of eigenvalues and the ridge of items follow the noise.
"""

import collections
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial.composition import Aggregation
from tff_partial.contexts import ClientContext
from tff_partial.model import models
from tff_partial.processes import PartialProcess
from tff_partial.solvers.triangles import Packing
from tff_partial.templates import private_ratings
from tff_partial.templates import rating_posteriors as posteriors
from tff_partial.templates.private_items import PrivateItems
from tff_partial.tiers import GLOBAL

# What matrices and vectors are multiplied by before they are bounded.
_MATRIX, _VECTOR = 1.0, 2.0
# In deviations of the noise, the smallest eigenvalue of a matrix and the ridge;
# then what the ridge is without noise.
_FLOOR, _RIDGE, _LEAST = 1.7, 4.0, 0.05


def build_dp_als(
  model: models.PartialModel,
  *,
  aggregation: Aggregation,
  attributes: np.ndarray | None = None,
) -> PartialProcess:
  """Build alternating least squares with noisy matrices.

  Args:
    model: As for `build_fed_als_private`.
    aggregation: As for `build_fed_als_private`.
    attributes: As for `build_fed_als_private`.

  Example:
    >>> model = templates.rating_posteriors.build_model(1_000, 2)
    >>> process = algorithms.build_dp_als(
    ...   model, aggregation=tff_partial.Aggregation(aggregator=plan.mean())
    ... )

  Raises:
    SettingError: If it is another model, or the attributes do not fit it.
    PrivacyError: If the aggregator is no mean of a plan with a `FixedClip`.
  """
  return private_ratings.compose_released(
    'build_dp_als',
    model,
    aggregation,
    attributes,
    rows=_equations,
    refined=_solved,
  )


def _equations(client: ClientContext, items: PrivateItems) -> tf.Tensor:
  """Return the normal equations of the items of a client's ratings."""
  mean, _ = posteriors.moments(client)
  learned = items.num_factors + 1
  user = posteriors.with_one(mean)[:learned]
  ids = private_ratings.items_rated(client)
  item = tf.gather(client.weight(GLOBAL, posteriors.ITEM), ids)
  of_user = mean[0] + tf.linalg.matvec(item[:, learned:], mean[learned:])
  labels = client.examples['y'] - client.weight(GLOBAL, posteriors.MEAN)
  labels = labels / client.weight(GLOBAL, posteriors.UNIT) - of_user
  matrix = Packing(learned).pack(user[:, None] * user)
  return tf.concat(
    [
      _MATRIX * tf.tile(matrix[None], [tf.shape(ids)[0], 1]),
      _VECTOR * labels[:, None] * user,
    ],
    1,
  )


def _solved(
  items: PrivateItems,
  state: Any,
  item: tf.Tensor,
  sums: tf.Tensor,
  share: tf.Tensor,
  stddev: float,
  noise: Any,
) -> tuple[Any, tf.Tensor, tf.Tensor]:
  """Solve noisy normal equations; see `PrivateItems.refined`."""
  del share, noise  # Each release stands for itself.
  packing = Packing(items.num_factors + 1)
  sums = tf.cast(sums, tf.float64)
  matrix = packing.unpack(sums[:, : packing.number]) / _MATRIX
  values, vectors = tf.linalg.eigh(matrix)
  values = tf.maximum(values, _FLOOR * stddev / _MATRIX)
  values += _LEAST + _RIDGE * stddev / _VECTOR
  # In the coordinates of the eigenvectors.
  right = sums[:, packing.number :, None] / _VECTOR
  right = tf.matmul(vectors, right, transpose_a=True)[..., 0]
  found = tf.linalg.matvec(vectors, right / values)
  found = tf.cast(found, item.dtype)
  new = collections.OrderedDict(state, estimate=found)
  return new, found, tf.zeros_like(found)
