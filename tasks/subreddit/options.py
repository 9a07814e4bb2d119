"""Options of the tasks with documents by many authors."""

import dataclasses
from typing import ClassVar

from tasks import shared_options as shared
from tasks.errors import OptionError
from tasks.options import detail
from tasks.options import option
from tasks.options import Options
from tasks.shared_options import TaskOptions


@dataclasses.dataclass(frozen=True)
class DocumentSizes(Options):
  """Sizes of the model."""

  char_embedding: int = detail(
    16, "Length of a character's vector.", at_least=1
  )
  ngram_lengths: tuple[int, ...] = detail(
    (),
    'Also embed characters together with those before them, as n-grams of '
    'these lengths, such as 3,4.',
  )
  ngram_buckets: int = detail(
    8192, 'Rows of the table of n-grams of each length.', at_least=2
  )
  places_per_step: int = detail(
    1,
    'Characters that, by their maximum, are one step of the LSTM.',
    at_least=1,
  )
  lstm_units: int = shared.lstm_units(32)
  mlp_units: tuple[int, ...] = detail(
    (64,), 'Units of the hidden layers of the MLP, such as 64,32.'
  )
  user_embedding: int = detail(
    32,
    "Length of a user's vector; by default the paper's, 32, and 4 for the task "
    'sticker.',
    at_least=1,
    differs_by_task=True,
  )
  learned_default: bool = detail(
    False, 'Users start from a vector that all learn together.'
  )
  control_points: int = option(
    0,
    "Vectors that are added to a user's vector, each around its time in the "
    "user's history, so that users may change: 0, or 2 and more.",
    at_least=0,
  )
  place_dropout: float = detail(
    0.0, "Share of a text's characters dropped in training.", at_least=0
  )
  dropout: float = detail(
    0.0, "Share of a text's features dropped in training.", at_least=0
  )
  mean_of_places: bool = detail(
    False, 'Add the mean of all embedded characters to the features of a text.'
  )
  unknown_users: float = option(
    0.0,
    "Share of the documents that are trained on without the user's vector.",
    at_least=0,
  )

  def __post_init__(self) -> None:
    """Check that a model can have these sizes."""
    super().__post_init__()
    for name in ('mlp_units', 'ngram_lengths'):
      if min(getattr(self, name), default=1) < 1:
        raise OptionError(
          f'{self.argument(name)}: give whole numbers of at least 1.'
        )
    if not self.ngram_lengths:
      self.refuse_set(
        ('ngram_buckets',), 'there are no n-grams. Give ngram_lengths, too.'
      )
    if self.control_points == 1:
      raise OptionError(
        '--control_points=1: one point cannot say how a user changes between '
        'a beginning and an end. Give 0, or at least 2.'
      )
    for name in ('place_dropout', 'dropout', 'unknown_users'):
      share = getattr(self, name)
      if not 0 <= share < 1:
        raise OptionError(
          f'{self.argument(name)}={share}: give 0 or more, and less than 1.'
        )


@dataclasses.dataclass(frozen=True)
class DocumentOptions(TaskOptions):
  """Options of a document task; the filters of authors are the paper's."""

  title: ClassVar[str] = 'Tasks subreddit and sticker'
  loader: ClassVar[str] = 'tasks.subreddit.task:load'

  min_documents: int = shared.min_examples(150)
  max_documents: int | None = option(
    500,
    'Authors with more documents are left out; 0 for no limit.',
    at_least=1,
    for_none=0,
  )
  max_chars: int = detail(280, 'Documents are cut to this length.', at_least=1)
  documents_by_time: bool = option(
    False, 'Measure authors on their latest documents, not on random ones.'
  )
  held_out_share: float = option(
    0.0,
    'Share of the authors who take no part in training.',
    at_least=0,
    at_most=1,
  )
  num_support: int = detail(
    10, 'Documents that a held-out author learns from.', at_least=0
  )
  num_reserved: int = detail(
    40,
    'A held-out author is measured on the documents after this many.',
    at_least=0,
  )
  sizes: DocumentSizes = DocumentSizes()

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.num_reserved < self.num_support:
      raise OptionError(
        f'--set=num_reserved={self.num_reserved}: new authors learn from '
        f'{self.num_support} documents, so that only later ones can be '
        f'measured. Give at least {self.num_support}.'
      )
    if self.max_documents is not None and (
      self.max_documents < self.min_documents
    ):
      raise OptionError(
        f'--max_documents: no author has at most {self.max_documents} '
        f'documents and at least {self.min_documents}. Raise it, or lower '
        '--min_examples.'
      )


@dataclasses.dataclass(frozen=True)
class SubredditOptions(DocumentOptions):
  name: ClassVar[str] = 'subreddit'


@dataclasses.dataclass(frozen=True)
class StickerOptions(DocumentOptions):
  name: ClassVar[str] = 'sticker'

  sizes: DocumentSizes = DocumentSizes(user_embedding=4)
