"""An SQLite file of what clients remember: a row for each client and version.

A version is what a client remembers since some round. The versions of a round
are written in one transaction before the server's checkpoint of that round
appears, at a cost that follows the clients that took part. Older versions stay
for as long as a run may go back to them: to a checkpoint that is kept, to the
one before if the newest was damaged, and to the best round. So whatever moment
a run is killed at, the file holds what belongs to the server's checkpoint.

Whatever the file holds is covered by checksums. That of a version is over the
client's name, the round and the state, and is compared whenever the version is
read. With each saved round is noted how many clients remember something then,
and the sum of their checksums: so no client can be lost, or change its name,
without being missed. These sums follow a save at the cost of the clients that
took part, and are compared with the whole file when that is opened: three
seconds for a million clients.
"""

import bisect
from collections.abc import Iterable, Iterator, Sequence
import contextlib
import os
import pathlib
import sqlite3
from typing import Any, NamedTuple
import zlib

from tff_partial.training import checkpoints
from tff_partial.training import state_codec

ClientStoreError = state_codec.ClientStoreError

FILE = 'client_states.sqlite'

# Another program may be reading or writing; seconds until we give up.
_PATIENCE = 60.0
# What is noted of deletions.
_DELETIONS = 'deletions'
# The checkpoints that are kept, and the one that is about to appear.
_ROUNDS_KEPT = checkpoints.NUM_KEPT + 1

# Of the tables below; files of another one are refused.
_FORMAT = 2
_TABLES = {
  'about': """CREATE TABLE about (
  name TEXT PRIMARY KEY,
  value TEXT NOT NULL,
  checksum INTEGER NOT NULL
)""",
  # Of those who remember something after a round: how many they are, and the
  # sum of their checksums.
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

_COPY = (
  'bring the file back from a copy, or delete the whole output folder to begin '
  'anew'
)
_DAMAGED = f'The file is damaged, or is no client store: {_COPY}.'
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


class _Saved(NamedTuple):
  """What is noted of a round that was saved.

  Attributes:
    round: The round.
    best: The best round then, or None.
    clients: How many clients remember something after the round.
    total: The sum of the checksums of these.
  """

  round: int
  best: int | None
  clients: int
  total: int


def _checksum(*values: Any) -> int:
  """The checksum of a row, in which damage may have altered the types, too."""
  return zlib.crc32(repr(values).encode())


def _checksum_of_version(client: Any, number: Any, state: Any) -> int:
  if not isinstance(state, bytes):
    return -1
  return zlib.crc32(state, _checksum(client, number))


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
      ClientStoreError: If there is no file to read, it cannot be opened, it is
        damaged so that no round can be read, or another process is writing to
        it.
    """
    self.path = None if folder is None else pathlib.Path(folder) / FILE
    self.writable = writable
    self._lock: int | None = None
    self._connection: sqlite3.Connection | None = None
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
      # A killed run may leave a transaction to be rolled back, which takes a
      # connection that may write, even to read.
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
    """Compares all that the file holds with its checksums."""
    self._run('BEGIN')  # As of one moment, though another process may write.
    try:
      self._check_format()
      if self._saved() and not self._abouts():
        raise ClientStoreError(
          f'{self.path}: damaged (nothing is noted about the store). {_DAMAGED}'
        )
      self._damaged = self._damage()
      self._check_structure()
    finally:
      if self._connected.in_transaction:
        self._run('COMMIT')

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
    """Has SQLite compare the parts of its file with each other.

    Where the index of the names is not that of the clients, some are not found
    though they are there, whatever the round.
    """
    problem = self._run('PRAGMA integrity_check(1)')[0][0]
    if problem == 'ok':
      return
    problem = next(iter(self._damaged.values()), problem)
    raise ClientStoreError(f'{self.path}: damaged ({problem}). {_DAMAGED}')

  def _damage(self) -> dict[int, str]:
    """The saved rounds whose states are not what was saved, and what is not."""
    saved = self._saved()
    rounds = [row.round for row in saved]
    # What a version adds counts from its round on, until the client's next.
    clients, totals = [0] * (len(saved) + 1), [0] * (len(saved) + 1)
    altered = None
    last: tuple[Any, int, int] = ('', 0, 0)
    for client, number, state, checksum in self._connected.execute(
      'SELECT client, round, state, checksum FROM states ORDER BY client, round'
    ):
      if _checksum_of_version(client, number, state) != checksum:
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

  def _check_round(self, number: int) -> None:
    """Refuses a round whose states are damaged, and says which are not."""
    if number not in self._damaged:
      return
    before = [each for each in self._rounds() if each < number]
    whole = [each for each in before if each not in self._damaged]
    remedy = f'{_COPY[0].upper()}{_COPY[1:]}.'
    if whole:
      remedy = (
        f'Go back to an older checkpoint, for the states of the rounds {whole} '
        'are whole: delete the later rounds from the folder of checkpoints and '
        f'run the same command again. Or {_COPY}.'
      )
    raise ClientStoreError(
      f'{self.path}: what clients remember after round {number} is damaged '
      f'({self._damaged[number]}). {remedy}'
    )

  def _claim(self, folder: pathlib.Path) -> None:
    try:
      folder.mkdir(parents=True, exist_ok=True)
      self._lock = checkpoints.locked(folder)
      # For its owner alone; SQLite's journals follow the file.
      os.close(os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o600))
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
      return self._abouts().get(name)

  def _abouts(self) -> dict[str, str]:
    notes = {}
    for name, value, checksum in self._run('SELECT * FROM about'):
      if _checksum(name, value) != checksum:
        raise ClientStoreError(
          f'{self.path}: what is noted as {name!r} is damaged. {_DAMAGED}'
        )
      notes[name] = value
    return notes

  def describe(self, **notes: str) -> None:
    """Notes something about the store."""
    with self._explained('written'), self._transaction():
      self._describe(**notes)

  def _describe(self, **notes: str) -> None:
    self._connected.executemany(
      'INSERT OR REPLACE INTO about VALUES (?, ?, ?)',
      ((name, value, _checksum(name, value)) for name, value in notes.items()),
    )

  @property
  def deletions(self) -> int:
    """How many clients were deleted so far."""
    return int(self.about(_DELETIONS) or 0)

  def rounds(self) -> list[int]:
    """The rounds whose states can be read, ascending."""
    with self._explained('read'):
      return self._rounds()

  def _rounds(self) -> list[int]:
    return [row.round for row in self._saved()]

  def _saved(self) -> list[_Saved]:
    """What is noted of all rounds that were saved, ascending."""
    saved = []
    for *values, checksum in self._run('SELECT * FROM saved ORDER BY round'):
      if _checksum(*values) != checksum:
        raise ClientStoreError(
          f'{self.path}: what is noted of round {values[0]} is damaged. '
          f'{_DAMAGED}'
        )
      saved.append(_Saved(*values))
    return saved

  def _note(self, saved: Iterable[_Saved]) -> None:
    self._connected.executemany(
      'INSERT OR REPLACE INTO saved VALUES (?, ?, ?, ?, ?)',
      ((*row, _checksum(*row)) for row in saved),
    )

  def versions(self, client_id: str) -> list[int]:
    """The rounds whose versions of one client there are, ascending."""
    with self._explained('read'):
      return list(self._versions(client_id))

  def _versions(self, client_id: str) -> dict[int, int]:
    """The rounds of a client's versions, ascending, to their checksums."""
    query = 'SELECT round, checksum FROM states WHERE client = ? ORDER BY round'
    return dict(self._run(query, client_id))

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
      'SELECT round, state, checksum FROM states WHERE client = ? '
      'AND round <= ? ORDER BY round DESC LIMIT 1'
    )
    last = 2**62 if round_number is None else round_number
    states: list[bytes | None] = []
    with self._explained('read'):
      if self._damaged:
        self._check_round(
          max((n for n in self._rounds() if n <= last), default=0)
        )
      execute = self._connected.execute
      for client in client_ids:
        found = execute(query, (client, last)).fetchone()
        if found is None:
          states.append(None)
          continue
        number, state, checksum = found
        if _checksum_of_version(client, number, state) != checksum:
          raise ClientStoreError(
            f'{self.path}: the state of client {client!r:.80} after round '
            f'{number} is damaged. Run the same command again, which says '
            f'from which checkpoint it can go on, or {_COPY}.'
          )
        states.append(state)
    return states

  def save(
    self,
    round_number: int,
    best: int | None,
    states: Sequence[tuple[str, bytes]],
  ) -> None:
    """Writes new versions, all or none, and drops those of no more use.

    Args:
      round_number: The round after which clients remember this; none before the
        last one that was saved.
      best: The best round so far, whose versions must stay, or None.
      states: Clients that took part since the last save, and their states.

    Raises:
      ClientStoreError: If they cannot be written, such as on a full disk. What
        was written before is kept.
    """
    with self._explained('written'), self._transaction():
      before = self._saved()
      clients, total = before[-1][2:] if before else (0, 0)
      if before and round_number < before[-1].round:
        raise ClientStoreError(
          f'{self.path or "The client store"}: round {round_number} cannot be '
          f'saved after round {before[-1].round}. Go back to a round before.'
        )
      kept = _kept(
        [row for row in before if row.round != round_number]
        # What it counts is not known yet.
        + [_Saved(round_number, best, 0, 0)]
      )
      rounds = [row.round for row in kept]
      rows, useless = [], []
      for client, state in states:
        versions = self._versions(client)
        checksum = _checksum_of_version(client, round_number, state)
        clients += not versions
        total += checksum - next(reversed(versions.values()), 0)
        rows.append((client, round_number, state, checksum))
        if versions:
          versions[round_number] = checksum
          useful = {_version_at(versions, number) for number in rounds}
          useless += [(client, version) for version in {*versions} - useful]
      self._connected.executemany(
        'INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?)', rows
      )
      self._note([_Saved(round_number, best, clients, total)])
      self._prune({row.round for row in before} - {*rounds}, useless)

  def _prune(
    self, rounds: Iterable[int], versions: Iterable[tuple[str, int]]
  ) -> None:
    """Drops rounds, and the versions that none of the others can ask for."""
    self._connected.executemany(
      'DELETE FROM saved WHERE round = ?',
      ((number,) for number in rounds),
    )
    self._connected.executemany(
      'DELETE FROM states WHERE client = ? AND round = ?', versions
    )

  def go_back_to(self, round_number: int) -> None:
    """Drops what was written after the round from which a run goes on.

    Args:
      round_number: That round; 0 for a run that begins.

    Raises:
      ClientStoreError: If the file does not know that round, or what clients
        remembered then is damaged.
    """
    rounds = self.rounds()
    if round_number and round_number not in rounds:
      raise ClientStoreError(
        f'{self.path}: the run goes on from round {round_number}, but this '
        f'client store knows the rounds {rounds} only. It is that of another '
        'run, or an old copy: bring back the one that belongs to the '
        'checkpoints, or choose another output folder.'
      )
    self._check_round(round_number)
    if self._damaged or (rounds and rounds[-1] > round_number):
      with self._explained('written'), self._transaction():
        self._run('DELETE FROM states WHERE round > ?', round_number)
        self._run('DELETE FROM saved WHERE round > ?', round_number)
        if self._damaged:
          self._damaged = self._damage()

  def delete(self, client_id: str) -> int:
    """Deletes all versions of one client; returns how many there were."""
    with self._explained('written'), self._transaction():
      versions = self._versions(client_id)
      if versions:
        before = int(self._abouts().get(_DELETIONS, 0))
        self._describe(**{_DELETIONS: str(before + 1)})
      self._run('DELETE FROM states WHERE client = ?', client_id)
      self._note(
        row._replace(
          clients=row.clients - 1,
          total=row.total - versions[_version_at(versions, row.round)],
        )
        for row in self._saved()
        if _version_at(versions, row.round) in versions
      )
      if self._damaged:
        self._damaged = self._damage()
    return len(versions)

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
    # The latter two if a damaged file's messages are no text, or ask for more
    # memory than there is.
    except (sqlite3.Error, UnicodeDecodeError, MemoryError) as error:
      code = getattr(error, 'sqlite_errorcode', 0) & 0xFF
      remedy = _REMEDIES.get(code, _DAMAGED)
      raise ClientStoreError(
        f'{self.path or "The client store"} cannot be {done}: {error}. {remedy}'
      ) from error


def _kept(saved: Sequence[_Saved]) -> list[_Saved]:
  """Those of some rounds that a run may go back to: the last, and the best."""
  last = saved[-_ROUNDS_KEPT:]
  best = {row.best for row in last}
  return [row for row in saved if row in last or row.round in best]


def _version_at(versions: Iterable[int], number: int) -> int:
  """Which of a client's versions holds after a round; below 0 if none does."""
  return max((version for version in versions if version <= number), default=-1)


def _text(data: bytes) -> str:
  return data.decode(errors='surrogateescape')
