"""Options of the ratings task: its file, its model, and what it writes."""

import dataclasses
from typing import ClassVar

from tasks import shared_options as shared
from tasks.errors import OptionError
from tasks.movielens.options import FactorizationOptions
from tasks.options import detail
from tasks.options import option
from tasks.options import Options

NAME = 'ratings'
REFUSE, DROP = 'refuse', 'drop'


@dataclasses.dataclass(frozen=True)
class Csv(Options):
  """Options of the ratings file and its columns."""

  title: ClassVar[str] = 'Task ratings'

  file: str | None = option(
    None,
    'CSV file of ratings: a line of column names, and a line a rating.',
    flag='csv',
    may_change=True,
  )
  user: str | None = option(
    None,
    'Column that says who rated; by default one with a usual name, such as '
    'user or userId.',
    flag='csv_user',
  )
  item: str | None = option(
    None,
    'Column that says what was rated; by default one such as item, movieId or '
    'film.',
    flag='csv_item',
  )
  rating: str | None = option(
    None,
    'Column of the ratings; by default one such as rating, score or stars.',
    flag='csv_rating',
  )
  time: str | None = option(
    None,
    'Column of numbers or dates that says when; by default one such as '
    'timestamp or date, or none if there is none.',
    flag='csv_time',
  )
  separator: str | None = option(
    None,
    'What stands between values, such as ; or tab; by default what the first '
    'line has most of.',
    flag='csv_separator',
  )
  missing: str = option(
    REFUSE,
    'What becomes of lines that lack a value: the run is refused with the '
    'number of the first one, or they are dropped and counted.',
    choices=(REFUSE, DROP),
    flag='csv_missing',
  )

  def __post_init__(self) -> None:
    """Raise an error for impossible separators."""
    super().__post_init__()
    separator = self.separator
    if separator is None or separator in ('tab', '\\t'):
      return
    if len(separator) != 1 or separator in '"\r\n':
      raise OptionError(
        f'--csv_separator={separator!s:.20}: give one character, or tab.'
      )


@dataclasses.dataclass(frozen=True)
class Ends(Options):
  """Options of the outputs after training; they change no number."""

  title: ClassVar[str] = 'Task ratings'

  top_n_csv: bool = detail(
    True,
    'When training has ended, write top_n.csv: the items that users have not '
    'rated and are expected to like best.',
    may_change=True,
  )
  top_n: int = option(
    10, 'How many items to recommend to a user.', at_least=1, may_change=True
  )
  top_n_user: str | None = detail(
    None, 'The only user in top_n.csv; by default it has all.', may_change=True
  )
  export_formats: tuple[str, ...] = option(
    shared.FORMATS,
    'When training has ended, write the model for devices to the folder '
    'export, as which files: saved_model, tflite; nothing for none.',
    may_change=True,
  )

  def __post_init__(self) -> None:
    """Raise an error for unknown formats."""
    super().__post_init__()
    for name in self.export_formats:
      if name not in shared.FORMATS:
        raise OptionError(
          f'--export_formats={",".join(self.export_formats)}: {name!r} is none '
          f'of {", ".join(shared.FORMATS)}.'
        )


@dataclasses.dataclass(frozen=True)
class RatingsOptions(FactorizationOptions):
  """Options of the task."""

  name: ClassVar[str] = NAME
  loader: ClassVar[str] = 'tasks.ratings.task:load'
  title: ClassVar[str] = 'Task ratings'
  flag_prefix: ClassVar[str] = 'ratings_'

  csv: Csv = Csv()
  min_per_user: int = shared.min_examples(2, at_least=2)
  min_per_item: int = option(
    1, 'Items with fewer ratings are left out.', at_least=1
  )
  num_factors: int = shared.num_factors(16)
  biases: bool = shared.biases(True)
  centred: bool = shared.centred(True)
  l2: float = shared.l2(0.05)
  clip_predictions: bool = shared.clip_predictions(True)
  ends: Ends = Ends()
