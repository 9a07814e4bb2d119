"""Options of the next-word task: its data, vocabulary and model."""

import dataclasses
from typing import ClassVar

from tasks import shared_options as shared
from tasks.errors import OptionError
from tasks.options import detail
from tasks.options import option
from tasks.options import Options
from tasks.shared_options import Spent
from tasks.shared_options import TaskOptions
from tasks.shared_options import UNSEEN

LSTM, TRANSFORMER = 'lstm', 'transformer'


@dataclasses.dataclass(frozen=True)
class VocabularyOptions(Options):
  """Options that choose the words of the vocabulary."""

  title: ClassVar[str] = 'Task next_word'
  flag_prefix: ClassVar[str] = 'next_word_'

  vocabulary_size: int = option(
    1000, 'V, the number of words with an id of their own.', at_least=1
  )
  buckets: int = option(
    500,
    'Buckets for all other words, each of which is always in the same one.',
    at_least=1,
  )
  vocabulary_noise: float | None = option(
    None,
    'Choose the vocabulary by how many users have a word, with noise of this '
    'multiplier and a threshold, at a cost in epsilon; by default without.',
    at_least=0,
  )
  vocabulary_delta: float = detail(
    1e-7,
    'Probability with which a word that one user alone has may pass that '
    'threshold; a part of --delta.',
  )
  words_per_user: int = detail(
    100, 'The most words for which a user is counted there.', at_least=1
  )

  def __post_init__(self) -> None:
    """Raise an error for noise that would protect no one."""
    super().__post_init__()
    if self.vocabulary_noise == 0.0:
      raise OptionError(
        '--next_word_vocabulary_noise=0: without noise the threshold protects '
        'no one. Give more than 0, or leave the flag out.'
      )
    if not 0.0 < self.vocabulary_delta < 1.0:
      raise OptionError(
        f'--set=next_word_vocabulary_delta={self.vocabulary_delta}: give a '
        'probability above 0 and below 1.'
      )
    if not self.is_private:
      self.refuse_set(
        ('vocabulary_delta', 'words_per_user'),
        'the vocabulary is of exact counts. Give --next_word_vocabulary_noise, '
        'or leave it out.',
      )

  @property
  def is_private(self) -> bool:
    return self.vocabulary_noise is not None

  @property
  def spent(self) -> Spent:
    if self.vocabulary_noise is None:
      return Spent()
    return Spent((self.vocabulary_noise,), self.vocabulary_delta)


@dataclasses.dataclass(frozen=True)
class NextWordSizes(Options):
  """Architecture and sizes of the model."""

  title: ClassVar[str] = 'Task next_word'
  flag_prefix: ClassVar[str] = 'next_word_'

  architecture: str = shared.model(LSTM, choices=(LSTM, TRANSFORMER))
  embedding: int = option(
    32,
    "Length of a token's vector; of all vectors in a transformer.",
    at_least=1,
  )
  lstm_units: int = shared.lstm_units(128)
  projection: int = detail(
    32, 'Length of the projection that the output layer reads.', at_least=1
  )


@dataclasses.dataclass(frozen=True)
class NextWordOptions(TaskOptions):
  name: ClassVar[str] = 'next_word'
  loader: ClassVar[str] = 'tasks.next_word.task:load'
  releases: ClassVar[bool] = True
  title: ClassVar[str] = 'Task next_word'
  flag_prefix: ClassVar[str] = 'next_word_'

  corpus: str = shared.data_set('lean_chat')
  protocol: str = shared.protocol(UNSEEN)
  max_tokens: int = detail(
    20, 'The most tokens of a sentence; longer ones are cut.', at_least=1
  )
  min_sentences: int = shared.min_examples(2)
  max_sentences: int | None = shared.max_examples(128)
  max_users: int | None = shared.users(None)
  vocabulary: VocabularyOptions = VocabularyOptions()
  sizes: NextWordSizes = NextWordSizes()

  def __post_init__(self) -> None:
    """Refuse sizes that the architecture does not have."""
    super().__post_init__()
    if self.sizes.architecture == TRANSFORMER:
      self.sizes.refuse_set(
        ('lstm_units', 'projection'),
        'a transformer has no LSTM. Leave it out, or give --model=lstm.',
      )

  @property
  def spent(self) -> Spent:
    return self.vocabulary.spent
