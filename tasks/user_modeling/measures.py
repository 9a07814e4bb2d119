"""Metrics of user models, of answers and of users' characteristics.

In training there are `rmse`, `mae` and `accuracy`, and for two answers `auc`
with a thousand thresholds. Afterwards `measure` computes the exact `auc`, and
from the models of all clients the metrics that no client can compute alone:
`doa`, `ndcg`, `similarity`, and `accuracy_cut`, by cuts between answers that
validation records choose.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from sklearn import metrics
import tensorflow as tf

from tasks.user_modeling import cuts
from tff_partial.analysis import ranking
from tff_partial.analysis import similarity

_THRESHOLDS = 1000
# The scale of answers that are wrong or right.
_BINARY = (0.0, 1.0)
# Clients in Table 5 of the paper, those with the most records.
_LARGEST = 10


class Answers(NamedTuple):
  """Outputs of one client's model for some records.

  Attributes:
    client: The client.
    user: Numbers of the records' users, `[records]`.
    attributes: The attributes of their items, `[records, width]`; -1 pads.
    answer: The users' answers, `[records]`.
    prediction: The model's predictions, `[records]`.
    hidden: Hidden characteristics of its users, `[users, attributes]`, by
      suffix of the metrics' names.
    public: Its public components, `[attributes, size]`, by name.
    num_records: Total number of the client's records.
    validation: Counts of its validation records, by `cuts.histogram`.
  """

  client: str
  user: np.ndarray
  attributes: np.ndarray
  answer: np.ndarray
  prediction: np.ndarray
  hidden: Mapping[str, np.ndarray]
  public: dict[str, np.ndarray]
  num_records: int
  validation: np.ndarray


def is_right(
  scale: tuple[float, float],
) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
  """Make a function that checks predictions.

  A prediction is right if the nearest answer on the scale, of whole numbers, is
  the true one; halfway between two the lower one counts as the nearest.
  """
  low, high = scale

  def compare(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    nearest = tf.clip_by_value(tf.math.ceil(predictions - 0.5), low, high)
    return tf.reduce_all(tf.equal(nearest, labels), -1)

  return compare


class ClippedAUC(tf.keras.metrics.AUC):
  """AUC by thresholds, of predictions clipped to [0, 1]."""

  def update_state(
    self, y_true: Any, y_pred: Any, sample_weight: Any = None
  ) -> Any:
    return super().update_state(
      y_true, tf.clip_by_value(y_pred, 0.0, 1.0), sample_weight
    )


def build_metrics(scale: tuple[float, float]) -> list[Any]:
  right = is_right(scale)

  def accuracy(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    return tf.cast(right(labels, predictions), tf.float32)

  found = [
    tf.keras.metrics.RootMeanSquaredError(name='rmse'),
    tf.keras.metrics.MeanAbsoluteError(name='mae'),
    accuracy,
  ]
  if scale == _BINARY:
    found.append(ClippedAUC(num_thresholds=_THRESHOLDS, name='auc'))
  return found


def measure(
  clients: Iterable[Answers], scale: tuple[float, float], num_attributes: int
) -> dict[str, float]:
  """Measure the models of all clients together.

  DOA (Eq. 9) and NDCG (Eq. 10) compare hidden characteristics only with the
  answers to the given records, and with their predictions. DOA compares pairs
  of users of two clients. Pairs with the same mean answer count half, so that
  chance is one half for any number of answers, and gains of NDCG are above
  0. With `_printed` both are as in the paper, where such pairs count as
  disagreeing, and gains have any sign.

  Args:
    clients: Outputs of each client's model, one after another.
    scale: The lowest and the highest answer.
    num_attributes: Number of attributes.

  Returns:
    `accuracy_cut`; the exact `auc` if there are two answers; `doa` and `ndcg`
    for each kind of hidden characteristics, if models have any; `similarity`
    (Eq. 11) of the ten largest clients, the mean over public components of
    attributes, if there are any.
  """
  held = list(clients)
  answer, prediction = (
    np.concatenate([[], *(getattr(each, name) for each in held)])
    for name in ('answer', 'prediction')
  )
  chosen = cuts.choose(np.sum([each.validation for each in held], axis=0))
  found = {'accuracy_cut': cuts.accuracy(answer, prediction, chosen, scale)}
  if scale == _BINARY:
    found['auc'] = exact_auc(answer, prediction)
  largest = sorted(held, key=lambda each: -each.num_records)[:_LARGEST]
  return {**found, **_ranked(held, num_attributes), **_similarity(largest)}


def exact_auc(answer: np.ndarray, prediction: np.ndarray) -> float:
  """Compute the area under the ROC curve of all clients together.

  The area is NaN if one of the answers is missing, or a prediction is not
  finite.
  """
  if len(set(answer)) < 2 or not np.isfinite(prediction).all():
    return float('nan')
  return float(metrics.roc_auc_score(answer, prediction))


def _ranked(
  clients: Sequence[Answers], num_attributes: int
) -> dict[str, float]:
  """Return DOA and NDCG of the users who have a record.

  They are NaN for models that are not finite.
  """
  names: list[str] = []
  means: list[tuple[np.ndarray, ...]] = []
  hidden: dict[str, list[np.ndarray]] = {}
  for each in clients:
    if not len(each.user):
      continue
    own, number = np.unique(each.user, return_inverse=True)
    names += [each.client] * len(own)
    for way, of_users in each.hidden.items():
      hidden.setdefault(way, []).append(of_users[own])
    means.append(
      tuple(
        ranking.mean_answers(
          number, each.attributes, answer, len(own), num_attributes
        )
        for answer in (each.answer, each.prediction)
      )
    )
  found = {}
  for way, parts in hidden.items():
    of_all = np.concatenate(parts)
    given, predicted = map(np.concatenate, zip(*means, strict=True))
    for name, printed in (('', False), ('_printed', True)):
      doa = ranking.degree_of_agreement(
        of_all, given, names, tie=0.0 if printed else 0.5
      )
      gain = ranking.ndcg(of_all, predicted, shift=not printed)
      found.update({f'doa{name}{way}': doa, f'ndcg{name}{way}': gain})
  return found


def _similarity(clients: Sequence[Answers]) -> dict[str, float]:
  """Compute Eq. 11, the mean over the public components."""
  if not clients or not clients[0].public:
    return {}
  values = [
    similarity.dissimilarity(
      {each.client: each.public[name] for each in clients}
    )
    for name in clients[0].public
  ]
  return {'similarity': float(np.mean(values))}
