"""Next words of many authors: section 5.1.2 of the FedRecon paper.

Authors are clients, their sentences examples. A model predicts each next token
of a sentence. Words outside the vocabulary share buckets, whose vectors are
local in FedRecon: each client rebuilds what they mean to it (Singhal et al.,
NeurIPS 2021).

Those who are measured did not train, as in the paper, or they train on their
older sentences and are measured on newer ones. The paper's data are Stack
Overflow's; any sentences with authors can take their place.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, ClassVar

import tensorflow as tf

from tasks.errors import OptionError
from tasks.next_word import classes as classes_lib
from tasks.next_word import clients as clients_lib
from tasks.next_word import corpora
from tasks.next_word import metrics
from tasks.next_word import models as next_word_models
from tasks.next_word import parts as parts_lib
from tasks.next_word import sentences as sentences_lib
from tasks.next_word import synthetic
from tasks.next_word.vocabulary import Vocabulary
from tasks.options import option
from tasks.task import Clients
from tasks.task import Data
from tasks.task import EvaluationClients
from tasks.task import FEATURES
from tasks.task import NOBODY
from tasks.task import OWN
from tasks.task import PROTOCOLS
from tasks.task import Release
from tasks.task import SEEN
from tasks.task import Spent
from tasks.task import TaskOptions
from tasks.task import TEST
from tasks.task import TRAIN
from tasks.task import UNSEEN
from tasks.task import VALIDATION
import tff_partial
from tff_partial import random_bits
from tff_partial.data import examples
from tff_partial.data import splits
from tff_partial.model import models

NAME = 'next_word'


@dataclasses.dataclass(frozen=True)
class Options(TaskOptions):
  """What can be chosen about the task."""

  name: ClassVar[str] = NAME
  title: ClassVar[str] = 'Task next_word'

  corpus: str = option(
    corpora.LEAN_CHAT,
    f'Whose sentences: {", ".join(corpora.NAMES)}, or a file or folder of JSON '
    'lines with the fields author, time and text.',
    flag='corpus',
  )
  protocol: str = option(
    UNSEEN,
    'Whether those who are measured did not take part in training, or did so '
    'with their older sentences.',
    choices=PROTOCOLS,
  )
  max_tokens: int = option(
    20, 'Tokens of a sentence; longer ones are cut.', at_least=1
  )
  min_sentences: int = option(
    2, 'Authors with fewer sentences are left out.', at_least=1
  )
  max_sentences: int | None = option(
    128,
    'Sentences of an author, the first in time; 0 for all.',
    at_least=1,
    for_none=0,
  )
  max_users: int | None = option(
    None,
    'So many authors are drawn; 0, the default, for all.',
    at_least=1,
    for_none=0,
  )
  validation_share: float = option(
    0.1,
    "Share of the authors, or of each author's sentences, that choose the best "
    'round.',
  )
  test_share: float = option(0.2, 'The same, of those for tests.')
  vocabulary: Vocabulary = Vocabulary()
  sizes: next_word_models.Sizes = next_word_models.Sizes()

  def flag_prefix(self) -> str:
    """Begins the names of the flags."""
    return 'next_word_'

  @property
  def spent(self) -> Spent:
    """What a private run pays for the vocabulary."""
    return self.vocabulary.spent

  def load(
    self, data: Data, seed: int, release: Release = Release()
  ) -> 'NextWord':
    """Read the sentences, learns the vocabulary and makes the task.

    Args:
      data: Where they come from: the folder holds one with the corpus' name, or
        is it. Invented ones need no files.
      seed: The run's seed.
      release: How a vocabulary with noise is released.

    Raises:
      DataError: If the data are missing or damaged; says where and what to do.
      OptionError: If they cannot be divided as the options ask.
    """
    limits = sentences_lib.Limits(
      max_tokens=self.max_tokens,
      min_sentences=self.min_sentences,
      max_sentences=self.max_sentences,
      max_users=self.max_users,
      seed=seed,
    )
    if data.is_synthetic:
      found = synthetic.generate(limits=limits)
    else:
      found = corpora.load(
        self.corpus, data.data_dir, limits, download=data.download
      )
    return NextWord(found, self, seed, release)


class NextWord:
  """Authors as clients, their sentences as examples.

  Attributes:
    name: The task's name.
    sentences: The corpus.
    parts: Which authors and sentences train, and so on.
    words: The vocabulary.
    selection_metric: The metric that chooses the best round.
    higher_is_better: Whether a larger value of it is better.
    learned_from_training: What is computed of the training data without noise.
  """

  name = NAME
  selection_metric = 'accuracy'
  higher_is_better = True

  def __init__(
    self,
    sentences: sentences_lib.Sentences,
    options: Options,
    seed: int,
    release: Release = Release(),
  ):
    """Divides the sentences and learns the vocabulary.

    Args:
      sentences: A corpus.
      options: What can be chosen.
      seed: The run's seed: authors are divided by it, and the weights start
        from it.
      release: How a vocabulary with noise is released.

    Raises:
      OptionError: If the sentences cannot be divided so.
      DataError: If there is no word to choose.
    """
    shares = {
      'validation_share': options.validation_share,
      'test_share': options.test_share,
    }
    self.sentences = sentences
    self.parts = (
      parts_lib.divide_sentences(sentences, **shares)
      if options.protocol == SEEN
      else parts_lib.divide_users(sentences, **shares, seed=seed)
    )
    self._training_users = self.parts[TRAIN].users
    self.words = options.vocabulary.learn(
      sentences, self._training_users, release
    )
    self.learned_from_training: tuple[str, ...] = (
      () if options.vocabulary.mechanism else ('vocabulary',)
    )
    self._clients = clients_lib.Clients(sentences, self.words, self.parts)
    self._options = options
    self._seed = seed
    self._is_released = bool(options.vocabulary.mechanism) and (
      release.kept is not None or release.keep is not None
    )
    self._models: dict[tuple[str, bool], models.PartialModel] = {}

  @property
  def released(self) -> str:
    """The fingerprint of a vocabulary that was released with noise."""
    if not self._is_released:
      return ''
    words = self.words.words
    return f'{len(words)} words ({random_bits.derive(*words).tobytes().hex()})'

  def released_anew(self, release: Release) -> 'NextWord':
    """Make the task again, of the same sentences.

    Args:
      release: How a vocabulary with noise is released.
    """
    return NextWord(self.sentences, self._options, self._seed, release)

  @property
  def validation(self) -> EvaluationClients:
    """Who chooses the best round."""
    return self._measured(VALIDATION)

  @property
  def tests(self) -> dict[str, EvaluationClients]:
    """The authors that a result is about."""
    return {self._options.protocol: self._measured(TEST)}

  def _measured(self, part: str) -> EvaluationClients:
    """All algorithms are measured on the same sentences, the newer ones."""
    if self._options.protocol == SEEN:
      mark = splits.by_mark(clients_lib.IS_QUERY)
      return EvaluationClients(part, True, mark)
    return EvaluationClients(part, False, splits.halves())

  @property
  def counts(self) -> dict[str, Any]:
    """How much of everything there is, for the result."""
    return {
      'corpus': self.sentences.name,
      'users': len(self.sentences.authors),
      'sentences': len(self.sentences),
      'left_out': dict(self.sentences.left_out),
      'vocabulary': len(self.words.words),
      **self.words.coverage(self.sentences, self._training_users),
      **parts_lib.describe(self.parts),
    }

  def model_with(self, user: str) -> models.PartialModel:
    """Build the model.

    Args:
      user: OWN for buckets whose vectors are each client's own, NOBODY for
        buckets that all share, or FEATURES for these with features.

    Raises:
      OptionError: If it is another form.
    """
    if user == FEATURES:
      return self.model_with_features(NOBODY)
    return self._model(user, features=False)

  def model_with_features(self, user: str) -> models.PartialModel:
    """The same, whose outputs are a mapping of LOGITS and FEATURES.

    Args:
      user: OWN or NOBODY.

    Raises:
      OptionError: If it is another form.
    """
    return self._model(user, features=True)

  def targets(self, labels: tf.Tensor) -> classes_lib.Targets:
    """Which classes of the model are right.

    Args:
      labels: Ids of the next tokens, int32 `[batch, time]`.
    """
    return self._classes.targets(labels)

  @property
  def _classes(self) -> classes_lib.Classes:
    return classes_lib.Classes(self.words.tokens, self._options.sizes.output)

  def _model(self, user: str, *, features: bool) -> models.PartialModel:
    """One of the models, built once."""
    if user not in (OWN, NOBODY):
      raise OptionError(
        f'--user_form={user}: what users of the task {self.name} can have of '
        'their own are the vectors of words outside the vocabulary. Choose '
        'own, or nobody, for vectors that all share.'
      )
    if (user, features) not in self._models:
      self._models[user, features] = self._build_model(user, features)
    return self._models[user, features]

  def _build_model(self, user: str, features: bool) -> models.PartialModel:
    sizes = self._options.sizes
    tokens, length = self.words.tokens, self._options.max_tokens
    classes = self._classes
    loss = classes_lib.build_loss(classes)
    build_metrics: Callable[[], list[tf.keras.metrics.Metric]] = (
      functools.partial(metrics.build_metrics, classes)
    )
    if features:
      loss, build_metrics = next_word_models.of_logits(loss, build_metrics)
    return tff_partial.from_keras(
      functools.partial(
        next_word_models.build_next_word_model,
        tokens,
        length,
        sizes,
        features=features,
      ),
      local=next_word_models.BUCKET_LAYER if user == OWN else None,
      loss=loss,
      metrics=build_metrics,
      labels=tf.TensorSpec([length], tf.int32),
      seed=self._seed,
    )

  def clients(self, part: str, example_spec: examples.ExampleSpec) -> Clients:
    """Packs the clients of one part of the data, or reads them if many.

    Args:
      part: The part.
      example_spec: What is read of an example.
    """
    if self._clients.fits(part):
      return self._clients.pack(part, example_spec)
    return self._clients.reader(part, example_spec)
