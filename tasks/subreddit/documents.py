"""Shared parts of the tasks with documents by many authors."""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tasks import task
from tasks.errors import DataError
from tasks.files import text_encoding
from tasks.subreddit import data as subreddit_data
from tasks.subreddit import models as subreddit_models
from tasks.subreddit import parts as subreddit_parts
from tasks.subreddit.options import DocumentOptions
import tff_partial
from tff_partial.data import examples
from tff_partial.data import populations
from tff_partial.data import splits
from tff_partial.model import models
from tff_partial.tiers import GLOBAL

# Mark of documents to be measured, for `splits.by_mark`.
_MARK = 'is_query'
# Characters that are told apart, with padding and unknown ones.
_NUM_CHARACTERS = 128

# Name under which the result of all test documents is reported.
SEEN = 'seen'


class Head(NamedTuple):
  """Parts of a model that depend on the labels.

  Attributes:
    num_outputs: Number of classes, or None for one logit.
    label_spec: Spec of one label.
    loss: From labels and logits.
    metrics: Builds the metrics to report.
    without_text: Measures predictors that read no text.
  """

  num_outputs: int | None
  label_spec: tf.TensorSpec
  loss: tf.keras.losses.Loss
  metrics: Callable[[], Sequence[tf.keras.metrics.Metric]]
  without_text: Callable[..., dict[str, dict[str, float]]]


class DocumentTask(task.Task):
  """Authors as clients, their documents as examples.

  Attributes:
    documents: All documents.
    parts: Documents of each part, such as training.
    vocabulary: The characters, learned from the training documents.
  """

  name: str
  selection_metric: str
  higher_is_better = True
  learned_from_training: tuple[str, ...] = ('vocabulary',)
  own_weights = subreddit_models.LOCAL_WEIGHTS
  forms = (task.OWN, task.TABLE, task.NOBODY)

  def __init__(
    self,
    documents: subreddit_data.Documents,
    options: DocumentOptions,
    seed: int,
  ):
    self.documents = documents
    self.parts = subreddit_parts.divide(
      documents,
      by_time=options.documents_by_time,
      held_out_share=options.held_out_share,
      seed=seed,
    )
    train = self.parts[task.TRAIN]
    self.vocabulary = text_encoding.learn_vocabulary(
      documents.texts[train].tolist(), _NUM_CHARACTERS
    )
    self._texts = self.vocabulary.encode(
      documents.texts.tolist(), options.max_chars
    )
    self._options = options
    self._seed = seed

  def _build_model(self, user: str) -> models.PartialModel:
    return tff_partial.from_keras(
      functools.partial(
        subreddit_models.build_document_model,
        _NUM_CHARACTERS,
        self._options.max_chars,
        self._head.num_outputs,
        self._options.sizes,
        user=user,
        num_users=len(self.documents.authors),
      ),
      local=subreddit_models.LOCAL_WEIGHTS if user == task.OWN else None,
      loss=self._head.loss,
      metrics=self._head.metrics,
      labels=self._head.label_spec,
      seed=self._seed,
    )

  @property
  def validation(self) -> task.EvaluationClients:
    return task.EvaluationClients(task.VALIDATION, True)

  @property
  def tests(self) -> dict[str, task.EvaluationClients]:
    """Clients of the result: all authors, the mixed ones, and new ones."""
    options = self._options
    split = splits.first(options.num_support, options.num_reserved)
    found = {
      SEEN: task.EvaluationClients(task.TEST, True),
      subreddit_parts.MIXED: task.EvaluationClients(
        subreddit_parts.MIXED, True
      ),
      subreddit_parts.NEW: task.EvaluationClients(
        subreddit_parts.NEW, False, split
      ),
      subreddit_parts.NEW_MIXED: task.EvaluationClients(
        subreddit_parts.NEW_MIXED, False, split
      ),
    }
    return {
      name: who for name, who in found.items() if len(self.parts[who.part])
    }

  @property
  def attributes(self) -> dict[str, str]:
    rows = self.parts[task.TRAIN]
    counts = subreddit_data.label_counts(self.documents, rows)
    return {
      self.documents.authors[author]: self._attribute_of(counts[author])
      for author in np.unique(self.documents.author[rows])
    }

  def _attribute_of(self, counts: np.ndarray) -> str:
    """Return an author's attribute, from its documents by label, `[labels]`."""
    raise NotImplementedError

  @property
  def counts(self) -> dict[str, Any]:
    """Sizes of the data, and results of predictors without text."""
    return {
      'name': self.documents.name,
      **self.documents.describe(),
      **self.parts.describe(),
      'characters': len(self.vocabulary.characters),
      'without_text': self.from_labels_alone(
        self._options.num_support, self._options.num_reserved
      ),
    }

  def from_labels_alone(
    self, num_support: int, num_reserved: int
  ) -> dict[str, dict[str, float]]:
    """Measure predictors that read no text, see `subreddit_predictors`."""
    measured = {
      name: self.parts.after(who.part, 0 if who.seen else num_reserved)
      for name, who in self.tests.items()
    }
    known = self.parts[task.TRAIN]
    support = self.parts.first(subreddit_parts.NEW, num_support)
    return self._head.without_text(
      self.documents, known, np.concatenate([known, support]), measured
    )

  def clients(
    self, part: str, example_spec: examples.ExampleSpec
  ) -> populations.Population:
    """Pack the authors of one part as clients, by their names.

    With the mark `is_query` in the spec they have their training documents,
    too.
    """
    held = self.parts.of_authors(part)
    past = self.parts.of_authors(task.TRAIN) if _MARK in example_spec else {}
    if not held:
      raise DataError(
        f'{self.name}: the part {part!r} has no documents. Give more data, or '
        'hold out more authors for the parts of new ones.'
      )
    clients = {}
    for author, own in held.items():
      before = past.get(author, own[:0])
      clients[author] = self._fields(
        np.concatenate([before, own]), len(before), example_spec
      )
    return tff_partial.pack(clients, example_spec)

  def vectors_at_server(
    self, weights: tff.learning.models.ModelWeights
  ) -> dict[str, np.ndarray]:
    table = weights.trainable[GLOBAL].get(subreddit_models.TABLE_WEIGHTS)
    if table is None:
      return {}
    rows = {author: row for row, author in enumerate(self.documents.authors)}
    return {author: table[rows[author]] for author in self.attributes}

  def _fields(
    self, rows: np.ndarray, num_past: int, example_spec: examples.ExampleSpec
  ) -> dict[str, Any]:
    """Return the fields of some documents that the spec asks for.

    The first `num_past` of them are those to personalise on.
    """
    x: Any = self._texts[rows]
    if isinstance(example_spec['x'], Mapping):
      x = {subreddit_models.TEXT: x}
      if subreddit_models.USER in example_spec['x']:
        x[subreddit_models.USER] = self.documents.author[rows]
      if subreddit_models.WHEN in example_spec['x']:
        x[subreddit_models.WHEN] = self._when[rows]
    fields = {'x': x, 'y': self.documents.label[rows]}
    if 'time' in example_spec:
      fields['time'] = self.documents.time[rows]
    if _MARK in example_spec:
      is_query = np.arange(len(rows)) >= num_past
      fields[_MARK] = is_query.astype(np.int32)
    return fields

  @functools.cached_property
  def _when(self) -> np.ndarray:
    """Times in authors' histories, with new authors' reserve as known."""
    reserved = self.parts.first(subreddit_parts.NEW, self._options.num_reserved)
    known = np.concatenate([self.parts[task.TRAIN], reserved])
    return subreddit_parts.places_in_history(self.documents, known)

  @property
  def _head(self) -> Head:
    raise NotImplementedError
