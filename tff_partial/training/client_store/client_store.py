"""Client states between rounds: in memory, or in a file.

Both are one class. For populations that do not fit into memory, the states are
in a file (see `sqlite_backend.py`), and memory holds those of the clients that
took part since the last save, unless they are too many (see `fresh_states.py`).
A program reads and writes whole cohorts, in which a leaf of all clients is one
array; nothing is stacked client by client.

  store = ClientStore(process.initialize_client, seed=0, folder='out/clients')
  states = store.read(client_ids)
  output = process.next(server_state, states, clients)
  store.write(client_ids, output.client_states)
  store.save(round_number)

A client that never took part has an initial state that follows from the seed
and its id alone. It is computed on request, not stored.

Deleting a client overwrites all versions of its state. That cannot undo what
global weights have learned from its updates, nor reach copies of the file,
exports, or what a disk keeps of removed files.
"""

import collections
from collections.abc import Mapping, Sequence
import functools
import itertools
import json
import os
import pathlib
from typing import Any

import numpy as np
import tensorflow_federated as tff

from tff_partial.runtimes.ray_runtime import remote_shards
from tff_partial.runtimes.values import client_batch
from tff_partial.runtimes.values import sources
from tff_partial.runtimes.values import typed_values
from tff_partial.training import files
from tff_partial.training.client_store import deposited_states
from tff_partial.training.client_store import fresh_states
from tff_partial.training.client_store import sqlite_backend
from tff_partial.training.client_store import state_codec
from tff_partial.training.participation import sampling

ClientStoreError = state_codec.ClientStoreError


class ClientStates:
  """Client states after some round, read-only.

  Attributes:
    seed: The run's seed, from which initial states follow.
    round: The round, or None for the last one.
  """

  def __init__(
    self,
    versions: sqlite_backend.Versions,
    initialize_client: tff.Computation,
    seed: int,
    round_number: int | None = None,
  ):
    """Read from an open file; `ClientStore` opens one."""
    self._versions = versions
    self._initialize_client = initialize_client
    self._layout = state_codec.Layout(self.type)
    self.seed, self.round = seed, round_number

  @functools.cached_property
  def _first_program(self) -> remote_shards.Program:
    return remote_shards.Program.of(self._initialize_client)

  @property
  def type(self) -> tff.Type:
    """The type C of a client state."""
    return self._initialize_client.type_signature.result

  def read(self, client_ids: Sequence[str]) -> client_batch.Columns:
    """Return the states of some clients, stored or initial.

    Args:
      client_ids: Distinct ids, in the order of the cohort.

    Returns:
      One value for each client, for `process.next`.

    Raises:
      ClientStoreError: If they cannot be read.
    """
    records, is_new = self._stored(client_ids)
    if is_new.any():
      if self._layout.are_large:
        states = self._with_first(client_ids, records, is_new)
        return self._layout.scattered(states)
      seeds = self._first_seeds(client_ids, is_new)
      first = state_codec.first_states(self._initialize_client, seeds)
      records[is_new] = self._layout.records(first)
    return self._layout.columns(records)

  def read_as(
    self, client_ids: Sequence[str], kind: tff.Type
  ) -> client_batch.Columns:
    """Return the states of some clients, as an evaluation takes them.

    Args:
      client_ids: As for `read`.
      kind: The type that it takes: that of the store, or the same without
        optimizer slots.
    """
    states = self.read(client_ids)
    if kind.is_equivalent_to(self.type):
      return states
    # Optimizer slots come last.
    leaves = states.leaves[: len(typed_values.leaf_names(kind))]
    convert = typed_values.converter(kind)
    return client_batch.Columns.of(len(client_ids), leaves, convert)

  def client(
    self, client_id: str
  ) -> collections.OrderedDict[str, np.ndarray] | None:
    """Return one client's state by leaf; None if it never took part."""
    return look_up(self._versions, client_id, self.round)

  def _first_seeds(
    self, client_ids: Sequence[str], is_new: np.ndarray
  ) -> np.ndarray:
    """Return seeds of the initial states of new clients, int32 `[new, 2]`."""
    new = list(itertools.compress(client_ids, is_new))
    return sampling.client_seeds(new, self.seed, 'first state')

  def _with_first(
    self, client_ids: Sequence[str], records: np.ndarray, is_new: np.ndarray
  ) -> sources.Scattered:
    """Return records, and initial states to be made where clients run."""
    return sources.Scattered.of(
      self._layout.format.specs,
      [
        sources.Held(self._layout.format.columns(records[~is_new])),
        state_codec.FirstStates(
          self._first_program, self._first_seeds(client_ids, is_new)
        ),
      ],
      [np.flatnonzero(~is_new), np.flatnonzero(is_new)],
    )

  def _stored(self, client_ids: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return a record per client, and bool `[clients]`: True if it is new."""
    records = np.empty([len(client_ids)], self._layout.format.record_type)
    states = self._versions.read(client_ids, self.round)
    stored = [state for state in states if state is not None]
    is_new = np.array([state is None for state in states], bool)
    if stored:
      records[~is_new] = self._layout.format.of_bytes(stored)
    return records, is_new


class ClientStore(ClientStates):
  """Client states that are read and written round by round."""

  def __init__(
    self,
    initialize_client: tff.Computation,
    *,
    seed: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    writable: bool = True,
  ):
    """Open a store, or create one.

    Args:
      initialize_client: `process.initialize_client`, which makes the states of
        clients that never took part.
      seed: The run's seed, from which initial states follow; by default that of
        the store, or 0 for a new one.
      folder: Folder of the file, existing or new; None keeps all in memory.
      writable: False to only read; another process may be writing.

    Raises:
      ClientStoreError: If there is no store to read, it cannot be used, another
        process is writing to it, or it has another type or seed.
    """
    kind = initialize_client.type_signature.result
    layout = state_codec.Layout(kind)
    if not layout.format.record_type.names:
      raise ClientStoreError(
        f'Clients that remember nothing ({kind}) need no client store.'
      )
    versions = sqlite_backend.Versions(folder, writable=writable)
    try:
      seed = _checked(versions, layout.format, seed)
    except BaseException:
      versions.close()
      raise
    super().__init__(versions, initialize_client, seed)
    self._fresh = self._no_fresh_states()
    self._deposited = deposited_states.DepositedStates(self._layout)

  def _no_fresh_states(self) -> fresh_states.FreshStates:
    path = self._versions.path
    return fresh_states.FreshStates(
      self._layout, None if path is None else path.parent
    )

  @property
  def path(self) -> pathlib.Path | None:
    """The file, or None if all is in memory."""
    return self._versions.path

  @property
  def rounds(self) -> list[int]:
    """The rounds that `at` accepts, ascending."""
    return self._versions.rounds()

  def client(
    self, client_id: str
  ) -> collections.OrderedDict[str, np.ndarray] | None:
    """Return one client's state by leaf; None if it never took part."""
    form = self._layout.format
    if client_id in self._deposited:
      leaves = self._deposited.read([client_id]).leaves()
      return form.by_leaf(form.records(leaves, 1)[0])
    record = np.empty([1], form.record_type)
    if self._fresh.read([client_id], record).any():
      return super().client(client_id)
    return form.by_leaf(record[0])

  def read(self, client_ids: Sequence[str]) -> client_batch.Columns:
    """Return the states of some clients; see `ClientStates.read`.

    States in files of workers are left for the workers to read.
    """
    is_deposited = [client in self._deposited for client in client_ids]
    if not any(is_deposited):
      return super().read(client_ids)
    here = list(itertools.compress(client_ids, is_deposited))
    others = np.flatnonzero(np.logical_not(is_deposited))
    states = self._deposited.read(here)
    if others.size:
      ids = [client_ids[place] for place in others]
      found = self._with_first(ids, *self._stored(ids))
      states = states.with_others(others, found)
    return self._layout.scattered(states)

  def _stored(self, client_ids: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    records = np.empty([len(client_ids)], self._layout.format.record_type)
    is_new = self._fresh.read(client_ids, records)
    others = np.flatnonzero(is_new)
    records[others], is_new[others] = super()._stored(
      [client_ids[place] for place in others]
    )
    return records, is_new

  def write(self, client_ids: Sequence[str], states: Sequence[Any]) -> None:
    """Take the client states after a round; `save` makes them durable.

    Args:
      client_ids: Distinct ids of the clients that took part.
      states: A state for each, as `process.next` returned them.
    """
    if len(states) != len(client_ids):
      raise ClientStoreError(
        f'There are {len(states)} states for {len(client_ids)} clients.'
      )
    if not client_ids:
      return
    scattered = self._layout.where_they_lie(states)
    if scattered is not None:
      self._deposited.write(client_ids, scattered)
      for client in client_ids:
        self._fresh.delete(client)
      return
    self._fresh.write(client_ids, self._layout.records(states))
    for client in client_ids:
      self._deposited.forget(client)

  def save(self, round_number: int, best: int | None = None) -> None:
    """Save what was written, before the server's checkpoint of the round.

    Args:
      round_number: The round after which clients have these states.
      best: The best round so far, kept for `at`; or None.

    Raises:
      ClientStoreError: If it cannot be saved. Earlier saves are kept.
    """
    states = itertools.chain(self._fresh.states(), self._deposited.unsaved())
    self._versions.save(round_number, best, states)
    self._forget_fresh_states()
    self._deposited.saved()

  def go_back_to(self, round_number: int) -> None:
    """Drop client states after the round from which a run resumes.

    Args:
      round_number: That round; 0 for a new run.

    Raises:
      ClientStoreError: If that round was not saved here.
    """
    self._versions.go_back_to(round_number)
    self._forget_fresh_states()
    self._deposited = deposited_states.DepositedStates(self._layout)

  def _forget_fresh_states(self) -> None:
    self._fresh.close()
    self._fresh = self._no_fresh_states()

  def at(self, round_number: int) -> ClientStates:
    """Return the client states after a saved round.

    Args:
      round_number: One of the last rounds that were saved, or the best one.

    Raises:
      ClientStoreError: If its states are gone, or were never saved.
    """
    if round_number not in self.rounds:
      raise ClientStoreError(
        f'{self.path or "The client store"} does not hold the states of round '
        f'{round_number}, but those of the rounds {self.rounds}.'
      )
    return ClientStates(
      self._versions, self._initialize_client, self.seed, round_number
    )

  @property
  def deletions(self) -> int:
    """The number of saved clients that were deleted so far."""
    return self._versions.deletions

  def delete(self, client_id: str) -> bool:
    """Forget a client: if it takes part again, it starts afresh.

    All versions are overwritten at once, so that none comes back when a run is
    resumed. The module's docstring lists what that cannot undo.

    Args:
      client_id: The client to forget.

    Returns:
      True if there was anything to forget.

    Raises:
      ClientStoreError: If the file cannot be changed.
    """
    were_saved = self._versions.delete(client_id) > 0
    was_deposited = self._deposited.delete(client_id)
    return self._fresh.delete(client_id) or was_deposited or were_saved

  def release(self) -> None:
    """Let other processes write to the file; it can still be read here."""
    self._versions.release()

  def close(self) -> None:
    """Close the file; unsaved states are lost."""
    self._fresh.close()
    self._deposited = deposited_states.DepositedStates(self._layout)
    self._versions.close()


def _checked(
  versions: sqlite_backend.Versions,
  layout: state_codec.Format,
  seed: int | None,
) -> int:
  """Check a store against a layout and a seed; return its seed."""
  known, drawn = versions.about('layout'), versions.about('seed')
  # A run may have been killed before it described its store.
  if known is None and drawn is None and not versions.rounds():
    versions.describe(layout=layout.text, seed=str(seed or 0))
    return seed or 0
  if known is None or drawn is None:
    raise ClientStoreError(
      f'{versions.path}: this client store lacks its '
      f'{"layout" if known is None else "seed"}, so it is damaged. Bring it '
      'back from a copy, or delete the whole output folder to begin anew.'
    )
  if known != layout.text:
    raise ClientStoreError(
      f'{versions.path}: this client store is that of another model or '
      f'algorithm. Its clients remember {state_codec.Format(known)}; '
      f'here they remember {layout}. Give the flags '
      'of the run that made it, or choose another output folder.'
    )
  if seed is not None and seed != int(drawn):
    raise ClientStoreError(
      f'{versions.path}: the run that made this client store has the seed '
      f'{drawn}, here it is {seed}. Give the same seed, or choose another '
      'output folder.'
    )
  return int(drawn)


def look_up(
  versions: sqlite_backend.Versions,
  client_id: str,
  round_number: int | None = None,
) -> collections.OrderedDict[str, np.ndarray] | None:
  """Return one client's state, for readers of the file without a process.

  Args:
    versions: The file.
    client_id: The client.
    round_number: The round after which to read; the last one if None.

  Returns:
    Its leaves by name, or None if it never took part or was deleted.

  Raises:
    ClientStoreError: If the file cannot be read.
  """
  (state,) = versions.read([client_id], round_number)
  layout = versions.about('layout')
  if state is None or layout is None:
    return None
  form = state_codec.Format(layout)
  (record,) = form.of_bytes([state])
  return form.by_leaf(record)


def export(
  state: Mapping[str, np.ndarray], path: str | os.PathLike[str]
) -> None:
  """Write one client's state to a file.

  Args:
    state: Its leaves by name, as `client` or `look_up` return them.
    path: A file that ends in `.json`, or in `.npz` for `numpy.load`.

  Raises:
    ClientStoreError: If the ending differs, or the file cannot be written.
  """
  path = pathlib.Path(path)
  try:
    if path.suffix == '.npz':
      np.savez(path, **state)
    elif path.suffix == '.json':
      nested = {name: leaf.tolist() for name, leaf in state.items()}
      path.write_text(json.dumps(nested, indent=2) + '\n')
    else:
      raise ClientStoreError(
        f'{path}: a state is exported to a file that ends in .json or .npz.'
      )
  except OSError as error:
    raise ClientStoreError(
      f'{path} cannot be written: {files.first_line(error)} Choose '
      'another file or make room.'
    ) from error
