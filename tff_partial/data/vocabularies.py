"""Vocabularies: mappings between ids and values, such as items' names."""

from collections.abc import Iterable, Mapping
import contextlib
import functools
import json
import math
import numbers
import os
import pathlib
from typing import Any, Self

from absl import logging
import numpy as np

from tff_partial import errors
from tff_partial.arguments import spelling

# File of the vocabularies of a run or an export, in its folder.
FILE = 'vocabularies.json'


class VocabularyError(errors.UserError, ValueError):
  """Raised for values that a vocabulary cannot encode, keep or read."""


def is_missing(value: Any) -> bool:
  """Return true for a value that pandas or NumPy treat as missing."""
  if value is None or type(value).__name__ == 'NAType':
    return True
  return bool(value != value)


def check_told_apart(values: Iterable[Any]) -> None:
  """Refuse floats so large that each stands for several integers."""
  for value in values:
    if isinstance(value, float) and abs(value) >= 2**53:
      raise VocabularyError(
        f'{value!r:.40} may stand for several integers: columns that lack '
        'values are read as floats. Read this one as text, `dtype=str`.'
      )


def _no_value(error: TypeError) -> VocabularyError:
  """Make the error for values that cannot be numbered, such as lists."""
  return VocabularyError(
    f'A vocabulary takes values that are texts or numbers ({error}). Turn each '
    'list into a text, for instance by `str`, or into numbers without encoding.'
  )


def as_text(value: Any) -> str:
  """Return a value as text, the same for 1, 1.0 and '1'."""
  if isinstance(value, np.generic):
    value = value.item()
  if isinstance(value, float) and value.is_integer():
    value = int(value)
  return str(value)


class Vocabulary:
  """A numbering of values from 0, in their order.

      items = Vocabulary(frame['item'])
      tf.keras.layers.Embedding(len(items), 16)
      items.encode(['Alien', 'Heat'])
      items.decode([17, 4])

  With `unseen=True` id 0 is a row like any other, as with one out-of-vocabulary
  index of Keras's `StringLookup`. It keeps its first values unless training
  examples name it, and `top_n` never returns it.

  Attributes:
    values: The distinct values, in the order of their ids.
    unseen: True if id 0 is reserved for all other values, so that ids of
      `values` start from 1.
  """

  def __init__(self, values: Iterable[Any], *, unseen: bool = False):
    """Collect the distinct values.

    Args:
      values: Values of one type; a column of a data frame, for instance.
      unseen: True to reserve id 0 for all other values.

    Raises:
      VocabularyError: If there are no values, or some are missing, lists, or
        of different types.
    """
    try:
      distinct = set(values)
    except TypeError as error:
      raise _no_value(error) from None
    if not distinct or any(map(is_missing, distinct)):
      raise VocabularyError(
        'A vocabulary takes values of which none is missing, at least one. '
        'Drop or fill missing values first.'
      )
    check_told_apart(distinct)
    try:
      self.values = tuple(sorted(distinct))
    except TypeError:
      kinds = sorted({type(value).__name__ for value in distinct})
      raise VocabularyError(
        f'A vocabulary takes values of one type, found {kinds}. Convert them, '
        'for instance by `.astype(str)` of the column of a data frame.'
      ) from None
    self.unseen = unseen

  def __len__(self) -> int:
    """Return the number of ids."""
    return len(self.values) + self.unseen

  def __eq__(self, other: object) -> bool:
    return (
      isinstance(other, Vocabulary)
      and self.values == other.values
      and self.unseen == other.unseen
    )

  def __hash__(self) -> int:
    return hash((self.values, self.unseen))

  def __repr__(self) -> str:
    shown = [repr(value) for value in self.values[:3]]
    if len(self.values) > 3:
      shown.append('...')
    unseen = ', unseen=True' if self.unseen else ''
    return f'Vocabulary of {len(self):,} ids ({", ".join(shown)}{unseen})'

  @functools.cached_property
  def _id_of(self) -> dict[Any, int]:
    return {v: i for i, v in enumerate(self.values, int(self.unseen))}

  def encode(self, values: Iterable[Any]) -> np.ndarray:
    """Return the ids of values, int64; -1 for a value without one.

    Raises:
      VocabularyError: For a text where values are numbers, for anything else
        where they are texts, such as bytes or dates, and for lists.
    """
    values, other = list(values), 0 if self.unseen else -1
    check_told_apart(values)
    try:
      ids = np.array([self._id_of.get(v, other) for v in values], np.int64)
    except TypeError as error:
      raise _no_value(error) from None
    is_text = isinstance(self.values[0], str)
    for place in np.flatnonzero(ids == other):
      value = values[place]
      # None and NA count as unseen.
      if isinstance(value, str) != is_text and (
        isinstance(value, numbers.Number) or not is_missing(value)
      ):
        raise VocabularyError(
          f'{value!r:.40} is a {type(value).__name__}, but the values of the '
          f'vocabulary are like {self.values[0]!r:.40}. Convert one of them.'
        )
    return ids

  def decode(self, ids: Iterable[int]) -> list[Any]:
    """Return the values of ids; None for the id of unseen values.

    Raises:
      VocabularyError: For an id out of range.
    """
    decoded = []
    for number in ids:
      if not 0 <= number < len(self) or number != int(number):
        raise VocabularyError(
          f'There is no id {number}; ids are 0 to {len(self) - 1}.'
        )
      place = int(number) - self.unseen
      decoded.append(None if place < 0 else self.values[place])
    return decoded

  def to_json(self) -> dict[str, Any]:
    """Convert the vocabulary to values that JSON can hold.

    Returns:
      `values`, in the order of their ids, and `unseen`, the id of all other
      values, or None. The first of `values` has the id 0 or, if that is
      `unseen`, 1.

    Raises:
      VocabularyError: If values are neither strings nor integers or finite
        floats, such as dates.
    """
    return {
      'values': [_for_json(value) for value in self.values],
      'unseen': 0 if self.unseen else None,
    }

  @classmethod
  def from_json(cls, described: Any) -> Self:
    """Make a vocabulary from the result of `to_json`.

    Raises:
      VocabularyError: If it is something else.
    """
    if isinstance(described, Mapping):
      values, unseen = described.get('values'), described.get('unseen')
      if isinstance(values, list) and unseen in (0, None):
        with contextlib.suppress(VocabularyError):
          made = cls(map(_for_json, values), unseen=unseen is not None)
          if list(made.values) == values:
            return made
    raise VocabularyError(
      f'This describes no vocabulary: {described!r:.80}. It takes distinct '
      '`values` in their order, and `unseen`, 0 or null; `vocabularies.save` '
      'writes them.'
    )


def save(
  vocabularies: Mapping[str, Vocabulary], folder: str | os.PathLike[str]
) -> pathlib.Path:
  """Write the vocabularies of columns to `vocabularies.json` in a folder.

  Returns:
    The file, which is replaced if it exists.

  Raises:
    VocabularyError: If JSON cannot hold a value; names the column.
  """
  path = pathlib.Path(folder) / FILE
  described = json.dumps(describe(vocabularies), indent=2) + '\n'
  # An interruption leaves the old file or the new one.
  unfinished = path.with_name(f'{FILE}.tmp')
  unfinished.write_text(described, encoding='utf-8')
  os.replace(unfinished, path)
  return path


def keep(
  vocabularies: Mapping[str, Vocabulary],
  folder: str | os.PathLike[str],
  *,
  goes_on: bool,
) -> None:
  """Keep a run's vocabularies in the folder of its results.

  If JSON cannot hold one of them, none is kept, with a warning.

  Args:
    vocabularies: Column to vocabulary; if empty, nothing is written.
    folder: The run's folder, which is created if needed.
    goes_on: True if the run is resumed, so that they must match the old ones.

  Raises:
    VocabularyError: If they do not match.
  """
  path = pathlib.Path(folder)
  if not vocabularies:
    return
  # As in the file, where a column of number 1 is '1'.
  by_name = {str(column): known for column, known in vocabularies.items()}
  if goes_on and (path / FILE).exists() and load(path) != by_name:
    raise VocabularyError(
      f'{path}: the run in this folder has other vocabularies. Encode as it '
      'did, by those in its vocabularies.json, or choose another folder.'
    )
  path.mkdir(parents=True, exist_ok=True)
  try:
    save(vocabularies, path)
  except VocabularyError as error:
    logging.warning('The vocabularies are not kept in %s. %s', path, error)


def describe(vocabularies: Mapping[str, Vocabulary]) -> dict[str, Any]:
  """Return the vocabularies of several columns, as `save` writes them.

  Raises:
    VocabularyError: If JSON cannot hold a value; names the column.
  """
  spelling.check_kind(
    *('vocabularies', vocabularies, Mapping),
    'a mapping from column to `Vocabulary`, such as `clients.vocabularies`',
    VocabularyError,
  )
  described = {}
  for column, vocabulary in vocabularies.items():
    spelling.check_kind(
      *(f'vocabularies[{column!r}]', vocabulary, Vocabulary),
      *('a `Vocabulary(values)`', VocabularyError),
    )
    try:
      described[str(column)] = vocabulary.to_json()
    except VocabularyError as error:
      raise VocabularyError(f'Column {column!r}: {error}') from None
  return described


def load(folder: str | os.PathLike[str]) -> dict[str, Vocabulary]:
  """Read the vocabularies that a run or an export wrote to its folder.

      items = tff_partial.load_vocabularies('run')['item']
      tf.keras.layers.Embedding(len(items), 16)
      tff_partial.from_pandas(..., encode={'item': items})

  Args:
    folder: The `output_dir` of `train`, the folder of `export` or of `save`; or
      the file in it.

  Returns:
    Column to vocabulary.

  Raises:
    VocabularyError: If the file does not exist or is damaged.
  """
  path = pathlib.Path(folder)
  if path.is_dir():
    path = path / FILE
  try:
    described = json.loads(path.read_text(encoding='utf-8'))
    if not isinstance(described, dict):
      raise ValueError(f'it holds a {type(described).__name__}')
  except FileNotFoundError:
    raise VocabularyError(
      f'{path}: there is no such file of vocabularies. Runs with an output '
      'folder leave one if their clients have vocabularies.'
    ) from None
  except (OSError, RecursionError, ValueError) as error:
    raise VocabularyError(
      f'{path}: the file of vocabularies cannot be read: {error!s:.100}. Write '
      'it again with `save`.'
    ) from None
  found = {}
  for column, one in described.items():
    try:
      found[column] = Vocabulary.from_json(one)
    except VocabularyError as error:
      raise VocabularyError(f'{path}: column {column!r}: {error}') from None
  return found


def kept_in(folder: str | os.PathLike[str]) -> dict[str, Vocabulary]:
  """Return what a run kept in its folder, which may be nothing."""
  path = pathlib.Path(folder) / FILE
  return load(path) if path.exists() else {}


def _for_json(value: Any) -> Any:
  """Convert a value to a Python type that JSON preserves."""
  if isinstance(value, np.generic):
    value = value.item()
  if isinstance(value, (bool, int)) or type(value) is str:
    return value
  if isinstance(value, str):
    return str(value)
  if isinstance(value, float) and math.isfinite(value):
    return value
  raise VocabularyError(
    f'A file takes values that are texts or finite numbers, found {value!r:.40}'
    f' of type {type(value).__name__}. Encode texts, for instance '
    "`frame['day'].astype(str)`."
  )
