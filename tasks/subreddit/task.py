"""Classification of short documents by many authors, as in the FURL paper.

`Subreddit` predicts the subreddit of a comment, `Sticker` whether a suggestion
after a message was clicked on (section 4.1). Authors are clients. Each author's
documents are divided, 80/10/10 as in the paper: test authors are seen in
training, test documents are not. Some authors can be held out entirely, to
measure newcomers with only a few documents.
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tasks.errors import DataError
from tasks.subreddit import data as subreddit_data
from tasks.subreddit import predictors as subreddit_predictors
from tasks.subreddit import synthetic as subreddit_synthetic
from tasks.subreddit.documents import DocumentTask
from tasks.subreddit.documents import Head
from tasks.subreddit.options import DocumentOptions
from tasks.subreddit.options import StickerOptions
from tasks.subreddit.options import SubredditOptions
from tasks.task import Data


class Subreddit(DocumentTask):
  """Prediction of a comment's subreddit, measured by accuracy."""

  name = SubredditOptions.name
  selection_metric = 'accuracy'
  learned_from_training: tuple[str, ...] = ('list of subreddits', 'vocabulary')
  attribute = 'most used subreddit'

  def _attribute_of(self, counts: np.ndarray) -> str:
    """Return the most frequent subreddit."""
    return self.documents.labels[counts.argmax()]

  @property
  def _head(self) -> Head:
    return Head(
      len(self.documents.labels),
      tf.TensorSpec([], tf.int32),
      tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      lambda: [tf.keras.metrics.SparseCategoricalAccuracy(name='accuracy')],
      subreddit_predictors.accuracies,
    )


class Sticker(DocumentTask):
  """Prediction of a user's clicks on suggestions, measured by ROC AUC."""

  name = StickerOptions.name
  selection_metric = 'auc'
  # FURL's label is a click; that of a stand-in may be an emoticon.
  attribute = 'share of label 1'

  def _attribute_of(self, counts: np.ndarray) -> str:
    """Return the share of documents of label 1, to one digit."""
    return f'{counts[1] / counts.sum():.1f}'

  @property
  def _head(self) -> Head:
    return Head(
      None,
      tf.TensorSpec([], tf.float32),
      tf.keras.losses.BinaryCrossentropy(from_logits=True),
      lambda: [tf.keras.metrics.AUC(from_logits=True, name='auc')],
      subreddit_predictors.aucs,
    )


def load(options: DocumentOptions, data: Data, seed: int) -> DocumentTask:
  """Load the documents and make the task.

  Of invented documents no author is left out.
  """
  task: type[DocumentTask] = Subreddit
  invent: Callable[[], subreddit_data.Documents] = subreddit_synthetic.comments
  if options.name == Sticker.name:
    task, invent = Sticker, subreddit_synthetic.messages
  if data.is_synthetic:
    return task(invent(), options, seed)
  if not data.data_dir:
    remedy = subreddit_data.REMEDY_NO_DATA.format(record='document')
    raise DataError(f'No data folder is named. {remedy}')
  documents = subreddit_data.load(
    options.name,
    data.data_dir,
    min_documents=options.min_documents,
    max_documents=options.max_documents,
    max_chars=options.max_chars,
  )
  return task(documents, options, seed)
