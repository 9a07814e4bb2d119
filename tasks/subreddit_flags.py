"""The flags of the tasks with documents, which share most of them.

Those that say where data come from are `DataFlags`, and the seed is the run's.
"""

from collections.abc import Callable, Sequence
import dataclasses

from absl import flags

from tasks import subreddit
from tasks import subreddit_models
from tasks.errors import OptionError

FLAGS = flags.FLAGS


class DocumentFlags:
  """The documents and the model; defined once, for both tasks."""

  def __init__(self) -> None:
    """Defines the flags."""
    options = subreddit.Options()
    sizes = options.sizes
    flags.DEFINE_integer(
      'num_subreddits',
      options.num_subreddits,
      'How many subreddits are classes, the largest ones.',
      lower_bound=1,
    )
    flags.DEFINE_integer(
      'min_documents',
      options.min_documents,
      'Authors with fewer documents are left out.',
      lower_bound=1,
    )
    flags.DEFINE_integer(
      'max_documents',
      options.max_documents,
      'Authors with more documents are left out; 0 for no limit.',
      lower_bound=0,
    )
    flags.DEFINE_integer(
      'max_chars',
      options.max_chars,
      'Documents are cut to this length.',
      lower_bound=1,
    )
    flags.DEFINE_integer(
      'vocabulary_size',
      options.vocabulary_size,
      'Characters that are told apart, with padding and unknown ones.',
      lower_bound=3,
    )
    flags.DEFINE_bool(
      'documents_by_time',
      options.by_time,
      'Measure authors on their latest documents, not on random ones.',
    )
    flags.DEFINE_float(
      'held_out_share',
      options.held_out_share,
      'Share of the authors who take no part in training.',
      lower_bound=0.0,
      upper_bound=1.0,
    )
    flags.DEFINE_integer(
      'num_support',
      options.num_support,
      'Documents that an author held out learns from.',
      lower_bound=0,
    )
    flags.DEFINE_integer(
      'num_reserved',
      options.num_reserved,
      'An author held out is measured on what comes after so many documents.',
      lower_bound=0,
    )
    flags.DEFINE_integer(
      'char_embedding',
      sizes.char_embedding,
      'Length of the vector of a character.',
      lower_bound=1,
    )
    flags.DEFINE_string(
      'ngram_lengths',
      _with_commas(sizes.ngram_lengths),
      'Characters are also embedded together with those before them, as '
      'n-grams of these lengths, such as 3,4.',
    )
    flags.DEFINE_integer(
      'ngram_buckets',
      sizes.ngram_buckets,
      'Rows of the table of n-grams of each length.',
      lower_bound=2,
    )
    flags.DEFINE_integer(
      'places_per_step',
      sizes.places_per_step,
      'How many characters, by their maximum, are one step of the LSTM.',
      lower_bound=1,
    )
    flags.DEFINE_integer(
      'lstm_units',
      sizes.lstm_units,
      'Units of the LSTM in each direction.',
      lower_bound=1,
    )
    flags.DEFINE_string(
      'mlp_units',
      _with_commas(sizes.mlp_units),
      'Units of the hidden layers of the MLP, such as 64,32.',
    )
    flags.DEFINE_integer(
      'user_embedding',
      None,
      "Length of a user's vector; by default the paper's, 32, and 4 for "
      'the task sticker.',
      lower_bound=1,
    )
    flags.DEFINE_bool(
      'learned_default',
      sizes.learned_default,
      'Users begin with a vector that all learn together.',
    )
    flags.DEFINE_integer(
      'control_points',
      sizes.control_points,
      "Vectors that are added to a user's, each around its time in the user's "
      'history, so that users may change: 0, or 2 and more.',
      lower_bound=0,
    )
    flags.DEFINE_float(
      'place_dropout',
      sizes.place_dropout,
      'Share of the places of a text that are dropped in training.',
      lower_bound=0.0,
    )
    flags.DEFINE_float(
      'dropout',
      sizes.dropout,
      'Share of what is said of a text that is dropped in training.',
      lower_bound=0.0,
    )
    flags.DEFINE_bool(
      'mean_of_places',
      sizes.mean_of_places,
      'The mean of all that is embedded is among what is said of a text.',
    )
    flags.DEFINE_float(
      'unknown_users',
      sizes.unknown_users,
      "Share of the documents that are trained on without the user's vector.",
      lower_bound=0.0,
    )

  def get(self, user_embedding: int) -> subreddit.Options:
    """Returns the options.

    Args:
      user_embedding: Length of a user's vector if no flag says another.
    """
    sizes = subreddit_models.Sizes(
      char_embedding=FLAGS.char_embedding,
      ngram_lengths=_whole_numbers('ngram_lengths'),
      ngram_buckets=FLAGS.ngram_buckets,
      places_per_step=FLAGS.places_per_step,
      lstm_units=FLAGS.lstm_units,
      mlp_units=_whole_numbers('mlp_units'),
      user_embedding=FLAGS.user_embedding or user_embedding,
      learned_default=FLAGS.learned_default,
      control_points=FLAGS.control_points,
      place_dropout=FLAGS.place_dropout,
      dropout=FLAGS.dropout,
      mean_of_places=FLAGS.mean_of_places,
      unknown_users=FLAGS.unknown_users,
    )
    return subreddit.Options(
      num_subreddits=FLAGS.num_subreddits,
      min_documents=FLAGS.min_documents,
      max_documents=FLAGS.max_documents or None,
      max_chars=FLAGS.max_chars,
      vocabulary_size=FLAGS.vocabulary_size,
      by_time=FLAGS.documents_by_time,
      held_out_share=FLAGS.held_out_share,
      num_support=FLAGS.num_support,
      num_reserved=FLAGS.num_reserved,
      sizes=sizes,
    )


@dataclasses.dataclass(frozen=True)
class TaskOfDocuments:
  """One of the tasks.

  Attributes:
    documents: The flags of both.
    load: Loads the task.
    user_embedding: Length of a user's vector in the paper, section 4.1.
  """

  documents: DocumentFlags
  load: Callable[..., subreddit.DocumentTask]
  user_embedding: int

  def get(self) -> subreddit.DocumentTask:
    """Loads the data and returns the task."""
    return self.load(
      data=FLAGS.data,
      data_dir=FLAGS.data_dir,
      seed=FLAGS.seed,
      options=self.documents.get(self.user_embedding),
    )


def document_tasks() -> dict[str, TaskOfDocuments]:
  """Defines the flags and returns both tasks by their names."""
  documents = DocumentFlags()
  return {
    subreddit.NAME: TaskOfDocuments(documents, subreddit.load, 32),
    subreddit.STICKER: TaskOfDocuments(documents, subreddit.load_sticker, 4),
  }


def _with_commas(numbers: Sequence[int]) -> str:
  return ','.join(map(str, numbers))


def _whole_numbers(name: str) -> tuple[int, ...]:
  text = FLAGS[name].value
  try:
    return tuple(int(number) for number in text.split(',') if text)
  except ValueError:
    raise OptionError(
      f'--{name}={text}: give whole numbers with commas between them, or '
      'nothing.'
    ) from None
