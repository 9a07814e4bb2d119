"""Client states in files left by the workers that ran the clients.

The store passes the locations to the next workers, which read the states
themselves. Once saved, they are kept as long as a file is in use for half of
its clients, since reading them again from the store's file would be slower.
"""

import collections
from collections.abc import Iterator, Sequence
import weakref

import numpy as np

from tff_partial.runtimes.values import deposits
from tff_partial.runtimes.values import sources
from tff_partial.training.client_store import state_codec

# Bytes read at once for a save.
_BYTES_AT_ONCE = 1 << 24


class DepositedStates:
  """Locations of the newest states of some clients."""

  def __init__(self, layout: state_codec.Layout):
    """Start without any.

    Args:
      layout: The layout of records.
    """
    self._format = layout.format
    self._places: dict[str, tuple[sources.Source, int]] = {}
    self._unsaved: dict[str, None] = {}
    # Locations of older states, in files that are still in use.
    self._older: dict[str, list[tuple[weakref.ref, int]]] = {}

  def __contains__(self, client_id: str) -> bool:
    """Return True if the newest state of a client is here."""
    return client_id in self._places

  def write(self, client_ids: Sequence[str], states: sources.Scattered) -> None:
    """Record the locations of client states."""
    for client, which, row in zip(
      client_ids, states.which.tolist(), states.rows.tolist(), strict=True
    ):
      self.forget(client)
      self._places[client] = states.sources[which], row
      self._unsaved[client] = None

  def forget(self, client_id: str) -> bool:
    """Forget a client; return True if its newest state was here."""
    self._unsaved.pop(client_id, None)
    source, row = self._places.pop(client_id, (None, 0))
    if isinstance(source, deposits.Deposit):
      older = self._older.setdefault(client_id, [])
      older.append((weakref.ref(source), row))
    return source is not None

  def delete(self, client_id: str) -> bool:
    """Overwrite all states of a client.

    Returns:
      True if its newest one was here.

    Raises:
      CohortRuntimeError: If a file cannot be written.
    """
    newest = self._places.get(client_id)  # Keeps its file until erased.
    was_here = self.forget(client_id)
    for alive, row in self._older.pop(client_id, ()):
      source = alive()
      if source is not None:
        source.erase(row)
    del newest
    return was_here

  def read(self, client_ids: Sequence[str]) -> sources.Scattered:
    """Return the locations of client states, which must all be here."""
    found: dict[int, sources.Source] = {}
    which, rows = [], []
    for client in client_ids:
      source, row = self._places[client]
      found[id(source)] = source
      which.append(id(source))
      rows.append(row)
    numbers = {key: number for number, key in enumerate(found)}
    return sources.Scattered(
      self._format.specs,
      [*found.values()],
      np.array([numbers[key] for key in which], np.int64),
      np.array(rows, np.int64),
    )

  def unsaved(self) -> Iterator[tuple[str, bytes]]:
    """Yield the clients with unsaved states, and the bytes of these."""
    clients = [*self._unsaved]
    number = max(1, _BYTES_AT_ONCE // self._format.record_type.itemsize)
    for start in range(0, len(clients), number):
      some = clients[start : start + number]
      records = self._format.records(self.read(some).leaves(), len(some))
      for client, record in zip(some, records, strict=True):
        yield client, self._format.to_bytes(record)

  def saved(self) -> None:
    """Note that all states are saved, and release files with little use."""
    self._unsaved.clear()
    used = collections.Counter(id(s) for s, _ in self._places.values())
    self._places = {
      client: (source, row)
      for client, (source, row) in self._places.items()
      if isinstance(source, deposits.Deposit)
      and 2 * used[id(source)] >= source.clients
    }
    for client, older in [*self._older.items()]:
      self._older[client] = [place for place in older if place[0]() is not None]
      if not self._older[client]:
        del self._older[client]
