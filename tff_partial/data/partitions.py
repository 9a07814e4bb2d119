"""Partitions of one data set among clients.

A partition maps a client's id to the indices of its examples;
`tff_partial.from_arrays` makes clients from it:

    partition = tff_partial.partitions.dirichlet(y, 100, alpha=0.3, seed=0)
    clients = tff_partial.from_arrays({'x': x, 'y': y}, partition, spec)

Each example belongs to exactly one client, and the same seed gives the same
partition everywhere.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from tff_partial import random_bits
from tff_partial.arguments import checked_numbers
from tff_partial.data.examples import ClientDataError
from tff_partial.data.vocabularies import is_missing

# Client to the indices of its examples, int `[examples of the client]`.
Partition: TypeAlias = dict[str, np.ndarray]


def iid(num_examples: int, num_clients: int, *, seed: int = 0) -> Partition:
  """Give clients equally many examples, drawn uniformly.

  Raises:
    ClientDataError: If there are more clients than examples.
  """
  _check_clients(num_clients, num_examples)
  drawn = random_bits.generator(seed, 'iid').permutation(num_examples)
  return _named(np.array_split(drawn, num_clients))


def dirichlet(
  labels: Any,
  num_clients: int,
  alpha: float,
  *,
  min_examples: int = 1,
  seed: int = 0,
) -> Partition:
  """Divide each label among all clients by shares from a Dirichlet.

  A large `alpha` gives clients the same mixture of labels, a small one only one
  or two labels each (Yurochkin et al., ICML 2019). Clients also differ in size.

  Args:
    labels: `[examples]`, integers or strings.
    num_clients: Number of clients.
    alpha: The concentration, at least 1e-6.
    min_examples: Clients drawn with fewer get more, one at a time, from the
      client with the most; 0 allows clients without examples.
    seed: Seed of shares and examples.

  Raises:
    ClientDataError: If a number is invalid, or there are too few examples.
  """
  labels = _checked_labels(labels)
  # NumPy takes a time like 1 / alpha; a sum of larger draws would be infinite.
  if not 1e-6 <= alpha < 1e300:
    raise ClientDataError(
      f'alpha={alpha}: expected a concentration of at least 1e-6. Try 0.1 for '
      'clients of few labels, 100 for clients that are alike.'
    )
  _check_clients(num_clients, len(labels), min_examples)
  held: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
  for label in np.unique(labels):
    draw = random_bits.generator(seed, 'dirichlet', label.item())
    examples = draw.permutation(np.flatnonzero(labels == label))
    shares = np.cumsum(draw.dirichlet(np.full(num_clients, alpha)))
    ends = np.rint(len(examples) * shares[:-1]).astype(int)
    for mine, piece in zip(held, np.split(examples, ends), strict=True):
      mine.append(piece)
  joined = _shuffled(held, seed)
  _level(joined, min_examples)
  return _named(joined)


def _level(held: list[np.ndarray], least: int) -> None:
  """Move single examples from the largest clients to those with too few."""
  for place, mine in enumerate(held):
    while len(mine) < least:
      most = max(range(len(held)), key=lambda other: len(held[other]))
      mine = np.append(mine, held[most][-1])
      held[place], held[most] = mine, held[most][:-1]


def shards(
  labels: Any, num_clients: int, shards_per_client: int = 2, *, seed: int = 0
) -> Partition:
  """Sort examples by label, cut them into shards, and distribute these.

  So most clients have examples of few labels (McMahan et al., AISTATS 2017).

  Args:
    labels: `[examples]`, integers or strings.
    num_clients: Number of clients.
    shards_per_client: Number of shards of each; shards differ in size by at
      most one example.
    seed: Seed of the shards' contents and of their assignment.

  Raises:
    ClientDataError: If there are more shards than examples.
  """
  labels = _checked_labels(labels)
  checked_numbers.check_whole(
    ClientDataError, 1, shards_per_client=shards_per_client
  )
  _check_clients(num_clients, len(labels), shards_per_client)
  draw = random_bits.generator(seed, 'shards')
  order = draw.permutation(len(labels))
  order = order[np.argsort(labels[order], kind='stable')]
  pieces = np.array_split(order, num_clients * shards_per_client)
  dealt = draw.permutation(len(pieces)).reshape([num_clients, -1])
  return _named(
    _shuffled([[pieces[shard] for shard in mine] for mine in dealt], seed)
  )


def by_label(
  labels: Any,
  num_clients: int,
  labels_per_client: int = 2,
  *,
  min_examples: int = 1,
  seed: int = 0,
) -> Partition:
  """Give clients different numbers of examples of a few labels each.

  As in the experiments of pFedMe (Dinh et al., NeurIPS 2020), client i has the
  labels i, i + 1, ..., modulo their number, and its sizes are drawn from a
  lognormal distribution. All examples of a label are divided among the clients
  that hold it: `min_examples` to each, and the others in proportion to their
  draws. pFedMe draws with a deviation of 2 of the logarithm and then adds a
  constant; 0.5 without a constant gives a similar spread, a ratio of largest to
  smallest of about three.

  Args:
    labels: `[examples]`, integers or strings.
    num_clients: Number of clients. If there are fewer than labels, examples of
      labels that no client holds are left out.
    labels_per_client: Number of labels of each.
    min_examples: Minimum number of a client's examples of each of its labels.
    seed: Seed of shares and examples.

  Raises:
    ClientDataError: If a number is invalid, or there are too many clients.
  """
  labels = _checked_labels(labels)
  known = np.unique(labels)
  _check_clients(num_clients, len(labels), min_examples)
  if not 1 <= labels_per_client <= len(known):
    raise ClientDataError(
      f'{num_clients} clients with {labels_per_client} labels each are not '
      f'possible. Give 1 to {len(known)} labels.'
    )
  holders: dict[int, list[int]] = {label: [] for label in range(len(known))}
  for client in range(num_clients):
    for offset in range(labels_per_client):
      holders[(client + offset) % len(known)].append(client)
  held: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
  for place, clients in holders.items():
    examples = np.flatnonzero(labels == known[place])
    rest = len(examples) - min_examples * len(clients)
    if clients and rest < 0:
      raise ClientDataError(
        f'{len(clients)} clients would share {len(examples)} examples of label '
        f'{known[place]}, and {min_examples} are the least for each. Give '
        'fewer clients, or fewer labels to each.'
      )
    draw = random_bits.generator(seed, 'labels', known[place].item())
    examples = draw.permutation(examples)
    shares = np.cumsum(draw.lognormal(0.0, 0.5, len(clients)))
    ends = min_examples * np.arange(1, len(clients) + 1) + np.rint(
      rest * shares / shares[-1:]
    ).astype(int)
    pieces = np.split(examples, ends[:-1])
    for client, mine in zip(clients, pieces, strict=False):
      held[client].append(mine)
  return _named(_shuffled(held, seed))


def by_owner(owners: Any, *, seed: int = 0) -> Partition:
  """Give each owner, such as a writer or a speaker, its own examples.

  Args:
    owners: `[examples]`, integers or strings: the owner of each example. As
      strings they are the clients' ids.
    seed: Seed of the order of each client's examples.
  """
  owners = _checked_labels(owners, 'owners')
  order = np.argsort(owners, kind='stable')
  names, starts = np.unique(owners[order], return_index=True)
  pieces = zip(map(str, names), np.split(order, starts[1:]), strict=True)
  return {
    name: random_bits.generator(seed, 'writer', name).permutation(mine)
    for name, mine in pieces
  }


def limit(partition: Partition, most: int | None) -> Partition:
  """Keep the first examples of each client; all if `most` is None."""
  if most is not None:
    checked_numbers.check_whole(ClientDataError, 0, **{'limit: most': most})
  return {client: places[:most] for client, places in partition.items()}


def split_examples(
  partition: Partition,
  fractions: Sequence[float],
  is_test: np.ndarray | None = None,
  *,
  labels: Any = None,
) -> list[Partition]:
  """Divide the examples of each client into parts, in their order.

  Of n examples a part ends at n times the cumulative fraction, rounded down,
  but the first part has at least one.

  Args:
    partition: The partition to divide.
    fractions: Share of each part; they sum to 1.
    is_test: bool `[all examples]`: if given, these are the last part, and the
      others divide the rest by their shares.
    labels: `[all examples]`, integers or strings: if given, the examples of
      each label are divided alike, and the first part has at least one of each,
      so that it has all labels of the other parts.

  Returns:
    For each part the examples of every client.

  Raises:
    ClientDataError: If the fractions are not valid shares, or none before
      `is_test`, that is not of truth values, or `labels` are given beside it.
  """
  shares = _checked_fractions(fractions)
  if labels is not None:
    if is_test is not None:
      raise ClientDataError(
        'split_examples: `is_test` says already which examples are tested; '
        'leave out `labels`, or divide by label without `is_test`.'
      )
    labels = _checked_labels(labels)
  if is_test is not None:
    is_test = np.asarray(is_test)
    if is_test.dtype != bool:
      raise ClientDataError(
        'split_examples: expected True or False in `is_test`, found values of '
        f'type {is_test.dtype}, which would be places. Give `is_test == 1`.'
      )
    if not shares[:-1].sum():
      raise ClientDataError(
        f'fractions={fractions}: `is_test` is the last part, and no part '
        'before it has a share. Give those shares, such as (0.8, 0.1, 0.1).'
      )
    shares = shares[:-1] / shares[:-1].sum()
  ends = np.cumsum(shares)[:-1]
  parts: list[Partition] = [{} for _ in fractions]
  for client, places in partition.items():
    kept = places if is_test is None else places[~is_test[places]]
    # A small offset keeps a product such as 0.7 * 10 from falling below 7.
    until = np.floor(len(kept) * ends + 1e-9).astype(int)
    if labels is None:
      pieces = np.split(kept, np.maximum(until, 1))
    else:
      pieces = _split_by_label(kept, until, labels[kept])
    if is_test is not None:
      pieces.append(places[is_test[places]])
    for part, piece in zip(parts, pieces, strict=True):
      part[client] = piece
  return parts


def _split_by_label(
  places: np.ndarray, ends: np.ndarray, labels: np.ndarray
) -> list[np.ndarray]:
  """Divide one client's examples so that parts have similar shares of labels.

  Each part but the last ends at one of `ends`.
  """
  # Relative rank of each example in its label, between 0 and 1; the first of
  # each label precedes all others.
  along = np.empty(len(places))
  known = np.unique(labels)
  for label in known:
    (mine,) = np.nonzero(labels == label)
    along[mine] = (np.arange(len(mine)) + 0.5) / len(mine)
    along[mine[0]] = -1.0
  order = np.argsort(along, kind='stable')
  cut = np.split(order, np.maximum(ends, max(len(known), 1)))
  return [places[np.sort(piece)] for piece in cut]


def split_clients(
  partition: Partition, fractions: Sequence[float], *, seed: int = 0
) -> list[Partition]:
  """Divide clients at random: each part has all examples of its clients.

  Args:
    partition: The partition to divide.
    fractions: Share of the clients in each part; they sum to 1.
    seed: Seed of the division.

  Raises:
    ClientDataError: If the fractions are not valid shares, or a part would have
      no client.
  """
  shares = _checked_fractions(fractions)
  clients = sorted(partition)
  order = random_bits.generator(seed, 'split').permutation(len(clients))
  ends = np.rint(np.cumsum(shares)[:-1] * len(clients)).astype(int)
  parts = [
    {clients[place]: partition[clients[place]] for place in sorted(piece)}
    for piece in np.split(order, ends)
  ]
  if not all(parts):
    raise ClientDataError(
      f'{len(clients)} clients cannot be divided into the shares '
      f'{tuple(fractions)}: one part would have none. Use more clients, or '
      'measure those who took part.'
    )
  return parts


def _checked_fractions(fractions: Sequence[float]) -> np.ndarray:
  """Return the shares of the parts."""
  shares = np.asarray(fractions, float)
  if shares.ndim != 1 or not (
    (shares >= 0.0).all() and abs(shares.sum() - 1.0) < 1e-6
  ):
    total = f', found {shares.sum():.6g}' if shares.ndim == 1 else ''
    raise ClientDataError(
      f'fractions={fractions}: give a share for each part, from 0 to 1 and '
      f'together 1{total}, such as (0.8, 0.2).'
    )
  return shares


def _checked_labels(labels: Any, what: str = 'labels') -> np.ndarray:
  """Return labels as an array of one axis."""
  array = np.asarray(labels)
  # Among texts, NumPy makes 'nan' of a missing value, and '1' of 1.
  are_given = array.ndim == 1 and array.dtype.kind not in 'biu'
  for place, label in enumerate(labels if are_given else ()):
    if not isinstance(label, (str, np.ndarray)) and (
      array.dtype.kind == 'U' or is_missing(label)
    ):
      raise ClientDataError(
        f'{what}: expected integers or texts, found {label} for example '
        f'{place}. Leave out the examples whose value is missing, or fill it, '
        'and give all one type.'
      )
  if array.ndim != 1:
    raise ClientDataError(
      f'{what}: expected one for each example, found an array of shape '
      f'{array.shape}. One-hot labels become numbers by `argmax(axis=-1)`.'
    )
  if array.dtype == object and all(isinstance(text, str) for text in array):
    array = array.astype(str)
  if not len(array) or array.dtype.kind not in 'biuU':
    raise ClientDataError(
      f'{what}: expected integers or texts, found '
      f'{len(array)} values of type {array.dtype}.'
    )
  return array


def _check_clients(num_clients: int, num_examples: int, least: int = 1) -> None:
  """Refuse more clients than there are examples for."""
  checked_numbers.check_whole(ClientDataError, 0, min_examples=least)
  checked_numbers.check_whole(ClientDataError, 1, num_clients=num_clients)
  if num_clients * least > num_examples:
    raise ClientDataError(
      f'{num_clients} clients with at least {least} examples each need '
      f'{num_clients * least:,}, and there are {num_examples:,}. Give fewer '
      'clients.'
    )


def _shuffled(
  held: Iterable[Sequence[np.ndarray]], seed: int
) -> list[np.ndarray]:
  """Join each client's pieces, in a separate random order."""
  return [
    random_bits.generator(seed, 'user', client).permutation(
      np.concatenate(pieces)
    )
    for client, pieces in enumerate(held)
  ]


def _named(held: Sequence[np.ndarray]) -> Partition:
  """Return the clients with numbers as ids."""
  return {f'{client:04d}': mine for client, mine in enumerate(held)}
