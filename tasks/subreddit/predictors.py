"""Baseline predictors that read no text.

They know the labels of some documents and all authors: the largest class, each
author's most frequent class, and the class of the author's document nearest in
time. A model that reads is only worth its cost if it beats them. For a label of
0 or 1, which is ranked, they are a constant, each author's share of ones, and
the label nearest in time.
"""

from collections.abc import Callable, Mapping

import numpy as np
from sklearn import metrics

from tasks.subreddit import data as subreddit_data

LARGEST_CLASS, AUTHOR_MAJORITY = 'largest_class', 'author_majority'
AUTHOR_NEAREST = 'author_nearest_in_time'


def accuracies(
  documents: subreddit_data.Documents,
  known: np.ndarray,
  own: np.ndarray,
  parts: Mapping[str, np.ndarray],
) -> dict[str, dict[str, float]]:
  """Measure the accuracy of the predictors.

  For an author without known documents, or with several equally frequent
  classes, the class is the one of these that is most frequent overall.

  Args:
    documents: All documents.
    known: Positions of the documents that determine the sizes of classes.
    own: Positions of the documents that determine each author's classes.
    parts: Positions of documents by name of the part.

  Returns:
    Accuracy by predictor, then part; parts without documents are left out.
  """
  sizes = np.bincount(documents.label[known], minlength=len(documents.labels))
  share = sizes / (sizes.sum() + 1.0)  # Sum below 1, to break ties.
  counts = subreddit_data.label_counts(documents, own)
  return _measured(
    documents,
    own,
    parts,
    float(sizes.argmax()),
    (counts + share).argmax(axis=1),
    lambda labels, predicted: (predicted == labels).mean(),
    1,
  )


def aucs(
  documents: subreddit_data.Documents,
  known: np.ndarray,
  own: np.ndarray,
  parts: Mapping[str, np.ndarray],
) -> dict[str, dict[str, float]]:
  """Measure the predictors' area under the ROC curve.

  An author's share of ones includes the overall share as one more document,
  which is the only one for an author without known documents. Arguments are
  those of `accuracies`, with labels of 0 and 1.

  Returns:
    Area by predictor, then part; parts with only one label are left out.
  """
  overall = float(documents.label[known].mean())
  counts = subreddit_data.label_counts(documents, own)
  shares = (counts[:, 1] + overall) / (counts.sum(axis=1) + 1)
  return _measured(
    documents, own, parts, overall, shares, metrics.roc_auc_score, 2
  )


def _measured(
  documents: subreddit_data.Documents,
  own: np.ndarray,
  parts: Mapping[str, np.ndarray],
  overall: float,
  of_author: np.ndarray,
  measure: Callable[[np.ndarray, np.ndarray], float],
  least_labels: int,
) -> dict[str, dict[str, float]]:
  """Measure predictions for all, for an author, and of the nearest document."""
  predicted = {
    LARGEST_CLASS: np.full(len(documents), overall),
    AUTHOR_MAJORITY: of_author[documents.author],
    AUTHOR_NEAREST: _of_nearest(documents, own, overall),
  }
  return {
    name: {
      part: float(measure(documents.label[rows], values[rows]))
      for part, rows in parts.items()
      if len(np.unique(documents.label[rows])) >= least_labels
    }
    for name, values in predicted.items()
  }


def _of_nearest(
  documents: subreddit_data.Documents, own: np.ndarray, otherwise: float
) -> np.ndarray:
  """Return the label of each author's known document nearest in time.

  Of two equally near ones the earlier counts. For authors without known
  documents it is `otherwise`.
  """
  labels = np.full(len(documents), otherwise)
  best = np.full(len(documents), np.inf)
  known = np.sort(own)
  place = np.searchsorted(known, np.arange(len(documents)), side='right')
  for neighbour in (place - 1, place):
    exists = (neighbour >= 0) & (neighbour < len(known))
    row = np.append(known, 0)[np.where(exists, neighbour, 0)]
    exists &= documents.author[row] == documents.author
    distance = np.where(exists, abs(documents.time[row] - documents.time), best)
    labels = np.where(distance < best, documents.label[row], labels)
    best = np.minimum(best, distance)
  return labels
