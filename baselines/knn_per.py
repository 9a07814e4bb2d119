"""kNN-Per: a shared model mixed with each client's nearest neighbours.

Marfoq et al., "Personalized Federated Learning through Local Memorization"
(ICML 2022), section 3. The model is trained by any other method, usually
FedAvg. Then each client stores the model's features phi(x_i) of its support
examples, and their classes y_i. For a new example x,

    p_kNN(y) ~ sum over the k nearest i of exp(-|phi(x) - phi(x_i)| / scale)
               [y_i = y],
    p(y) = mixing p_kNN(y) + (1 - mixing) p_model(y).

The model may have local weights: these are reconstructed before, as in
FedRecon, and then used for features and predictions.

Deviations: the share `mixing` is the same for all clients; in the paper each
tunes its own. Distances have a scale, which is 1 in the paper; the authors'
code uses squared distances divided by the number of features. All support
examples are stored. Neighbours as far as the k-th, up to rounding, also count,
so that the order of examples does not matter: for example, all first steps of
sentences have the same features.
"""

import math

import tensorflow as tf

from baselines import memories
from tff_partial import evaluation
from tff_partial.data import splits
from tff_partial.errors import SettingError
from tff_partial.model import models
from tff_partial.phases import Phase

# Farther than any distance.
_FAR = 1e38
# Distances with a smaller relative difference are equal, and so are points with
# a smaller distance relative to their size.
_ROUNDING = 1e-6


def build_knn_per_eval(
  model: models.PartialModel,
  *,
  features: str = 'features',
  logits: str = 'logits',
  targets: memories.TargetsFn = memories.classes_from_zero,
  num_neighbors: int | None = 10,
  mixing: float = 0.5,
  scale: float = 1.0,
  personalise: Phase | None = None,
  tune: Phase | None = None,
  split: splits.Split | None = None,
  measure_batch_size: int = 100,
) -> evaluation.Evaluation:
  """Build an evaluation with the model and nearest support examples.

  Clients without support examples are measured with the model alone.

  Args:
    model: A classifier whose outputs are a mapping with its features, float
      `[batch, ..., size]`, and its logits, `[batch, ..., classes]`. With an
      axis of time each step has its own neighbours.
    features: The name of the features.
    logits: The name of the logits.
    targets: (labels) -> correct classes, integers, and the mask of valid ones.
      By default labels are classes, and negative ones do not count.
    num_neighbors: k; None for all.
    mixing: lambda, the neighbours' share, from 0 to less than 1.
    scale: The distance at which a neighbour's weight falls to 1 / e.
    personalise, tune, split, measure_batch_size: As for
      `memories.memory_evaluation`.

  Example:
    >>> evaluation = baselines.build_knn_per_eval(named, num_neighbors=10)

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
    SettingError: If a number is invalid, or the model has no such
      outputs.
  """
  memories.check_mixing(mixing)
  if num_neighbors is not None and num_neighbors < 1:
    raise SettingError(
      f'num_neighbors={num_neighbors}: give at least 1, or None for all.'
    )
  if not 0.0 < scale < math.inf:
    raise SettingError(
      f'scale={scale}: distances are divided by it. Give a positive number.'
    )
  memories.check_output(model, 'features', features)

  def recall(found: tf.Tensor, memory: memories.Memory) -> memories.Votes:
    far = tf.where(memory.is_key, _distances(found, memory.keys), _FAR)
    near = tf.logical_and(_are_near(far, num_neighbors), memory.is_key)
    nearest = tf.reduce_min(far, -1, keepdims=True)
    # Relative to the nearest, which changes no share and never makes all zero.
    beyond = tf.where(near, far - nearest, 0.0)
    weights = tf.where(near, tf.exp(-beyond / scale), 0.0)
    return memories.Votes(weights, tf.fill(tf.shape(found)[:1], mixing))

  return memories.memory_evaluation(
    model,
    keys=lambda x, predict: predict()[features],
    recall=recall,
    logits=logits,
    targets=targets,
    personalise=personalise,
    tune=tune,
    split=split,
    measure_batch_size=measure_batch_size,
  )


def _distances(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
  """Return distances of rows: `[n, size]` and `[m, size]` to `[n, m]`.

  They are float32, and exactly 0 between equal rows. Matrix products are in
  float64: errors of float32 would be as large as small distances.
  """
  one, other = tf.cast(one, tf.float64), tf.cast(other, tf.float64)
  sizes = (
    tf.reduce_sum(tf.square(one), -1)[:, tf.newaxis]
    + tf.reduce_sum(tf.square(other), -1)[tf.newaxis]
  )
  squared = sizes - 2.0 * tf.matmul(one, other, transpose_b=True)
  is_zero = squared <= _ROUNDING**2 * sizes
  squared = tf.where(is_zero, tf.zeros_like(squared), squared)
  return tf.cast(tf.sqrt(squared), tf.float32)


def _are_near(far: tf.Tensor, number: int | None) -> tf.Tensor:
  """Return the mask of keys as near as the k-th nearest, `[n, keys]`."""
  if number is None:
    return tf.ones_like(far, tf.bool)
  # There may be fewer keys than k.
  padded = tf.pad(far, [[0, 0], [0, number]], constant_values=_FAR)
  nearest, _ = tf.math.top_k(-padded, number)
  return far <= -nearest[:, -1:] * (1.0 + _ROUNDING)
