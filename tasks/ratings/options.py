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
    'CSV file of ratings: a line of column names, then one rating per line.',
    flag='csv',
    may_change=True,
  )
  user: str | None = option(
    None,
    'Column with the user; by default one named like user or userId.',
    flag='csv_user',
  )
  item: str | None = option(
    None,
    'Column with the rated item; by default one such as item, movieId or film.',
    flag='csv_item',
  )
  rating: str | None = option(
    None,
    'Column with the rating; by default one such as rating, score or stars.',
    flag='csv_rating',
  )
  time: str | None = option(
    None,
    'Column with the time, as numbers or dates; by default one such as date.',
    flag='csv_time',
  )
  separator: str | None = option(
    None,
    'Character between values, such as ; or tab; by default the one that the '
    'first line has most of.',
    flag='csv_separator',
  )
  missing: str = option(
    REFUSE,
    'For lines that lack a value: refuse the run with the number of the first '
    'one, or drop and count them.',
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
    'After training, write top_n.csv: the best unrated items of each user.',
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
    'After training, export the model for devices to the folder export, in '
    'these formats: saved_model, tflite; empty for none.',
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
