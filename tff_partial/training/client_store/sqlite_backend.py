"""SQLite file of client states: a row for each client and version.

A version is a client's state since some round. The versions of a round are
written in one transaction before the server's checkpoint of that round appears,
at a cost proportional to the clients that took part. Older versions stay as
long as a run may go back to them: to a checkpoint that is kept, to the one
before if the newest was damaged, and to the best round. So whenever a run is
killed, the file holds the states that belong to the server's checkpoint.

Checksums cover the whole file. That of a version is over the client's name, the
round and the state, and is compared whenever the version is read. With each
saved round, the file notes how many clients have a state then, and the sum of
their checksums: so no client can be lost or renamed unnoticed. These sums are
updated at each save, at a cost proportional to the clients that took part, and
are compared with the whole file when it is opened: three seconds for a million
clients.
"""

from collections.abc import Iterable, Sequence

from tff_partial.training import files
from tff_partial.training.client_store import sqlite_file
from tff_partial.training.client_store import state_codec
from tff_partial.training.client_store.sqlite_file import checksum_of
from tff_partial.training.client_store.sqlite_file import checksum_of_version
from tff_partial.training.client_store.sqlite_file import COPY
from tff_partial.training.client_store.sqlite_file import Saved

ClientStoreError = state_codec.ClientStoreError
FILE = sqlite_file.FILE

# Name of the note on deletions.
_DELETIONS = 'deletions'
# Bytes written at once.
_BYTES_AT_ONCE = 1 << 24
# The checkpoints that are kept, and the one that is about to appear.
_ROUNDS_KEPT = files.NUM_KEPT + 1


class Versions(sqlite_file.File):
  """Versions of client states, as bytes.

  Attributes:
    path: The file, or None if they are in memory.
    writable: True if this process may change them.
  """

  @property
  def deletions(self) -> int:
    """The number of clients deleted so far."""
    return int(self.about(_DELETIONS) or 0)

  def _check_round(self, number: int) -> None:
    """Refuse a round with damaged states, and name whole ones."""
    if number not in self._damaged:
      return
    before = [each for each in self._rounds() if each < number]
    whole = [each for each in before if each not in self._damaged]
    remedy = f'{COPY[0].upper()}{COPY[1:]}.'
    if whole:
      remedy = (
        f'Go back to an older checkpoint, for the states of the rounds {whole} '
        'are whole: delete the later rounds from the folder of checkpoints and '
        f'run the same command again. Or {COPY}.'
      )
    raise ClientStoreError(
      f'{self.path}: what clients remember after round {number} is damaged '
      f'({self._damaged[number]}). {remedy}'
    )

  def _note(self, saved: Iterable[Saved]) -> None:
    self._connected.executemany(
      'INSERT OR REPLACE INTO saved VALUES (?, ?, ?, ?, ?)',
      ((*row, checksum_of(*row)) for row in saved),
    )

  def versions(self, client_id: str) -> list[int]:
    """Return the rounds of one client's versions, ascending."""
    with self._explained('read'):
      return list(self._versions(client_id))

  def _versions(self, client_id: str) -> dict[int, int]:
    """Return the rounds of a client's versions, ascending, to checksums."""
    query = 'SELECT round, checksum FROM states WHERE client = ? ORDER BY round'
    return dict(self._run(query, client_id))

  def read(
    self, client_ids: Iterable[str], round_number: int | None = None
  ) -> list[bytes | None]:
    """Return client states after a round; None for new clients.

    Args:
      client_ids: The clients.
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
    with self._explained('read'), self._as_of_one_moment():
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
        if checksum_of_version(client, number, state) != checksum:
          raise ClientStoreError(
            f'{self.path}: the state of client {client!r:.80} after round '
            f'{number} is damaged. Run the same command again, which says '
            f'from which checkpoint it can go on, or {COPY}.'
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
        # Its counts are not known yet.
        + [Saved(round_number, best, 0, 0)]
      )
      rounds = [row.round for row in kept]
      rows: list[tuple[str, int, bytes, int]] = []
      useless: list[tuple[str, int]] = []
      waiting = 0
      for client, state in states:
        versions = self._versions(client)
        checksum = checksum_of_version(client, round_number, state)
        clients += not versions
        total += checksum - next(reversed(versions.values()), 0)
        rows.append((client, round_number, state, checksum))
        if versions:
          versions[round_number] = checksum
          useful = {_version_at(versions, number) for number in rounds}
          useless += [(client, version) for version in {*versions} - useful]
        waiting += len(state)
        if waiting > _BYTES_AT_ONCE:
          self._add(rows)
          rows, waiting = [], 0
      self._add(rows)
      self._note([Saved(round_number, best, clients, total)])
      self._prune({row.round for row in before} - {*rounds}, useless)

  def _add(self, rows: Iterable[tuple[str, int, bytes, int]]) -> None:
    self._connected.executemany(
      'INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?)', rows
    )

  def _prune(
    self, rounds: Iterable[int], versions: Iterable[tuple[str, int]]
  ) -> None:
    """Drop rounds, and the versions that no other round needs."""
    self._connected.executemany(
      'DELETE FROM saved WHERE round = ?',
      ((number,) for number in rounds),
    )
    self._connected.executemany(
      'DELETE FROM states WHERE client = ? AND round = ?', versions
    )

  def go_back_to(self, round_number: int) -> None:
    """Drop whatever was written after the round from which a run resumes.

    Args:
      round_number: That round; 0 for a new run.

    Raises:
      ClientStoreError: If the file does not know that round, or its client
        states are damaged.
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
    """Delete all versions of one client; return their number."""
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


def _kept(saved: Sequence[Saved]) -> list[Saved]:
  """Return the rounds that a run may go back to: the last, and the best."""
  last = saved[-_ROUNDS_KEPT:]
  best = {row.best for row in last}
  return [row for row in saved if row in last or row.round in best]


def _version_at(versions: Iterable[int], number: int) -> int:
  """Return a client's version after a round; below 0 if there is none."""
  return max((version for version in versions if version <= number), default=-1)
