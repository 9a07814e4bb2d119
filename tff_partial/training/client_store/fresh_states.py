"""Client states since the last save: in memory, or where they were made.

States that a runtime returns in memory are copied into arrays that grow. Those
that it left in files of the processes that run clients stay there, and are read
there again in later rounds. Once saved, such a file is used as long as it has
the newest states of half of its clients, since reading them from the store
would be slower.
"""

import collections
from collections.abc import Iterator, Sequence
import weakref

import numpy as np
import tensorflow as tf

from tff_partial.runtimes.values import sources


class _StateTable(sources.Held):
  """Leaves in arrays that grow with the clients that take part."""

  def __init__(self, specs: Sequence[tf.TensorSpec]):
    super().__init__([sources.empty(spec, 0) for spec in specs])
    self._specs = specs
    self._size = 0

  def __len__(self) -> int:
    return self._size

  @property
  def num_bytes(self) -> int:
    """Memory of the leaves in bytes."""
    return sum(
      leaf.nbytes
      if leaf.dtype != object
      else sum(own.nbytes for own in leaf if own is not None)
      for leaf in self.leaves
    )

  def new_row(self) -> int:
    """Add a row, and return its number."""
    self._size += 1
    return self._size - 1

  def write(self, rows: np.ndarray, leaves: Sequence[np.ndarray]) -> None:
    """Store the leaves of some rows."""
    size = len(self.leaves[0])
    if self._size > size:
      # Twice the size, so that adding rows is cheap.
      more = max(self._size - size, size)
      self.leaves = [
        np.concatenate([leaf, sources.empty(spec, more)])
        for leaf, spec in zip(self.leaves, self._specs, strict=True)
      ]
    for own, leaf in zip(self.leaves, leaves, strict=True):
      own[rows] = leaf


class FreshStates:
  """Sources of the newest states of some clients.

  A number that names a client is kept as its text, as in the file.
  """

  def __init__(self, specs: Sequence[tf.TensorSpec]):
    self._specs = specs
    self._table = _StateTable(specs)
    self._places: dict[str, tuple[sources.Source, int]] = {}
    self._unsaved: dict[str, None] = {}
    # Clients' rows in all files that still exist, of older states, too.
    self._files: weakref.WeakKeyDictionary[sources.Source, dict[str, int]] = (
      weakref.WeakKeyDictionary()
    )

  def __contains__(self, client_id: str) -> bool:
    """Return True if the newest state of a client is here."""
    return str(client_id) in self._places

  @property
  def num_bytes(self) -> int:
    """Memory of the states in bytes."""
    return self._table.num_bytes

  def write(self, client_ids: Sequence[str], states: sources.Scattered) -> None:
    """Take the states of some clients."""
    client_ids = list(map(str, client_ids))
    self._unsaved.update(dict.fromkeys(client_ids))
    is_here = np.array([s.is_in_memory for s in states.sources], bool)
    is_here = is_here[states.which]
    if is_here.all():
      self._copy(client_ids, states)
      return
    places = np.flatnonzero(is_here)
    self._copy([client_ids[p] for p in places], states.take(places))
    for place in np.flatnonzero(~is_here):
      client = client_ids[place]
      source, row = states.sources[states.which[place]], int(states.rows[place])
      before = self._places.get(client)
      if before is not None and before[0] is self._table:
        # No deletion would find it there any more.
        self._table.erase(before[1])
      self._places[client] = source, row
      self._files.setdefault(source, {})[client] = row

  def _copy(self, client_ids: Sequence[str], states: sources.Scattered) -> None:
    """Copy states to the table."""
    rows = []
    for client in client_ids:
      source, row = self._places.get(client, (None, 0))
      if source is not self._table:
        row = self._table.new_row()
        self._places[client] = self._table, row
      rows.append(row)
    self._table.write(np.array(rows, np.int64), states.leaves())

  def read(self, client_ids: Sequence[str]) -> sources.Scattered:
    """Return the states of clients, which must all be here."""
    places = [self._places[str(client)] for client in client_ids]
    found = {id(source): source for source, _ in places}
    numbers = {key: number for number, key in enumerate(found)}
    states = sources.Scattered(
      self._specs,
      [*found.values()],
      np.array([numbers[id(source)] for source, _ in places], np.int64),
      np.array([row for _, row in places], np.int64),
    )
    # Rows of the table are copied, as later rounds write to it.
    return states.take(np.arange(len(states)))

  def unsaved(
    self, clients_at_once: int
  ) -> Iterator[tuple[list[str], list[np.ndarray]]]:
    """Yield unsaved states: some clients, and the leaves of all of them."""
    clients = [*self._unsaved]
    for start in range(0, len(clients), clients_at_once):
      some = clients[start : start + clients_at_once]
      yield some, self.read(some).leaves()

  def saved(self) -> None:
    """Note that all states are saved, and release memory and unused files."""
    self._unsaved.clear()
    self._table = _StateTable(self._specs)
    used = collections.Counter(
      id(source) for source, _ in self._places.values()
    )
    self._places = {
      client: (source, row)
      for client, (source, row) in self._places.items()
      if not source.is_in_memory and 2 * used[id(source)] >= len(source)
    }

  def delete(self, client_id: str) -> bool:
    """Overwrite all states of a client.

    Returns:
      True if its newest one was here.

    Raises:
      CohortRuntimeError: If a file cannot be written.
    """
    client_id = str(client_id)
    self._unsaved.pop(client_id, None)
    newest = self._places.pop(client_id, None)  # Keeps its file until erased.
    if newest is not None:
      source, row = newest
      source.erase(row)
    for source, rows in self._files.items():
      if client_id in rows:
        source.erase(rows.pop(client_id))
    return newest is not None
