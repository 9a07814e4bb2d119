"""Predictors that read no text, to compare with those that do.

They know the labels of some documents and who wrote what: the largest class,
each author's most frequent one, and that of the author's document which is
nearest in time. A model that reads is worth its price only as far as it is
better. For a label of 0 or 1, which is ranked, they are a constant, each
author's share of ones, and the label nearest in time.
"""

from collections.abc import Mapping

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
  """Measures the predictors' share of right classes.

  An author of whom nothing is known, or several classes equally often, gets
  the one of these that is largest among all that is known.

  Args:
    documents: All documents.
    known: Places of the documents that tell how large the classes are.
    own: Places of those that tell what their authors write.
    parts: Name of a part to the places of its documents.

  Returns:
    Predictor to part to accuracy; parts without documents are left out.
  """
  sizes = np.bincount(documents.label[known], minlength=len(documents.labels))
  share = sizes / (sizes.sum() + 1.0)  # Below 1 in all: for ties.
  counts = subreddit_data.label_counts(documents, own)
  predicted = {
    LARGEST_CLASS: np.full(len(documents), sizes.argmax()),
    AUTHOR_MAJORITY: (counts + share).argmax(axis=1)[documents.author],
    AUTHOR_NEAREST: _of_nearest(documents, own, float(sizes.argmax())),
  }
  return {
    name: {
      part: float((labels[rows] == documents.label[rows]).mean())
      for part, rows in parts.items()
      if len(rows)
    }
    for name, labels in predicted.items()
  }


def aucs(
  documents: subreddit_data.Documents,
  known: np.ndarray,
  own: np.ndarray,
  parts: Mapping[str, np.ndarray],
) -> dict[str, dict[str, float]]:
  """Measures the predictors' area under the ROC curve.

  An author's share of ones counts the share of all authors as one document
  more, which is all that there is for an author of whom nothing is known.

  Args:
    documents: All documents, with labels of 0 and 1.
    known: Places of the documents that tell the share of ones of all.
    own: Places of those that tell their authors' shares.
    parts: Name of a part to the places of its documents.

  Returns:
    Predictor to part to area; parts with one label alone are left out.
  """
  overall = float(documents.label[known].mean())
  counts = subreddit_data.label_counts(documents, own)
  shares = (counts[:, 1] + overall) / (counts.sum(axis=1) + 1)
  predicted = {
    LARGEST_CLASS: np.full(len(documents), overall),
    AUTHOR_MAJORITY: shares[documents.author],
    AUTHOR_NEAREST: _of_nearest(documents, own, overall),
  }
  return {
    name: {
      part: float(metrics.roc_auc_score(documents.label[rows], scores[rows]))
      for part, rows in parts.items()
      if len(set(documents.label[rows].tolist())) > 1
    }
    for name, scores in predicted.items()
  }


def _of_nearest(
  documents: subreddit_data.Documents, own: np.ndarray, otherwise: float
) -> np.ndarray:
  """The label of its author's known document nearest in time, of each document.

  Args:
    documents: All documents, sorted by author and time.
    own: Places of those that are known; of two equally near the earlier counts.
    otherwise: For documents of authors of whom nothing is known.

  Returns:
    `[documents]`.
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
