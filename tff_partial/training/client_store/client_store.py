"""Client states between rounds: in memory, or in a file.

Both are one class. For populations that do not fit into memory, the states are
in a file (see `sqlite_backend.py`), and memory holds those of the clients that
took part since the last save, which is due once they are many (`is_full`). A
program reads and writes whole cohorts, in which a leaf of all clients is one
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
from collections.abc import Iterator, Mapping, Sequence
import functools
import itertools
import json
import os
import pathlib
from typing import Any, TypeAlias

import numpy as np
import tensorflow_federated as tff

from tff_partial.runtimes.values import client_batch
from tff_partial.runtimes.values import sources
from tff_partial.runtimes.values import typed_values
from tff_partial.training import files
from tff_partial.training import sampling
from tff_partial.training.client_store import fresh_states
from tff_partial.training.client_store import sqlite_backend
from tff_partial.training.client_store import state_codec

ClientStoreError = state_codec.ClientStoreError

# Bytes of states in memory from which a store with a file should be saved.
_FULL_BYTES = 1 << 28
# Initial states of so many bytes are made where their clients run.
_LARGE_BYTES = 1 << 14
# Bytes read at once for a save.
_SAVED_BYTES = 1 << 24
# States, and the places of their clients in a cohort.
_Part: TypeAlias = tuple[sources.Scattered, np.ndarray]


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
    self._format = state_codec.Format.of_type(self.type)
    self._converter = state_codec.Converter(self.type)
    self.seed, self.round = seed, round_number

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
    parts = [*self._parts(client_ids, np.arange(len(client_ids)))]
    states = sources.Scattered.joined(self._format.specs, parts)
    return self._converter.columns(states)

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

  def has_learned(self, client_id: str) -> bool:
    """Return True if a client's state is not its first one.

    It still is if a client's losses or weights were not finite in any round.
    """
    held, first = self.read([client_id]), self._first([client_id])
    pairs = zip(held.leaves, first.leaves(), strict=True)
    return not all(np.array_equal(own[0], new[0]) for own, new in pairs)

  def _parts(
    self, client_ids: Sequence[str], places: np.ndarray
  ) -> Iterator[_Part]:
    """Yield stored states, and initial states of clients without."""
    states = self._versions.read(client_ids, self.round)
    is_new = np.array([state is None for state in states], bool)
    if stored := [state for state in states if state is not None]:
      leaves = self._format.decode(stored)
      known = sources.Scattered.held(self._format.specs, leaves)
      yield known, places[~is_new]
    if not is_new.any():
      return
    yield self._first([*itertools.compress(client_ids, is_new)]), places[is_new]

  def _first(self, client_ids: Sequence[str]) -> sources.Scattered:
    """Return the initial states of clients."""
    seeds = sampling.client_seeds(client_ids, self.seed, 'first state')
    if (self._format.num_bytes or 0) < _LARGE_BYTES:
      made = state_codec.first_states(self._initialize_client, seeds)
      return self._converter.scattered(made)
    source = state_codec.FirstStates.of(self._initialize_client, seeds)
    places = [np.arange(len(client_ids))]
    return sources.Scattered.of(self._format.specs, [source], places)


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
    form = state_codec.Format.of_type(initialize_client.type_signature.result)
    versions = sqlite_backend.Versions(folder, writable=writable)
    try:
      seed = _checked(versions, form, seed)
    except BaseException:
      versions.close()
      raise
    super().__init__(versions, initialize_client, seed)
    self._fresh = fresh_states.FreshStates(form.specs)

  @property
  def path(self) -> pathlib.Path | None:
    """The file, or None if all is in memory."""
    return self._versions.path

  @property
  def rounds(self) -> list[int]:
    """The rounds that `at` accepts, ascending."""
    return self._versions.rounds()

  @property
  def is_full(self) -> bool:
    """True if states take so much memory that they should be saved."""
    return self.path is not None and self._fresh.num_bytes > _FULL_BYTES

  def client(
    self, client_id: str
  ) -> collections.OrderedDict[str, np.ndarray] | None:
    """Return one client's state by leaf; None if it never took part."""
    if client_id not in self._fresh:
      return super().client(client_id)
    leaves = self._fresh.read([client_id]).leaves()
    return self._format.by_leaf(self._format.encode(leaves, 1)[0])

  def _parts(
    self, client_ids: Sequence[str], places: np.ndarray
  ) -> Iterator[_Part]:
    is_fresh = np.array([client in self._fresh for client in client_ids], bool)
    if is_fresh.any():
      fresh = list(itertools.compress(client_ids, is_fresh))
      yield self._fresh.read(fresh), places[is_fresh]
    others = list(itertools.compress(client_ids, ~is_fresh))
    yield from super()._parts(others, places[~is_fresh])

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
    if client_ids:
      self._fresh.write(client_ids, self._converter.scattered(states))

  def save(self, round_number: int, best: int | None = None) -> None:
    """Save what was written, before the server's checkpoint of the round.

    Args:
      round_number: The round after which clients have these states.
      best: The best round so far, kept for `at`; or None.

    Raises:
      ClientStoreError: If it cannot be saved. Earlier saves are kept.
    """
    at_once = max(1, _SAVED_BYTES // (self._format.num_bytes or _LARGE_BYTES))
    states = (
      state
      for clients, leaves in self._fresh.unsaved(at_once)
      for state in zip(
        clients, self._format.encode(leaves, len(clients)), strict=True
      )
    )
    self._versions.save(round_number, best, states)
    self._fresh.saved()

  def go_back_to(self, round_number: int) -> None:
    """Drop client states after the round from which a run resumes.

    Args:
      round_number: That round; 0 for a new run.

    Raises:
      ClientStoreError: If that round was not saved here.
    """
    self._versions.go_back_to(round_number)
    self._fresh = fresh_states.FreshStates(self._format.specs)

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
    return self._versions.about('deletions') or 0

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
    return self._fresh.delete(client_id) or were_saved

  def release(self) -> None:
    """Let other processes write to the file; it can still be read here."""
    self._versions.release()

  def close(self) -> None:
    """Close the file; unsaved states are lost."""
    self._fresh = fresh_states.FreshStates(self._format.specs)
    self._versions.close()


def _checked(
  versions: sqlite_backend.Versions,
  layout: state_codec.Format,
  seed: int | None,
) -> int:
  """Check a store against a layout and a seed; return its seed."""
  known, drawn = versions.about('layout'), versions.about('seed')
  # A run may have been killed before it described its store.
  if known is None or drawn is None:
    versions.describe(layout=layout.text, seed=str(seed or 0))
    return seed or 0
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

  By default it is the state after the last round.

  Returns:
    Its leaves by name, or None if it never took part or was deleted.

  Raises:
    ClientStoreError: If the file cannot be read.
  """
  (state,) = versions.read([client_id], round_number)
  layout = versions.about('layout')
  if state is None or layout is None:
    return None
  return state_codec.Format(layout).by_leaf(state)


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
  if path.suffix not in ('.json', '.npz'):
    raise ClientStoreError(
      f'{path}: a state is exported to a file that ends in .json or .npz.'
    )
  remedy = functools.partial(files.choose_another, place='file')
  with (
    files.writing(f'{path} cannot be written', remedy, ClientStoreError),
    files.replacing(path) as made,
  ):
    if path.suffix == '.npz':
      np.savez(made, **state)
    else:
      nested = {name: leaf.tolist() for name, leaf in state.items()}
      made.write_text(json.dumps(nested, indent=2) + '\n')
