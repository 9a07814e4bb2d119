"""An SQLite file of what clients remember: a row for each client and version.

A version is what a client remembers since some round. The versions of a round
are written in one transaction before the server's checkpoint of that round
appears, at a cost that follows the clients that took part. Older versions stay
for as long as a run may go back to them: to a checkpoint that is kept, to the
one before if the newest was damaged, and to the best round. So whatever moment
a run is killed at, the file holds what belongs to the server's checkpoint.
"""

from collections.abc import Iterable, Iterator, Sequence
import contextlib
import os
import pathlib
import sqlite3
from typing import Any
import zlib

from tff_partial import checkpoints
from tff_partial import client_records

ClientStoreError = client_records.ClientStoreError

FILE = 'client_states.sqlite'

# Another program may be reading or writing; seconds until we give up.
_PATIENCE = 20.0
# The checkpoints that are kept, and the one that is about to appear.
_ROUNDS_KEPT = checkpoints.NUM_KEPT + 1

_TABLES = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE saved (round INTEGER PRIMARY KEY, best INTEGER);
CREATE TABLE states (
  client TEXT NOT NULL,
  round INTEGER NOT NULL,
  state BLOB NOT NULL,
  checksum INTEGER NOT NULL,
  PRIMARY KEY (client, round)
);
"""

_DAMAGED = (
  'The file is damaged, or is no client store: bring it back from a copy, or '
  'delete the whole output folder to begin anew.'
)
_FORBIDDEN = 'Look at the rights of the file and its folder.'
_REMEDIES = {
  sqlite3.SQLITE_FULL: 'The disk is full: make room and run the same command '
  'again. What was saved before is kept.',
  sqlite3.SQLITE_BUSY: 'Another program is using the file: wait for it, or end '
  'it.',
  sqlite3.SQLITE_CANTOPEN: _FORBIDDEN,
  sqlite3.SQLITE_PERM: _FORBIDDEN,
  sqlite3.SQLITE_READONLY: _FORBIDDEN,
}


class Versions:
  """Versions of the bytes that clients remember.

  Attributes:
    path: The file, or None if they are in memory.
    writable: Whether this process may change them.
  """

  def __init__(
    self, folder: str | os.PathLike[str] | None, *, writable: bool = True
  ):
    """Opens the file, and keeps other processes from writing to it.

    Args:
      folder: Where the file is, or shall be; None keeps all in memory.
      writable: False to read only; another process may be writing.

    Raises:
      ClientStoreError: If there is no file to read, it cannot be opened, or
        another process is writing to it.
    """
    self.path = None if folder is None else pathlib.Path(folder) / FILE
    self.writable = writable
    self._lock: int | None = None
    self._connection: sqlite3.Connection | None = None
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
      # A killed run may leave a transaction to be rolled back, which takes a
      # connection that may write, even to read.
      self._connection = sqlite3.connect(
        self.path or ':memory:',
        timeout=_PATIENCE,
        isolation_level=None,
        check_same_thread=False,
      )
      # What is deleted is overwritten.
      self._run('PRAGMA secure_delete = ON')
      if self.writable and not self._run(
        "SELECT 1 FROM sqlite_master WHERE name = 'states'"
      ):
        with self._transaction():
          for statement in _TABLES.split(';'):
            self._run(statement)
      if not self.writable:
        self._run('PRAGMA query_only = ON')
      self._run('SELECT round, best FROM saved')

  def _claim(self, folder: pathlib.Path) -> None:
    try:
      folder.mkdir(parents=True, exist_ok=True)
      self._lock = checkpoints.locked(folder)
    except OSError as error:
      raise ClientStoreError(
        f'Cannot write what clients remember to {folder}: '
        f'{checkpoints.first_line(error)} Choose another folder or make room.'
      ) from error

  def release(self) -> None:
    """Lets other processes write; from here on this one reads only."""
    if self._lock is not None:
      os.close(self._lock)
      self._lock = None
    if self.path is not None:
      self.writable = False

  def close(self) -> None:
    """Closes the file; nothing can be read or written any more."""
    if self._connection is not None:
      self._connection.close()
      self._connection = None
    self.release()

  def about(self, name: str) -> str | None:
    """What is noted about the store, or None."""
    with self._explained('read'):
      found = self._run('SELECT value FROM about WHERE name = ?', name)
    return found[0][0] if found else None

  def describe(self, **notes: str) -> None:
    """Notes something about the store."""
    with self._explained('written'), self._transaction():
      self._connected.executemany(
        'INSERT OR REPLACE INTO about VALUES (?, ?)', notes.items()
      )

  def rounds(self) -> list[int]:
    """The rounds whose states can be read, ascending."""
    with self._explained('read'):
      return self._rounds()

  def _rounds(self) -> list[int]:
    return [
      number
      for (number,) in self._run(
        'SELECT round FROM saved UNION SELECT best FROM saved '
        'WHERE best IS NOT NULL ORDER BY 1'
      )
    ]

  def versions(self, client_id: str) -> list[int]:
    """The rounds whose versions of one client there are, ascending."""
    with self._explained('read'):
      return self._versions(client_id)

  def _versions(self, client_id: str) -> list[int]:
    query = 'SELECT round FROM states WHERE client = ? ORDER BY round'
    return [number for (number,) in self._run(query, client_id)]

  def read(
    self, client_ids: Iterable[str], round_number: int | None = None
  ) -> list[bytes | None]:
    """What clients remember after a round; None for who never took part.

    Args:
      client_ids: Whose states.
      round_number: After which round; the last one if None.

    Raises:
      ClientStoreError: If the file cannot be read.
    """
    query = (
      'SELECT state, checksum FROM states WHERE client = ? AND round <= ? '
      'ORDER BY round DESC LIMIT 1'
    )
    last = 2**62 if round_number is None else round_number
    states: list[bytes | None] = []
    with self._explained('read'):
      execute = self._connected.execute
      for client in client_ids:
        found = execute(query, (client, last)).fetchone()
        if found is not None and zlib.crc32(found[0]) != found[1]:
          raise ClientStoreError(
            f'{self.path}: the state of client {client!r} is damaged. Bring '
            'the file back from a copy, delete this client to have it begin '
            'anew, or delete the whole output folder.'
          )
        states.append(found and found[0])
    return states

  def save(
    self,
    round_number: int,
    best: int | None,
    states: Sequence[tuple[str, bytes]],
  ) -> None:
    """Writes new versions, all or none, and drops those of no more use.

    Args:
      round_number: The round after which clients remember this.
      best: The best round so far, whose versions must stay, or None.
      states: Clients that took part since the last save, and their states.

    Raises:
      ClientStoreError: If they cannot be written, such as on a full disk. What
        was written before is kept.
    """
    with self._explained('written'), self._transaction():
      self._connected.executemany(
        'INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?)',
        (
          (client, round_number, state, zlib.crc32(state))
          for client, state in states
        ),
      )
      self._run(
        'INSERT OR REPLACE INTO saved VALUES (?, ?)', round_number, best
      )
      self._run(
        'DELETE FROM saved WHERE round NOT IN '
        '(SELECT round FROM saved ORDER BY round DESC LIMIT ?)',
        _ROUNDS_KEPT,
      )
      self._prune(client for client, _ in states)

  def _prune(self, client_ids: Iterable[str]) -> None:
    """Drops the versions of some clients that no round can ask for."""
    rounds = self._rounds()
    useless = []
    for client in client_ids:
      versions = self._versions(client)
      useful = {
        max((version for version in versions if version <= number), default=-1)
        for number in rounds
      }
      useless += [(client, version) for version in {*versions} - useful]
    self._connected.executemany(
      'DELETE FROM states WHERE client = ? AND round = ?', useless
    )

  def go_back_to(self, round_number: int) -> None:
    """Drops what was written after the round from which a run goes on.

    Args:
      round_number: That round; 0 for a run that begins.

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
      with self._explained('written'), self._transaction():
        self._run('DELETE FROM states WHERE round > ?', round_number)
        self._run('DELETE FROM saved WHERE round > ?', round_number)

  def delete(self, client_id: str) -> int:
    """Deletes all versions of one client; returns how many there were."""
    with self._explained('written'), self._transaction():
      number = len(self._versions(client_id))
      self._run('DELETE FROM states WHERE client = ?', client_id)
    return number

  @property
  def _connected(self) -> sqlite3.Connection:
    if self._connection is None:
      raise ClientStoreError(f'{self.path}: this client store was closed.')
    return self._connection

  def _run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    return self._connected.execute(statement, values).fetchall()

  @contextlib.contextmanager
  def _transaction(self) -> Iterator[None]:
    """All that is written inside is written, or nothing."""
    if not self.writable:
      raise ClientStoreError(
        f'{self.path}: this client store was opened to be read, or its run is '
        'over. Open it anew to change it.'
      )
    self._run('BEGIN IMMEDIATE')
    try:
      yield
      self._run('COMMIT')
    finally:
      if self._connected.in_transaction:
        self._run('ROLLBACK')

  @contextlib.contextmanager
  def _explained(self, done: str) -> Iterator[None]:
    """Says what could not be done to the file, and what to do about it."""
    try:
      yield
    except sqlite3.Error as error:
      code = getattr(error, 'sqlite_errorcode', 0) & 0xFF
      remedy = _REMEDIES.get(code, _DAMAGED)
      raise ClientStoreError(
        f'{self.path or "The client store"} cannot be {done}: {error}. {remedy}'
      ) from error
