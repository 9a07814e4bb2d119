"""SQLite file of client states: a row for each client and version.

A version is a client's state since some round. The versions of a round are
written in one transaction before the server's checkpoint of that round appears,
at a cost proportional to the clients that took part. Older versions stay as
long as a run may go back to them: to a checkpoint that is kept, to the one
before if the newest was damaged, and to the best round. So whenever a run is
killed, the file holds the states that belong to the server's checkpoint.

SQLite compares the parts of the file with each other when it is opened, names
of clients among them. The bytes of a state have a checksum of their own, which
is compared when the state is read.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import json
import os
import pathlib
import sqlite3
import threading
from typing import Any
import zlib

from tff_partial.training import files
from tff_partial.training.client_store import state_codec

ClientStoreError = state_codec.ClientStoreError

FILE = 'client_states.sqlite'

# Seconds to wait while another program reads or writes.
_PATIENCE = 60.0

# Version of the tables below; files of other versions are refused.
_FORMAT = 3
_TABLES = {
  # One row: JSON of the saved rounds, with the best round of each, and of what
  # else is known about the store.
  'notes': 'CREATE TABLE notes (text TEXT NOT NULL, checksum INTEGER NOT NULL)',
  'states': """CREATE TABLE states (
  client TEXT NOT NULL,
  round INTEGER NOT NULL,
  state BLOB NOT NULL,
  checksum INTEGER NOT NULL,
  PRIMARY KEY (client, round)
)""",
}
# Drops a client's versions that are the newest after none of the rounds.
_PRUNE = """DELETE FROM states WHERE client = ? AND NOT EXISTS (
  SELECT 1 FROM (VALUES {rounds}) AS kept
  WHERE round <= kept.column1 AND NOT EXISTS (
    SELECT 1 FROM states AS later
    WHERE later.client = states.client
    AND later.round > states.round AND later.round <= kept.column1
  )
)"""

# The checkpoints that are kept, and the one that is about to appear.
_ROUNDS_KEPT = files.NUM_KEPT + 1

_COPY = (
  'Bring the file back from a copy, or delete the whole output folder to start '
  'from the beginning.'
)
_DAMAGED = f'The file is damaged, or is no client store. {_COPY}'
_RIGHTS = 'Look at the rights of the file and its folder.'
_REMEDIES = {
  sqlite3.SQLITE_FULL: 'The disk is full: make room and run the same command '
  'again. What was saved before is kept.',
  sqlite3.SQLITE_IOERR: 'The disk fails, or has no room: make room and run the '
  'same command again. What was saved before is kept.',
  sqlite3.SQLITE_BUSY: 'Another program is using the file: wait for it.',
  sqlite3.SQLITE_CANTOPEN: _RIGHTS,
  sqlite3.SQLITE_PERM: _RIGHTS,
  sqlite3.SQLITE_READONLY: _RIGHTS,
}


class Versions:
  """Versions of client states, as bytes.

  Attributes:
    path: The file, or None if they are in memory.
    writable: True if this process may change them.
  """

  def __init__(
    self, folder: str | os.PathLike[str] | None, *, writable: bool = True
  ):
    """Open the file, and keep other processes from writing to it.

    Args:
      folder: Folder of the file, existing or new; None keeps all in memory.
      writable: False to only read; another process may be writing.

    Raises:
      ClientStoreError: If there is no file to read, it is damaged, or another
        process is writing to it.
    """
    self.path = None if folder is None else pathlib.Path(folder) / FILE
    self.writable = writable
    self._lock: int | None = None
    self._connection: sqlite3.Connection | None = None
    # Threads that read shards take turns: a connection has one transaction.
    self._turn = threading.Lock()
    try:
      self._open()
    except BaseException:
      self.close()
      raise

  def _open(self) -> None:
    if self.path is not None:
      if self.writable:
        self._claim(self.path.parent)
      elif not self.path.exists():
        raise ClientStoreError(
          f'There is no client store in {self.path.parent}: no client of that '
          'run remembers anything, or nothing was trained.'
        )
    with self._explained('opened'):
      # A killed run may leave a transaction to roll back, which requires a
      # writable connection, even for reading.
      self._connection = sqlite3.connect(
        self.path or ':memory:',
        timeout=_PATIENCE,
        isolation_level=None,
        check_same_thread=False,
      )
      # What is deleted is overwritten.
      self._run('PRAGMA secure_delete = ON')
      if not self.writable:
        self._run('PRAGMA query_only = ON')
      if self.writable and not self._run('SELECT 1 FROM sqlite_master'):
        with self._writing():
          for statement in _TABLES.values():
            self._run(statement)
          self._run(f'PRAGMA user_version = {_FORMAT}')
          self._run("INSERT INTO notes VALUES ('{}', ?)", _checksum('{}'))
      else:
        with self._transaction('BEGIN'):
          self._check()

  def _check(self) -> None:
    """Refuse files of other formats, and damaged ones."""
    ((number,),) = self._run('PRAGMA user_version')
    found = dict(
      self._run("SELECT name, sql FROM sqlite_master WHERE type = 'table'")
    )
    if number < _FORMAT and 'states' in found:
      raise ClientStoreError(
        f'{self.path}: this client store was written by an earlier version of '
        'tff_partial. Go on with that version, or choose another output folder '
        'to start from the beginning.'
      )
    if number != _FORMAT or found != _TABLES:
      raise ClientStoreError(
        f'{self.path}: this is no client store of the format {_FORMAT}. '
        f'{_DAMAGED}'
      )
    ((problem,),) = self._run('PRAGMA integrity_check(1)')
    if problem != 'ok':
      raise ClientStoreError(f'{self.path}: damaged ({problem}). {_COPY}')
    self._notes()

  def _claim(self, folder: pathlib.Path) -> None:
    what = f'Cannot write what clients remember to {folder}'
    with files.writing(what, kind=ClientStoreError):
      folder.mkdir(parents=True, exist_ok=True)
      self._lock = files.locked(folder)
      # For its owner alone; SQLite's journals follow the file.
      os.close(os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o600))

  def release(self) -> None:
    """Let other processes write; from now on this one only reads."""
    if self._lock is not None:
      os.close(self._lock)
      self._lock = None
    if self.path is not None:
      self.writable = False

  def close(self) -> None:
    """Close the file; nothing can be read or written any more."""
    if self._connection is not None:
      self._connection.close()
      self._connection = None
    self.release()

  def about(self, name: str) -> Any:
    """Return a note about the store, or None."""
    with self._explained('read'):
      return self._notes().get(name)

  def describe(self, **notes: str) -> None:
    """Write notes about the store."""
    with self._explained('written'), self._writing():
      self._note(**notes)

  def rounds(self) -> list[int]:
    """Return the saved rounds, ascending."""
    with self._explained('read'):
      return list(self._rounds())

  def versions(self, client_id: str) -> list[int]:
    """Return the rounds of one client's versions, ascending."""
    query = 'SELECT round FROM states WHERE client = ? ORDER BY round'
    with self._explained('read'):
      return [number for (number,) in self._run(query, str(client_id))]

  def read(
    self, client_ids: Iterable[str], round_number: int | None = None
  ) -> list[bytes | None]:
    """Return client states after a round; None for new clients.

    Args:
      client_ids: The clients; a number, of NumPy or not, is kept as its text.
      round_number: The round after which to read; the last one if None.

    Raises:
      ClientStoreError: If the file cannot be read.
    """
    query = (
      'SELECT round, state, checksum FROM states WHERE client = ? '
      'AND round <= ? ORDER BY round DESC LIMIT 1'
    )
    last = 2**62 if round_number is None else round_number
    states: list[bytes | None] = []
    # SQLite then locks the file once, not for each client, which takes as long
    # as finding it.
    with self._explained('read'), self._transaction('BEGIN'):
      execute = self._connected.execute
      for client in client_ids:
        found = execute(query, (str(client), last)).fetchone()
        if found is None:
          states.append(None)
          continue
        number, state, checksum = found
        if _checksum(state) != checksum:
          raise ClientStoreError(
            f'{self.path}: the state of client {client!r:.80} after round '
            f'{number} is damaged. {_COPY}'
          )
        states.append(state)
    return states

  def save(
    self,
    round_number: int,
    best: int | None,
    states: Iterable[tuple[str, bytes]],
  ) -> None:
    """Write new versions, all or none, and drop obsolete ones.

    Args:
      round_number: The round after which clients have these states; not before
        the last one that was saved.
      best: The best round so far, whose versions must stay, or None.
      states: Clients that took part since the last save, and their states.

    Raises:
      ClientStoreError: If they cannot be written, such as on a full disk.
        Earlier versions are kept.
    """
    with self._explained('written'), self._writing():
      before = self._rounds()
      last = max(before, default=round_number)
      if round_number < last:
        raise ClientStoreError(
          f'{self.path or "The client store"}: round {round_number} cannot be '
          f'saved after round {last}. Go back to a round before.'
        )
      clients: list[str] = []

      def rows() -> Iterator[tuple[str, int, bytes, int]]:
        for client, state in states:
          clients.append(str(client))
          yield clients[-1], round_number, state, _checksum(state)

      self._connected.executemany(
        'INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?)', rows()
      )
      self._prune(_kept({**before, round_number: best}), clients)

  def _prune(
    self, rounds: Mapping[int, int | None], client_ids: Sequence[str]
  ) -> None:
    """Keep some rounds, and of clients the versions that these need."""
    self._note(rounds=list(rounds.items()))
    statement = _PRUNE.format(rounds=', '.join(f'({n})' for n in rounds))
    self._connected.executemany(statement, ((client,) for client in client_ids))

  def go_back_to(self, round_number: int) -> None:
    """Drop whatever was written after the round from which a run resumes.

    Args:
      round_number: That round; 0 for a new run.

    Raises:
      ClientStoreError: If the file does not know that round.
    """
    rounds = self.rounds()
    if round_number and round_number not in rounds:
      raise ClientStoreError(
        f'{self.path}: the run goes on from round {round_number}, but this '
        f'client store knows the rounds {rounds} only. It is that of another '
        'run, or an old copy: bring back the one that belongs to the '
        'checkpoints, or choose another output folder.'
      )
    if rounds and rounds[-1] > round_number:
      with self._explained('written'), self._writing():
        self._run('DELETE FROM states WHERE round > ?', round_number)
        left = [row for row in self._rounds().items() if row[0] <= round_number]
        self._note(rounds=left)

  def delete(self, client_id: str) -> int:
    """Delete all versions of one client; return their number."""
    with self._explained('written'), self._writing():
      query = 'DELETE FROM states WHERE client = ?'
      deleted = self._connected.execute(query, (str(client_id),)).rowcount
      if deleted:
        self._note(deletions=self._notes().get('deletions', 0) + 1)
    return deleted

  def _rounds(self) -> dict[int, int | None]:
    """Return the saved rounds, ascending, with the best round then."""
    return dict(self._notes().get('rounds', ()))

  def _notes(self) -> dict[str, Any]:
    rows = self._run('SELECT text, checksum FROM notes')
    if not rows or _checksum(rows[0][0]) != rows[0][1]:
      raise ClientStoreError(
        f'{self.path}: what is noted about the store is damaged. {_COPY}'
      )
    return json.loads(rows[0][0])

  def _note(self, **notes: Any) -> None:
    text = json.dumps({**self._notes(), **notes})
    self._run('UPDATE notes SET text = ?, checksum = ?', text, _checksum(text))

  @property
  def _connected(self) -> sqlite3.Connection:
    if self._connection is None:
      raise ClientStoreError(f'{self.path}: this client store was closed.')
    return self._connection

  def _run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    return self._connected.execute(statement, values).fetchall()

  @contextlib.contextmanager
  def _transaction(self, begin: str) -> Iterator[None]:
    """Read as of one moment, and write all or nothing."""
    with self._turn:
      self._run(begin)
      try:
        yield
        self._run('COMMIT')
      finally:
        if self._connected.in_transaction:
          self._run('ROLLBACK')

  def _writing(self) -> contextlib.AbstractContextManager[None]:
    """Return a transaction that writes."""
    if not self.writable:
      raise ClientStoreError(
        f'{self.path}: this client store was opened to be read, or its run is '
        'over. Open it again to change it.'
      )
    return self._transaction('BEGIN IMMEDIATE')

  @contextlib.contextmanager
  def _explained(self, done: str) -> Iterator[None]:
    """Report what could not be done to the file, and what to do about it."""
    try:
      yield
    # The last two are raised for damaged text, and for sizes that are damaged.
    except (sqlite3.Error, UnicodeDecodeError, MemoryError) as error:
      code = getattr(error, 'sqlite_errorcode', 0) & 0xFF
      remedy = _REMEDIES.get(code, _DAMAGED)
      raise ClientStoreError(
        f'{self.path or "The client store"} cannot be {done}: {error}. {remedy}'
      ) from error


def _checksum(value: Any) -> int:
  """Return the checksum of bytes or text; -1 for damage of another type."""
  if isinstance(value, str):
    value = value.encode(errors='replace')
  return zlib.crc32(value) if isinstance(value, bytes) else -1


def _kept(rounds: Mapping[int, int | None]) -> dict[int, int | None]:
  """Return the rounds that a run may go back to: the last, and the best."""
  last = sorted(rounds)[-_ROUNDS_KEPT:]
  best = {rounds[number] for number in last}
  return {n: rounds[n] for n in sorted(rounds) if n in last or n in best}
