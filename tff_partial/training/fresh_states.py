"""What clients remember since the last save of their store.

Records of few bytes stay in memory. Where they are many or large, those of
earlier rounds move to a file without a name beside the store, which is gone
when the process is, however it ends.
"""

from collections.abc import Iterator, Sequence
import pathlib
import tempfile
from typing import IO, NamedTuple

import numpy as np

from tff_partial.training import checkpoints
from tff_partial.training import state_codec

# How much stays in memory.
_BYTES_IN_MEMORY = 1 << 28


class _Place(NamedTuple):
  """Where a client's bytes lie in a file."""

  offset: int
  size: int


class FreshStates:
  """Records of the clients that took part since the last save."""

  def __init__(self, layout: state_codec.Layout, folder: pathlib.Path | None):
    """Holds none yet.

    Args:
      layout: How records lie.
      folder: Where a file may be; None keeps all in memory.
    """
    self._layout, self._folder = layout, folder
    self._table = state_codec.Table(layout)
    self._file: IO[bytes] | None = None
    self._places: dict[str, _Place] = {}
    self._end = 0

  def read(self, client_ids: Sequence[str], records: np.ndarray) -> np.ndarray:
    """Fills in the records of the clients that have one here.

    Args:
      client_ids: The clients.
      records: One for each, to be filled in.

    Returns:
      Bools `[clients]`: whose record is not here.
    """
    rows = self._table.rows(client_ids)
    records[rows >= 0] = self._table.records[rows[rows >= 0]]
    missing = rows < 0
    if not self._places:
      return missing
    for place in np.flatnonzero(missing):
      state = self._state(client_ids[place])
      if state is not None:
        records[place] = self._layout.format.of_bytes([state])[0]
        missing[place] = False
    return missing

  def write(self, client_ids: Sequence[str], records: np.ndarray) -> None:
    """Gives each client its record.

    Raises:
      ClientStoreError: If there is no room for them.
    """
    self._table.write(client_ids, records)
    if self._folder is not None and self._table.num_bytes > _BYTES_IN_MEMORY:
      self._move(self._folder)

  def delete(self, client_id: str) -> bool:
    """Overwrites a client's record; returns whether there was one."""
    place = self._places.pop(client_id, None)
    if place is not None and self._file is not None:
      self._file.seek(place.offset)
      self._file.write(bytes(place.size))
      self._file.flush()
    return self._table.delete(client_id) or place is not None

  def states(self) -> Iterator[tuple[str, bytes]]:
    """The clients, and the bytes of their records, one after another."""
    moved = [*self._places]
    for client, row in zip(moved, self._table.rows(moved), strict=True):
      state = self._state(client) if row < 0 else None
      if state is not None:
        yield client, state
    yield from self._table.states()

  def close(self) -> None:
    """Forgets all."""
    if self._file is not None:
      self._file.close()
      self._file = None
    self._places.clear()

  def _state(self, client_id: str) -> bytes | None:
    place = self._places.get(client_id)
    if place is None or self._file is None:
      return None
    self._file.seek(place.offset)
    return self._file.read(place.size)

  def _move(self, folder: pathlib.Path) -> None:
    """Moves what is in memory to the file."""
    try:
      if self._file is None:
        self._file = tempfile.TemporaryFile(dir=folder)
      for client, state in self._table.states():
        place = self._places.get(client)
        if place is None or place.size != len(state):
          place = _Place(self._end, len(state))
          self._end += len(state)
        self._file.seek(place.offset)
        self._file.write(state)
        self._places[client] = place
      self._file.flush()
    except OSError as error:
      raise state_codec.ClientStoreError(
        f'{folder}: what clients remember cannot be written: '
        f'{checkpoints.first_line(error)} Make room, and run the same command '
        'again: it goes on from the last checkpoint.'
      ) from error
    self._table = state_codec.Table(self._layout)
