"""The SQLite file of client states: its tables, and their checksums."""

import bisect
from collections.abc import Iterator
import contextlib
import os
import pathlib
import sqlite3
import threading
from typing import Any, NamedTuple
import zlib

from tff_partial.training import files
from tff_partial.training.client_store import state_codec

ClientStoreError = state_codec.ClientStoreError

FILE = 'client_states.sqlite'

# Seconds to wait while another program reads or writes.
_PATIENCE = 60.0

# Version of the tables below; files of other versions are refused.
_FORMAT = 2
_TABLES = {
  'about': """CREATE TABLE about (
  name TEXT PRIMARY KEY,
  value TEXT NOT NULL,
  checksum INTEGER NOT NULL
)""",
  # Clients with a state after a round: their number, and the sum of their
  # checksums.
  'saved': """CREATE TABLE saved (
  round INTEGER PRIMARY KEY,
  best INTEGER,
  clients INTEGER NOT NULL,
  total INTEGER NOT NULL,
  checksum INTEGER NOT NULL
)""",
  'states': """CREATE TABLE states (
  client TEXT NOT NULL,
  round INTEGER NOT NULL,
  state BLOB NOT NULL,
  checksum INTEGER NOT NULL,
  PRIMARY KEY (client, round)
)""",
}

COPY = (
  'bring the file back from a copy, or delete the whole output folder to begin '
  'anew'
)
_DAMAGED = f'The file is damaged, or is no client store: {COPY}.'
_FORBIDDEN = 'Look at the rights of the file and its folder.'
_REMEDIES = {
  sqlite3.SQLITE_FULL: 'The disk is full: make room and run the same command '
  'again. What was saved before is kept.',
  sqlite3.SQLITE_IOERR: 'The disk fails, or has no room for a file of this '
  'size: make room and run the same command again. What was saved before is '
  'kept.',
  sqlite3.SQLITE_BUSY: 'Another program is using the file: wait for it, or end '
  'it.',
  sqlite3.SQLITE_CANTOPEN: _FORBIDDEN,
  sqlite3.SQLITE_PERM: _FORBIDDEN,
  sqlite3.SQLITE_READONLY: _FORBIDDEN,
}


class Saved(NamedTuple):
  """Notes on a saved round.

  Attributes:
    round: The round.
    best: The best round then, or None.
    clients: Number of clients with a state after the round.
    total: The sum of their checksums.
  """

  round: int
  best: int | None
  clients: int
  total: int


def checksum_of(*values: Any) -> int:
  """Return the checksum of a row, whose types may be damaged, too."""
  return zlib.crc32(repr(values).encode())


def checksum_of_version(client: Any, number: Any, state: Any) -> int:
  """Return the checksum of a client's state since a round."""
  if not isinstance(state, bytes):
    return -1
  return zlib.crc32(state, checksum_of(client, number))


class File:
  """An open file that was compared with its checksums.

  Attributes:
    path: The file, or None if all is in memory.
    writable: True if this process may change it.
  """

  def __init__(
    self, folder: str | os.PathLike[str] | None, *, writable: bool = True
  ):
    """Open the file, and keep other processes from writing to it.

    Args:
      folder: Folder of the file, existing or new; None keeps all in memory.
      writable: False to only read; another process may be writing.

    Raises:
      ClientStoreError: If there is no file to read, it cannot be opened, it is
        damaged so that no round can be read, or another process is writing to
        it.
    """
    self.path = None if folder is None else pathlib.Path(folder) / FILE
    self.writable = writable
    self._lock: int | None = None
    self._connection: sqlite3.Connection | None = None
    # Threads that read shards take turns: a connection has one transaction.
    self._turn = threading.Lock()
    # Rounds that cannot be read, and why.
    self._damaged: dict[int, str] = {}
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
      # Damaged text is compared with its checksum, too.
      self._connection.text_factory = _text
      # What is deleted is overwritten.
      self._run('PRAGMA secure_delete = ON')
      if not self.writable:
        self._run('PRAGMA query_only = ON')
      if self.writable and not self._run('SELECT 1 FROM sqlite_master'):
        with self._transaction():
          for statement in _TABLES.values():
            self._run(statement)
          self._run(f'PRAGMA user_version = {_FORMAT}')
      else:
        self._check()

  def _check(self) -> None:
    """Compare the whole file with its checksums."""
    with self._as_of_one_moment():
      self._check_format()
      if self._saved() and not self._abouts():
        raise ClientStoreError(
          f'{self.path}: damaged (nothing is noted about the store). {_DAMAGED}'
        )
      self._damaged = self._damage()
      self._check_structure()

  def _check_format(self) -> None:
    ((number,),) = self._run('PRAGMA user_version')
    found = dict(
      self._run("SELECT name, sql FROM sqlite_master WHERE type = 'table'")
    )
    if number == 0 and 'states' in found:
      raise ClientStoreError(
        f'{self.path}: this client store was written by an earlier version of '
        'tff_partial, which did not protect the names of clients. Go on with '
        'that version, or choose another output folder to begin anew.'
      )
    if number != _FORMAT or found != _TABLES:
      raise ClientStoreError(
        f'{self.path}: this is no client store of the format {_FORMAT}. '
        f'{_DAMAGED}'
      )

  def _check_structure(self) -> None:
    """Check the parts of the file against each other, by SQLite.

    If the index of the names is not that of the clients, some are not found
    though they are there, whatever the round.
    """
    problem = self._run('PRAGMA integrity_check(1)')[0][0]
    if problem == 'ok':
      return
    problem = next(iter(self._damaged.values()), problem)
    raise ClientStoreError(f'{self.path}: damaged ({problem}). {_DAMAGED}')

  def _damage(self) -> dict[int, str]:
    """Return the saved rounds with damaged states, and the damage."""
    saved = self._saved()
    rounds = [row.round for row in saved]
    # A version counts from its round on, until the client's next one.
    clients, totals = [0] * (len(saved) + 1), [0] * (len(saved) + 1)
    altered = None
    last: tuple[Any, int, int] = ('', 0, 0)
    for client, number, state, checksum in self._connected.execute(
      'SELECT client, round, state, checksum FROM states ORDER BY client, round'
    ):
      if checksum_of_version(client, number, state) != checksum:
        altered = altered or client
        continue
      begin = bisect.bisect_left(rounds, number)
      if client == last[0]:
        clients[begin] -= 1
        totals[begin] -= last[2]
      clients[begin] += 1
      totals[begin] += checksum
      last = client, number, checksum
    damaged = {}
    number_of_clients = total = 0
    for row, more, increase in zip(saved, clients, totals, strict=False):
      number_of_clients += more
      total += increase
      if (row.clients, row.total) == (number_of_clients, total):
        continue
      if altered is not None:
        damaged[row.round] = f'the state of client {altered!r:.80}, or its name'
      else:
        damaged[row.round] = (
          f'{number_of_clients} clients are there, of {row.clients}'
        )
    return damaged

  def _claim(self, folder: pathlib.Path) -> None:
    try:
      folder.mkdir(parents=True, exist_ok=True)
      self._lock = files.locked(folder)
      # For its owner alone; SQLite's journals follow the file.
      os.close(os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
      raise ClientStoreError(
        f'Cannot write what clients remember to {folder}: '
        f'{files.first_line(error)} Choose another folder or make room.'
      ) from error

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

  def about(self, name: str) -> str | None:
    """Return a note about the store, or None."""
    with self._explained('read'):
      return self._abouts().get(name)

  def _abouts(self) -> dict[str, str]:
    notes = {}
    for name, value, checksum in self._run('SELECT * FROM about'):
      if checksum_of(name, value) != checksum:
        raise ClientStoreError(
          f'{self.path}: what is noted as {name!r} is damaged. {_DAMAGED}'
        )
      notes[name] = value
    return notes

  def describe(self, **notes: str) -> None:
    """Write notes about the store."""
    with self._explained('written'), self._transaction():
      self._describe(**notes)

  def _describe(self, **notes: str) -> None:
    self._connected.executemany(
      'INSERT OR REPLACE INTO about VALUES (?, ?, ?)',
      (
        (name, value, checksum_of(name, value)) for name, value in notes.items()
      ),
    )

  def rounds(self) -> list[int]:
    """Return the saved rounds, ascending."""
    with self._explained('read'):
      return self._rounds()

  def _rounds(self) -> list[int]:
    return [row.round for row in self._saved()]

  def _saved(self) -> list[Saved]:
    """Return the notes on all saved rounds, ascending."""
    saved = []
    for *values, checksum in self._run('SELECT * FROM saved ORDER BY round'):
      if checksum_of(*values) != checksum:
        raise ClientStoreError(
          f'{self.path}: what is noted of round {values[0]} is damaged. '
          f'{_DAMAGED}'
        )
      saved.append(Saved(*values))
    return saved

  @property
  def _connected(self) -> sqlite3.Connection:
    if self._connection is None:
      raise ClientStoreError(f'{self.path}: this client store was closed.')
    return self._connection

  def _run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    return self._connected.execute(statement, values).fetchall()

  @contextlib.contextmanager
  def _as_of_one_moment(self) -> Iterator[None]:
    """Make all reads inside see one moment, even if others write.

    SQLite then locks the file once, not for each client, which takes as long as
    finding it.
    """
    with self._turn:
      self._run('BEGIN')
      try:
        yield
      finally:
        if self._connected.in_transaction:
          self._run('COMMIT')

  @contextlib.contextmanager
  def _transaction(self) -> Iterator[None]:
    """Write everything that is written inside, or nothing."""
    if not self.writable:
      raise ClientStoreError(
        f'{self.path}: this client store was opened to be read, or its run is '
        'over. Open it anew to change it.'
      )
    with self._turn:
      self._run('BEGIN IMMEDIATE')
      try:
        yield
        self._run('COMMIT')
      finally:
        if self._connected.in_transaction:
          self._run('ROLLBACK')

  @contextlib.contextmanager
  def _explained(self, done: str) -> Iterator[None]:
    """Report what could not be done to the file, and what to do about it."""
    try:
      yield
    # The last two are raised if a damaged file's messages are not text, or need
    # more memory than there is.
    except (sqlite3.Error, UnicodeDecodeError, MemoryError) as error:
      code = getattr(error, 'sqlite_errorcode', 0) & 0xFF
      remedy = _REMEDIES.get(code, _DAMAGED)
      raise ClientStoreError(
        f'{self.path or "The client store"} cannot be {done}: {error}. {remedy}'
      ) from error


def _text(data: bytes) -> str:
  return data.decode(errors='surrogateescape')
