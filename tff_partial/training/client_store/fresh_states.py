"""Client states since the last save of their store.

Small records stay in memory. If they are many or large, those of earlier rounds
move to an unnamed file next to the store, which disappears with the process,
however that ends.
"""

from collections.abc import Iterable, Iterator, Sequence
import pathlib
import tempfile
from typing import NamedTuple

import numpy as np

from tff_partial.training import files
from tff_partial.training.client_store import state_codec

# Bytes kept in memory.
_BYTES_IN_MEMORY = 1 << 28


class FreshStates:
  """Records of the clients that took part since the last save."""

  def __init__(self, layout: state_codec.Layout, folder: pathlib.Path | None):
    """Start without any.

    Args:
      layout: The layout of records.
      folder: Folder for a file; None keeps all in memory.
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
      bool `[clients]`, True for clients without a record here.
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
    """Store the record of each client.

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
        f'{files.first_line(error)} Make room, and run the same command '
        'again: it goes on from the last checkpoint.'
      ) from error
    self._table = state_codec.Table(self._layout)

  def delete(self, client_id: str) -> bool:
    """Overwrite a client's record; return True if there was one."""
    was_moved = self._moved is not None and self._moved.delete(client_id)
    return self._table.delete(client_id) or was_moved

  def states(self) -> Iterator[tuple[str, bytes]]:
    """Yield each client with the bytes of its record."""
    if self._moved is not None:
      moved = self._moved.clients()
      for client, row in zip(moved, self._table.rows(moved), strict=True):
        # The one in memory is newer.
        state = self._moved.read(client) if row < 0 else None
        if state is not None:
          yield client, state
    yield from self._table.states()

  def close(self) -> None:
    """Forget all records."""
    if self._moved is not None:
      self._moved.close()
      self._moved = None


class _Place(NamedTuple):
  """Location of a client's bytes in a file."""

  offset: int
  size: int


class _File:
  """Records in an unnamed file."""

  def __init__(self, folder: pathlib.Path):
    """Create an empty file in a folder."""
    self._file = tempfile.TemporaryFile(dir=folder)
    self._places: dict[str, _Place] = {}
    self._end = 0

  def clients(self) -> list[str]:
    """Return the clients that have a record."""
    return [*self._places]

  def read(self, client_id: str) -> bytes | None:
    """Return the bytes of a client's record, if it has one."""
    place = self._places.get(client_id)
    if place is None:
      return None
    self._file.seek(place.offset)
    return self._file.read(place.size)

  def write(self, states: Iterable[tuple[str, bytes]]) -> None:
    """Write clients' records, over previous ones of the same size."""
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
    """Overwrite a client's record; return True if there was one."""
    place = self._places.pop(client_id, None)
    if place is None:
      return False
    self._file.seek(place.offset)
    self._file.write(bytes(place.size))
    self._file.flush()
    return True

  def close(self) -> None:
    """Close the file, which deletes it."""
    self._file.close()
