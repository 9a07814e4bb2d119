"""Next-word prediction by many authors: section 5.1.2 of the FedRecon paper.

Authors are clients, their sentences examples. A model predicts each next token
of a sentence. Words outside the vocabulary share buckets, whose vectors are
local in FedRecon: each client reconstructs them (Singhal et al., NeurIPS 2021).

Measured authors did not train, as in the paper, or they train on their older
sentences and are measured on newer ones. The paper uses Stack Overflow; any
sentences with authors can replace it.
"""

from collections.abc import Collection
import dataclasses
import functools
from typing import Any

import tensorflow as tf

from tasks import task
from tasks.next_word import clients as clients_lib
from tasks.next_word import corpora
from tasks.next_word import losses
from tasks.next_word import metrics
from tasks.next_word import models as next_word_models
from tasks.next_word import parts as parts_lib
from tasks.next_word import private_words
from tasks.next_word import sentences as sentences_lib
from tasks.next_word import synthetic
from tasks.next_word import words as words_lib
from tasks.next_word.options import NextWordOptions
from tasks.next_word.options import VocabularyOptions
import tff_partial
from tff_partial import random_bits
from tff_partial.data import examples
from tff_partial.data import splits
from tff_partial.model import models


class NextWord(task.MeasuredByProtocol):
  """Authors as clients, their sentences as examples.

  Attributes:
    sentences: The corpus.
    parts: Authors and sentences of each part.
    words: The vocabulary.
  """

  name = NextWordOptions.name
  selection_metric = 'accuracy'
  higher_is_better = True
  predicts_tokens = True
  # Buckets with local vectors, or shared ones.
  forms = (task.OWN, task.NOBODY, task.FEATURES)

  def __init__(
    self,
    sentences: sentences_lib.Sentences,
    options: NextWordOptions,
    seed: int,
    release: task.Release = task.Release(),
  ):
    """Divide the sentences and learn the vocabulary."""
    self.sentences = sentences
    self.protocol = options.protocol
    self.parts = (
      parts_lib.divide_sentences(sentences)
      if self.protocol == task.SEEN
      else parts_lib.divide_users(sentences, seed=seed)
    )
    training = self.parts[task.TRAIN]
    ends = sentences.bounds[1:].copy()
    ends[training.users] = training.newer[:, 1]
    self._known = dataclasses.replace(sentences, ends=ends)
    self.words = self._learned(options.vocabulary, training.users, release)
    self.learned_from_training: tuple[str, ...] = (
      () if options.vocabulary.is_private else ('vocabulary',)
    )
    self._clients = clients_lib.Authors(sentences, self.words, self.parts)
    self._options = options
    self._seed = seed
    self._is_released = options.vocabulary.is_private and (
      release.kept is not None or release.keep is not None
    )

  def _learned(
    self,
    options: VocabularyOptions,
    users: Collection[int],
    release: task.Release,
  ) -> words_lib.Words:
    """Choose the words of the vocabulary, in private runs with noise."""
    size, buckets = options.vocabulary_size, options.buckets
    if options.vocabulary_noise is None:
      counts = words_lib.count(self._known, users)
      return words_lib.choose(counts, self._known, size, buckets)
    mechanism = private_words.NoisyThreshold(
      options.words_per_user, options.vocabulary_noise, options.vocabulary_delta
    )
    if release.kept is None and release.keep is None:
      mechanism.check(release.simulated_population or len(users))
      return private_words.stand_in(size, buckets)
    return private_words.learn(
      self._known,
      users,
      size,
      mechanism,
      buckets=buckets,
      noise_seed=release.noise_seed,
      simulated_users=release.simulated_population,
      kept=release.kept,
      keep=release.keep,
    )

  @property
  def released(self) -> str:
    if not self._is_released:
      return ''
    words = self.words.words
    return f'{len(words)} words ({random_bits.derive(*words).tobytes().hex()})'

  def released_anew(self, release: task.Release) -> 'NextWord':
    return NextWord(self.sentences, self._options, self._seed, release)

  def _evaluation_clients(self, part: str) -> task.EvaluationClients:
    """Return clients to be measured on the same sentences by all algorithms."""
    if self.protocol == task.SEEN:
      mark = splits.by_mark(clients_lib.IS_QUERY)
      return task.EvaluationClients(part, True, mark)
    return task.EvaluationClients(part, False, splits.halves())

  @property
  def counts(self) -> dict[str, Any]:
    return {
      'corpus': self.sentences.name,
      'users': len(self.sentences.authors),
      'sentences': len(self.sentences),
      'left_out': dict(self.sentences.left_out),
      'vocabulary': len(self.words.words),
      **self.words.coverage(self._known, self.parts[task.TRAIN].users),
      **parts_lib.describe(self.parts),
    }

  def model_with_features(self, user: str) -> models.PartialModel:
    if user == task.OWN:
      return self._models(task.OWN, features=True)
    return self.model_with(task.FEATURES if user == task.NOBODY else user)

  def targets(self, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return labels, losses.is_target(self.words.tokens, labels)

  def _build_model(
    self, user: str, features: bool = False
  ) -> models.PartialModel:
    tokens, length = self.words.tokens, self._options.max_tokens
    return tff_partial.from_keras(
      functools.partial(
        next_word_models.build_next_word_model,
        tokens,
        length,
        self._options.sizes,
        features=features or user == task.FEATURES,
      ),
      local=next_word_models.BUCKET_LAYER if user == task.OWN else None,
      loss=losses.build_loss(tokens),
      metrics=functools.partial(metrics.build_metrics, tokens),
      labels=tf.TensorSpec([length], tf.int32),
      seed=self._seed,
    )

  def clients(
    self, part: str, example_spec: examples.ExampleSpec
  ) -> task.Clients:
    return self._clients.clients(part, example_spec)


def load(
  options: NextWordOptions, data: task.Data, seed: int, release: task.Release
) -> NextWord:
  """Read the sentences, learn the vocabulary and make the task.

  The folder of the data holds one with the corpus' name, or is that folder.
  """
  limits = sentences_lib.Limits(
    max_tokens=options.max_tokens,
    min_sentences=options.min_sentences,
    max_sentences=options.max_sentences,
    max_users=options.max_users,
    seed=seed,
  )
  if data.is_synthetic:
    found = synthetic.generate(limits=limits)
  else:
    found = corpora.load(
      options.corpus, data.data_dir, limits, download=data.download
    )
  return NextWord(found, options, seed, release)
