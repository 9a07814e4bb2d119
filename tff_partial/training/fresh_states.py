"""What clients remember since the last save of their store.

Records of few bytes stay in memory. Where they are many or large, those of
earlier rounds move to a file without a name beside the store, which is gone
when the process is, however it ends.
"""

from collections.abc import Iterable, Iterator, Sequence
import pathlib
import tempfile
from typing import NamedTuple

import numpy as np

from tff_partial.training import checkpoints
from tff_partial.training import state_codec

# How much stays in memory.
_BYTES_IN_MEMORY = 1 << 28


class FreshStates:
  """Records of the clients that took part since the last save."""

  def __init__(self, layout: state_codec.Layout, folder: pathlib.Path | None):
    """Hold none yet.

    Args:
      layout: How records lie.
      folder: Where a file may be; None keeps all in memory.
    """
    self._layout, self._folder = layout, folder
    self._table = state_codec.Table(layout)
    self._moved: _File | None = None

  def read(self, client_ids: Sequence[str], records: np.ndarray) -> np.ndarray:
    """Fill in the records of the clients that have one here.

    Args:
      client_ids: The clients.
      records: One for each, to be filled in.

    Returns:
      Bools `[clients]`: whose record is not here.
    """
    rows = self._table.rows(client_ids)
    records[rows >= 0] = self._table.records[rows[rows >= 0]]
    missing = rows < 0
    if self._moved is None:
      return missing
    for place in np.flatnonzero(missing):
      state = self._moved.read(client_ids[place])
      if state is not None:
        records[place] = self._layout.format.of_bytes([state])[0]
        missing[place] = False
    return missing

  def write(self, client_ids: Sequence[str], records: np.ndarray) -> None:
    """Give each client its record.

    Raises:
      ClientStoreError: If there is no room for them.
    """
    self._table.write(client_ids, records)
    if self._folder is None or self._table.num_bytes <= _BYTES_IN_MEMORY:
      return
    try:
      if self._moved is None:
        self._moved = _File(self._folder)
      self._moved.write(self._table.states())
    except OSError as error:
      raise state_codec.ClientStoreError(
        f'{self._folder}: what clients remember cannot be written: '
        f'{checkpoints.first_line(error)} Make room, and run the same command '
        'again: it goes on from the last checkpoint.'
      ) from error
    self._table = state_codec.Table(self._layout)

  def delete(self, client_id: str) -> bool:
    """Overwrite a client's record; returns whether there was one."""
    was_moved = self._moved is not None and self._moved.delete(client_id)
    return self._table.delete(client_id) or was_moved

  def states(self) -> Iterator[tuple[str, bytes]]:
    """The clients, and the bytes of their records, one after another."""
    if self._moved is not None:
      moved = self._moved.clients()
      for client, row in zip(moved, self._table.rows(moved), strict=True):
        # That in memory is newer.
        state = self._moved.read(client) if row < 0 else None
        if state is not None:
          yield client, state
    yield from self._table.states()

  def close(self) -> None:
    """Forgets all."""
    if self._moved is not None:
      self._moved.close()
      self._moved = None


class _Place(NamedTuple):
  """Where a client's bytes lie in a file."""

  offset: int
  size: int


class _File:
  """Records in a file without a name."""

  def __init__(self, folder: pathlib.Path):
    """Make an empty one in a folder."""
    self._file = tempfile.TemporaryFile(dir=folder)
    self._places: dict[str, _Place] = {}
    self._end = 0

  def clients(self) -> list[str]:
    """Whose records it has."""
    return [*self._places]

  def read(self, client_id: str) -> bytes | None:
    """The bytes of a client's record, if it has one."""
    place = self._places.get(client_id)
    if place is None:
      return None
    self._file.seek(place.offset)
    return self._file.read(place.size)

  def write(self, states: Iterable[tuple[str, bytes]]) -> None:
    """Give clients their records, over those before where they fit."""
    for client, state in states:
      place = self._places.get(client)
      if place is None or place.size != len(state):
        place = _Place(self._end, len(state))
        self._end += len(state)
      self._file.seek(place.offset)
      self._file.write(state)
      self._places[client] = place
    self._file.flush()

  def delete(self, client_id: str) -> bool:
    """Overwrite a client's record; returns whether there was one."""
    place = self._places.pop(client_id, None)
    if place is None:
      return False
    self._file.seek(place.offset)
    self._file.write(bytes(place.size))
    self._file.flush()
    return True

  def close(self) -> None:
    """Give the file back."""
    self._file.close()
