"""Columns of pandas data frames as arrays of examples' fields."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import difflib
import os
from typing import Any

from absl import logging
import numpy as np
import tensorflow as tf

from tff_partial.arguments import spelling
from tff_partial.data import examples
from tff_partial.data import lengths
from tff_partial.data.vocabularies import as_text
from tff_partial.data.vocabularies import check_told_apart
from tff_partial.data.vocabularies import Vocabulary
from tff_partial.data.vocabularies import VocabularyError

_DATES = 'mM'
_NUMBERS = 'biuf'

# Treatments of rows that lack a value.
REFUSE, DROP = 'refuse', 'drop'


@dataclasses.dataclass(frozen=True)
class Dropped:
  """Rows of a data frame that were dropped because they lacked values.

  Attributes:
    num_rows: Number of rows.
    lacking: Column to the number of these rows that lacked its value; a row may
      lack several.
    num_clients: Number of clients without other rows.
  """

  num_rows: int = 0
  lacking: Mapping[str, int] = dataclasses.field(default_factory=dict)
  num_clients: int = 0

  def __str__(self) -> str:
    columns = ', '.join(f'{n:,} no {c!r}' for c, n in self.lacking.items())
    said = f'Dropped {self.num_rows:,} rows that lack values: {columns}'
    if self.num_clients:
      said += f'; {self.num_clients:,} clients had no others'
    return said


def read_parquet(path: str | os.PathLike[str]) -> Any:
  """Read a Parquet file.

  Raises:
    ClientDataError: If it does not exist or is damaged, or no library that
      reads it is installed.
  """
  import pandas as pd  # Not a dependency of TFF.

  try:
    return pd.read_parquet(path)
  except ImportError as error:
    raise examples.ClientDataError(
      f'{path}: to read Parquet, pandas needs a library: `pip install pyarrow`.'
    ) from error
  except (OSError, ValueError) as error:
    raise examples.ClientDataError(
      f'{path}: the file cannot be read as Parquet: {error!s:.100}'
    ) from None


class FrameTable:
  """A data frame in which each row is an example of a client.

  Attributes:
    dropped: The rows that were dropped because they lacked values.
  """

  def __init__(
    self,
    frame: Any,
    client_id: str,
    columns: Iterable[str],
    missing: str = REFUSE,
  ):
    """Check the columns; REFUSE or DROP rows that lack a value in one."""
    if missing not in (REFUSE, DROP):
      raise examples.ClientDataError(
        f'missing={missing!r}: choose {REFUSE!r}, which names the first row '
        f'that lacks a value, or {DROP!r}, which drops such rows.'
      )
    if not (hasattr(frame, 'columns') and hasattr(frame, 'iloc')):
      raise examples.ClientDataError(
        f'Expected a pandas data frame, found a {type(frame).__name__}.'
      )
    self._frame = frame
    self._client_id = client_id
    given = [client_id, *columns]
    for column in given:
      if not isinstance(column, Hashable):
        raise examples.ClientDataError(
          f'Expected the name of a column, found a {type(column).__name__}. '
          'Make it a column of the data frame, and give its name.'
        )
    wanted = list(dict.fromkeys(given))
    found = list(frame.columns)
    absent = [column for column in wanted if column not in found]
    if absent:
      meant = difflib.get_close_matches(str(absent[0]), map(str, found), 1)
      hint = f' Did you mean {meant[0]!r}?' if meant else ''
      raise examples.ClientDataError(
        f'The data frame has no columns {absent}; it has {found}.{hint}'
      )
    for column in wanted:
      if found.count(column) > 1:
        raise examples.ClientDataError(
          f'The data frame has {found.count(column)} columns {column!r}. '
          'Rename all but one.'
        )
    if not len(frame):
      raise examples.ClientDataError(
        'The data frame has no rows. Give one with a row for each example.'
      )
    self.dropped = Dropped()
    if missing == DROP:
      self._drop_missing(wanted)
    for column in wanted:
      self._check_missing(column)

  def row(self, place: int) -> str:
    """Describe a row for messages: its label and its client."""
    client = self._frame[self._client_id].iloc[place]
    label = examples.shown(self._frame.index[place])
    return f'row {label} (client {str(client)!r})'

  def clients(self) -> tuple[np.ndarray, list[str]]:
    """Return the client number of each row, and the clients' ids."""
    try:
      codes, ids = self._frame[self._client_id].factorize(sort=True)
      # A column that lacked values has floats.
      names = [*map(as_text, ids)]
    except (TypeError, ValueError) as error:
      raise examples.ClientDataError(
        f'Column {self._client_id!r} holds values that can be no names of '
        'clients, such as lists or integers of thousands of digits. Give texts '
        'or numbers.'
      ) from error
    with _of_column(self._client_id):
      check_told_apart(ids)
    return codes, names

  def vocabularies(
    self,
    encode: str | Iterable[str] | Mapping[str, Vocabulary],
    named: Sequence[str],
  ) -> dict[str, Vocabulary]:
    """Return the vocabulary of each encoded column; make it if needed.

    Raises:
      ClientDataError: If it is not a `named` column, or no vocabulary, or if a
        column's values make none.
    """
    columns = [encode] if isinstance(encode, str) else list(encode)
    unread = [column for column in columns if column not in named]
    if unread:
      raise examples.ClientDataError(
        f'encode={columns}: {unread} are no columns of inputs, labels or '
        f'fields, which are {named}.'
      )
    if isinstance(encode, Mapping):
      for column, given in encode.items():
        spelling.check_kind(
          *(f'encode={{{column!r}: ...}}', given, Vocabulary),
          *('a `Vocabulary(values)`', examples.ClientDataError),
        )
      return dict(encode)
    made = {}
    for column in columns:
      with _of_column(column):
        made[column] = Vocabulary(self._frame[column])
    return made

  def times(self, column: str) -> np.ndarray:
    """Return numbers by which rows can be sorted."""
    array, kind = self._plain(column), self._frame[column].dtype
    is_other = getattr(kind, 'ordered', False) and (
      not kind.categories.is_monotonic_increasing
    )
    if is_other or array.dtype.kind not in _NUMBERS + _DATES:
      raise examples.ClientDataError(
        f'Column {column!r} holds {_kind_of(array)}, whose order need not be '
        'that of time. Convert it, for instance with '
        f'`pd.to_datetime(frame[{column!r}])`, and `dayfirst=True` where dates '
        'are like 22/09/2021.'
      )
    if array.dtype.kind == 'f' and not np.isfinite(array).all():
      place = int(np.flatnonzero(~np.isfinite(array))[0])
      raise examples.ClientDataError(
        f'Column {column!r}: {self.row(place)} has the time {array[place]}. '
        'Drop such rows, or repair them.'
      )
    return array

  def values(
    self, column: str, spec: tf.TensorSpec | None, vocabulary: Vocabulary | None
  ) -> np.ndarray:
    """Return a column's values, encoded or of a type that the field can take.

    Raises:
      ClientDataError: If the column's values do not fit.
    """
    if vocabulary is not None:
      return self._encoded(column, vocabulary)
    is_open = spec is not None and lengths.is_open(spec)
    array = self._plain(column, is_open)
    if spec is None:
      return array
    if array.dtype.kind in _DATES:
      if not spec.dtype.is_integer:
        raise examples.ClientDataError(
          f'Column {column!r} holds dates or times, where {spec.dtype.name} is '
          'read. Turn them into numbers, such as the days since a date.'
        )
      return array.astype(np.int64)
    if array.dtype.kind in 'OSU' and array.ndim == 1 and len(array):
      if isinstance(array[0], (str, bytes)) and spec.dtype != tf.string:
        raise examples.ClientDataError(
          f'Column {column!r} holds strings such as '
          f'{examples.shown(array[0])}, where {spec.dtype.name} is read. '
          f'Number them with `encode=[{column!r}]`; if they are numbers, '
          'convert them with '
          f'`pd.to_numeric(frame[{column!r}])`.'
        )
    lacked = column in self.dropped.lacking and array.dtype.kind == 'f'
    if lacked and spec.dtype.is_integer and (np.abs(array) < 2**53).all():
      # A column that lacked values has floats, of which none has a fraction.
      whole = array.astype(np.int64)
      return whole if (whole == array).all() else array
    return array

  def _drop_missing(self, columns: Sequence[str]) -> None:
    """Drop rows that lack a value, and log a warning."""
    frame = self._frame
    lacking = np.stack([frame[column].isna() for column in columns])
    is_whole = ~lacking.any(axis=0)
    if is_whole.all():
      return
    if not is_whole.any():
      raise examples.ClientDataError(
        f'Each of the {len(frame):,} rows lacks a value in one of the columns '
        f'{list(columns)}. Fill them, or read other columns.'
      )
    clients = frame[self._client_id]
    self._frame = frame[is_whole]
    self.dropped = Dropped(
      num_rows=int((~is_whole).sum()),
      lacking={
        column: int(count)
        for column, count in zip(columns, lacking.sum(axis=1), strict=True)
        if count
      },
      num_clients=int(
        clients.nunique() - self._frame[self._client_id].nunique()
      ),
    )
    logging.warning('%s', self.dropped)

  def _check_missing(self, column: str) -> None:
    missing = np.flatnonzero(self._frame[column].isna())
    if missing.size:
      raise examples.ClientDataError(
        f'Column {column!r} lacks {missing.size:,} of {len(self._frame):,} '
        f'values, the first in row '
        f'{examples.shown(self._frame.index[missing[0]])}. Drop '
        f'these rows, `missing={DROP!r}`, or fill them.'
      )

  def _plain(self, column: str, is_open: bool = False) -> np.ndarray:
    """Return a column as an array of a NumPy type, or of sequences."""
    series = self._frame[column]
    # Integers of thousands of digits stay objects, which are refused below.
    with contextlib.suppress(OverflowError):
      series = series.infer_objects()
    if hasattr(series, 'cat'):
      series = series.astype(series.cat.categories.dtype)
    kind = getattr(series.dtype, 'kind', '')
    if kind and kind in _DATES:
      # Values with a time zone are compared in UTC.
      found, rough = (series.to_numpy(f'{kind}8[{u}]') for u in ('ns', 's'))
      for place in np.flatnonzero(found.astype(rough.dtype) != rough)[:1]:
        raise examples.ClientDataError(
          f'Column {column!r}: {self.row(place)} holds {series.iloc[place]}, '
          'too far away for nanoseconds, which last until the year 2262. '
          'Repair or drop such rows.'
        )
      return np.asarray(found)
    if hasattr(series.dtype, 'numpy_dtype'):
      series = series.astype(series.dtype.numpy_dtype)
    try:
      array = np.asarray(series.infer_objects().to_numpy())
    except OverflowError as error:
      raise examples.ClientDataError(
        f'Column {column!r} holds numbers that are too large for any type of '
        'numbers. Drop their rows, or repair them.'
      ) from error
    if array.dtype == object and len(array) and np.ndim(array[0]):
      shapes = [np.shape(value) for value in array]
      others = [i for i, shape in enumerate(shapes) if shape != shapes[0]]
      if others and is_open:
        return array
      if others:
        raise examples.ClientDataError(
          f'Column {column!r}: {self.row(others[0])} holds an array of shape '
          f'{shapes[others[0]]}, other rows one of {shapes[0]}. Pad or cut '
          'them to one shape.'
        )
      array = np.stack(list(array))
    return array

  def _encoded(self, column: str, vocabulary: Vocabulary) -> np.ndarray:
    series = self._frame[column]
    with _of_column(column):
      ids = vocabulary.encode(series)
    unseen = np.flatnonzero(ids < 0)
    if unseen.size:
      raise examples.ClientDataError(
        f'Column {column!r}: {self.row(int(unseen[0]))} holds '
        f'{examples.shown(series.iloc[unseen[0]])}, which is not in the '
        f'vocabulary of {len(vocabulary):,} ids, like '
        f'{unseen.size - 1:,} more. Drop these '
        'rows, or train with a vocabulary that has an id for unseen values: '
        f'`encode={{{column!r}: Vocabulary(values, unseen=True)}}`.'
      )
    return ids


@contextlib.contextmanager
def _of_column(column: str) -> Iterator[None]:
  """Name the column whose values no vocabulary can take."""
  try:
    yield
  except VocabularyError as error:
    raise examples.ClientDataError(f'Column {column!r}: {error}') from None


def _kind_of(array: np.ndarray) -> str:
  if len(array):
    return f'{type(array[0]).__name__} such as {examples.shown(array[0])}'
  return str(array.dtype)
