"""Predictors that read no text, to compare with those that do.

They know the labels of some documents and who wrote what: the largest class,
and each author's most frequent one. A model that reads is worth its price only
as far as it is better. For a label of 0 or 1, which is ranked, they are a
constant and each author's share of ones.
"""

from collections.abc import Mapping

import numpy as np
from sklearn import metrics

from tasks import subreddit_data

LARGEST_CLASS, AUTHOR_MAJORITY = 'largest_class', 'author_majority'


def accuracies(
  documents: subreddit_data.Documents,
  known: np.ndarray,
  own: np.ndarray,
  parts: Mapping[str, np.ndarray],
) -> dict[str, dict[str, float]]:
  """Measures both predictors' share of right classes.

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
  share = sizes / (sizes.sum() + 1.0)  # Together below 1: they only break ties.
  counts = subreddit_data.label_counts(documents, own)
  predicted = {
    LARGEST_CLASS: np.full(len(documents.authors), sizes.argmax()),
    AUTHOR_MAJORITY: (counts + share).argmax(axis=1),
  }
  return {
    name: {
      part: float(
        (labels[documents.author[rows]] == documents.label[rows]).mean()
      )
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
  """Measures both predictors' area under the ROC curve.

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
    LARGEST_CLASS: np.full(len(documents.authors), overall),
    AUTHOR_MAJORITY: shares,
  }
  return {
    name: {
      part: float(
        metrics.roc_auc_score(
          documents.label[rows], scores[documents.author[rows]]
        )
      )
      for part, rows in parts.items()
      if len(set(documents.label[rows].tolist())) > 1
    }
    for name, scores in predicted.items()
  }
