"""Arrays and words in temporary files, to save memory.

The files have no names, so that they disappear when the program ends, for
whatever reason.
"""

from collections.abc import Iterator, Sequence
import contextlib
import hashlib
import json
import tempfile

import numpy as np

from tasks.errors import DataError

# The smaller fingerprints mark ends of sentences and texts.
_SMALLEST = 2


def fingerprint(word: str) -> int:
  """Return the portable 64-bit fingerprint of a word, at least 2."""
  # JSON may hold lone surrogates.
  letters = word.encode('utf-8', 'surrogatepass')
  digest = hashlib.blake2b(letters, digest_size=8).digest()
  return max(int.from_bytes(digest, 'little'), _SMALLEST)


def fingerprints(words: Sequence[str]) -> np.ndarray:
  """Return the fingerprints of words, uint64 `[words]`."""
  return np.array([fingerprint(word) for word in words], np.uint64)


@contextlib.contextmanager
def _space() -> Iterator[None]:
  """Name the remedy if the disk is full."""
  try:
    yield
  except OSError as error:
    raise DataError(
      f'{tempfile.gettempdir()}: the tokens of a corpus cannot be kept there '
      f'({error.strerror or error}). It takes 8 bytes a token, twice while the '
      'corpus is sorted. Make room, or name another folder with $TMPDIR.'
    ) from error


class GrowingArray:
  """One-dimensional array in a file, to which items can be appended."""

  def __init__(self, dtype: type[np.generic]):
    """Open the file.

    Args:
      dtype: The dtype of the items.

    Raises:
      DataError: If no temporary file can be made.
    """
    self._dtype = np.dtype(dtype)
    with _space():
      self._file = tempfile.TemporaryFile(prefix='sentences-')

  def extend(self, values: np.ndarray) -> None:
    """Append items, `[items]`, of any numeric type that fits.

    Raises:
      DataError: If the disk is full.
    """
    with _space():
      self._file.write(values.astype(self._dtype, copy=False).tobytes())

  def finish(self) -> np.ndarray:
    """Return all items, `[items]`, read-only; nothing more can be appended.

    The array is memory-mapped: the system reads pages on access and drops them
    when it needs memory.

    Raises:
      DataError: If the disk is full.
    """
    with _space(), self._file as file:
      file.flush()
      if not file.tell():
        return np.zeros(0, self._dtype)
      return np.asarray(np.memmap(file, self._dtype, 'r'))


class Lexicon:
  """Mapping from fingerprints to words, which are in a file."""

  def __init__(self) -> None:
    with _space():
      self._file = tempfile.TemporaryFile('w+', prefix='words-')

  def add(self, word: str) -> int:
    """Add a word, perhaps again, and return its fingerprint."""
    with _space():
      self._file.write(json.dumps(word) + '\n')
    return fingerprint(word)

  def words_of(self, prints: np.ndarray) -> list[str]:
    """Return the words of fingerprints, in one pass over the file.

    Args:
      prints: uint64 `[words]`, of words that were added.
    """
    wanted = set(prints.tolist())
    found: dict[int, str] = {}
    with _space():
      self._file.seek(0)
      for word in map(json.loads, self._file):
        number = fingerprint(word)
        if number in wanted:
          found[number] = word
      self._file.seek(0, 2)
    return [found[each] for each in prints.tolist()]
