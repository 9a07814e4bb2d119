"""Independent aggregation: Eqs. 2 and 3 of FURL, checked on a process.

See `split_personalization.py` for the equations.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
import math
from typing import Any

import numpy as np
import tensorflow_federated as tff

from tff_partial import processes
from tff_partial import random_bits
from tff_partial import runtimes
from tff_partial import tiers
from tff_partial.checks.split_personalization import CheckError
from tff_partial.checks.split_personalization import Report
from tff_partial.checks.split_personalization import Violation
from tff_partial.data import cohorts
from tff_partial.data import examples as examples_lib
from tff_partial.runtimes.program import flat_program
from tff_partial.runtimes.values import typed_values
from tff_partial.training import metrics_log
from tff_partial.training import sampling
from tff_partial.training.client_store import state_codec

# Standard deviation of the noise that is added to client states.
_FAR = 0.1

# A structure as a mapping from the path of each leaf to its array.
Leaves = dict[str, np.ndarray]


def _leaves(value: Any, type_spec: tff.Type) -> Leaves:
  flat = tff.structure.flatten(
    tff.structure.from_container(value, recursive=True)
  )
  names = typed_values.leaf_names(type_spec)
  return dict(zip(names, map(np.asarray, flat), strict=True))


def _changes(one: Leaves, other: Leaves) -> dict[str, float]:
  """Return the largest change of each leaf that changed, by path."""
  sizes = {
    path: float(np.max(np.abs(array.astype(float) - other[path].astype(float))))
    for path, array in one.items()
    if array.tobytes() != other[path].tobytes()
  }
  return {path: size for path, size in sizes.items() if size != 0}


def _sent(process: processes.PartialProcess) -> Iterator[Violation]:
  """Yield a violation for each local variable in a type at the server."""
  program = flat_program.Program(process.next)
  at_server = [
    step.type_spec
    for step in program.steps.values()
    if step.kind is not flat_program.Kind.CLIENT
  ]
  at_server += [
    argument.type_spec
    for argument in program.arguments.values()
    if not argument.is_at_clients
  ]
  paths = [f'/{p}' for t in at_server for p in typed_values.leaf_names(t)]
  # A name may end in another's: the longest is that of the variable.
  names = sorted(process.model.tier_of, key=len, reverse=True)
  sent = {
    next((name for name in names if path.endswith(f'/{name}')), None)
    for path in paths
  }
  for name in process.model.specs(tiers.LOCAL):
    if name in sent:
      yield Violation(2, name, math.inf, 'is sent to the server')


class _Rounds:
  """Rounds of the same clients with different client states."""

  def __init__(
    self,
    process: processes.PartialProcess,
    clients: cohorts.ClientSource,
    num_clients: int,
    seed: int,
  ):
    ids = clients.client_ids[:num_clients]
    if len(ids) < 2:
      raise CheckError(
        f'The check needs two clients or more, found {len(ids)}.'
      )
    self._process = process
    self._seed = random_bits.derive(seed, 'check')
    seeds = sampling.client_seeds(ids, seed, 'check')
    self.values = list(clients.cohort(ids, seeds))
    self._state = process.initialize()
    self.kept = state_codec.first_states(process.initialize_client, seeds)
    # After a round, clients have states that only participants have.
    output = self._output(self.kept, self.values)
    self._state, self.kept = output.state, output.client_states

  def _output(self, kept: Any, values: Any) -> processes.PartialProcessOutput:
    output = self._process.next(self._state, kept, values)
    metrics = metrics_log.flatten(output.metrics)
    if metrics['client_work/train/num_not_finite']:
      raise CheckError(
        'The losses or weights of a client are not finite, so that it counts '
        'for nothing. Lower the learning rates.'
      )
    return output

  def run(self, kept: Any, values: Any) -> tuple[Leaves, list[Leaves]]:
    """Run a round and return the new server state and client states."""
    output = self._output(kept, values)
    result = self._process.next.type_signature.result
    return _leaves(output.state, result.state), [
      _leaves(own, result.client_states) for own in output.client_states
    ]

  def moved(self, who: Sequence[int]) -> list[Any]:
    """Return client states, with noise added for some clients."""

    def move(client: int) -> Any:
      places = iter(range(1 << 20))
      own_seed = random_bits.fold_in(self._seed, client)

      def draw(array: Any) -> Any:
        array = np.asarray(array)
        if array.dtype.kind != 'f':
          return array
        seed = random_bits.fold_in(own_seed, next(places))
        drawn = random_bits.normal(seed, array.shape, stddev=_FAR)
        return (array + drawn.numpy()).astype(array.dtype)

      return examples_lib.map_fields(draw, self.kept[client])

    return [
      move(client) if client in who else kept
      for client, kept in enumerate(self.kept)
    ]

  def silent(self, who: Sequence[int]) -> list[Any]:
    """Return the clients' data, with zero example weights for some."""

    def silence(value: Any) -> Any:
      examples = collections.OrderedDict(value['examples'])
      examples['weight'] = np.zeros_like(examples['weight'])
      return collections.OrderedDict(value, examples=examples)

    return [
      silence(value) if client in who else value
      for client, value in enumerate(self.values)
    ]


@runtimes.ours()
def check_independent_aggregation(
  process: processes.PartialProcess,
  clients: cohorts.ClientSource,
  *,
  num_clients: int = 4,
  seed: int = 0,
) -> Report:
  """Check Eqs. 2 and 3 on a process, under the current runtime.

  No type at the server may name a local variable. Then rounds are run in which
  some clients have other states. Eq. 3: the new states of the other clients
  must be the same, bit for bit. Eq. 2: so must the server's new state, if the
  examples of the changed clients have no weight, so that they train nothing. A
  loss that ties federated weights to private ones without examples is therefore
  a violation.

  Args:
    process: The algorithm.
    clients: Clients with examples; the first ones take part.
    num_clients: Number of clients n, for about 6 + 2 log2(n) rounds.
    seed: Seed of all random draws.

  Raises:
    CheckError: If there are fewer than two clients, if their training is not
      finite, or if a repeated round gives other numbers.
  """
  found = {(v.equation, v.variable): v for v in _sent(process)}
  if process.is_stateless:
    return Report((2, 3), tuple(found.values()))
  rounds = _Rounds(process, clients, num_clients, seed)

  def note(equation: int, what: str, changes: Mapping[str, float]) -> None:
    for path, size in changes.items():
      known = found.setdefault(
        (equation, path), Violation(equation, path, size, what)
      )
      found[equation, path] = known._replace(size=max(size, known.size))

  usual = rounds.run(rounds.kept, rounds.values)
  again = rounds.run(rounds.kept, rounds.values)
  if _changes(usual[0], again[0]):
    raise CheckError(
      'The same round, repeated, comes to other numbers: it draws noise that '
      'follows from no seed. Check the process without the noise.'
    )
  everybody = range(len(rounds.values))
  # The numbers of any two clients differ in some bit.
  for bit in range((len(everybody) - 1).bit_length()):
    for side in (0, 1):
      some = [client for client in everybody if client >> bit & 1 == side]
      moved = rounds.moved(some)
      _, kept = rounds.run(moved, rounds.values)
      for client in everybody:
        if client not in some:
          note(
            3,
            'is remembered by a client and depends on what others remember',
            _changes(usual[1][client], kept[client]),
          )
      if not bit:
        silent = rounds.silent(some)
        note(
          2,
          'is at the server and depends on what clients remember',
          _changes(
            rounds.run(rounds.kept, silent)[0], rounds.run(moved, silent)[0]
          ),
        )
  return Report((2, 3), tuple(found.values()))
