"""Populations from dictionaries, arrays, LEAF files and TFF's data sets."""

from collections.abc import Callable, Collection, Mapping, Sequence
import os
from typing import Any

import numpy as np

from tff_partial.arguments import spelling
from tff_partial.data import client_forms
from tff_partial.data import examples
from tff_partial.data import lengths as lengths_lib
from tff_partial.data import populations
from tff_partial.data import splits
from tff_partial.data import table_rows
from tff_partial.data.populations import Population


def of_clients(
  client_ids: Collection[str],
  read: Callable[[str], Any],
  example_spec: examples.ExampleSpec,
  min_examples: int | None,
  capacities: Sequence[int] | None,
  num_rows: table_rows.NumRows | None = None,
  lengths: Sequence[int] | None = None,
) -> Population:
  """Make a population of clients, whose fields are read one by one."""
  ids, flat, offsets = populations.concatenate(
    ((client, read(client)) for client in client_ids),
    example_spec,
    min_examples,
  )
  return Population(
    ids,
    example_spec,
    flat,
    offsets,
    capacities=capacities,
    lengths=lengths,
    num_filtered=len(client_ids) - len(ids),
    num_rows=num_rows,
  )


def pack(
  clients: Mapping[str, Any],
  example_spec: examples.ExampleSpec,
  *,
  query: Mapping[str, Any] | None = None,
  min_examples: int | None = None,
  capacities: Sequence[int] | None = None,
  lengths: Sequence[int] | None = None,
  num_rows: table_rows.NumRows | None = None,
) -> Population:
  """Pad every client's arrays to one of a few capacities.

  Separate test examples are given as `query`:

      process = build_fed_rep(model, ...)
      measure = build_fed_rep_eval(model, split=tff_partial.splits.by_mark())
      train = tff_partial.pack(train, process.example_spec)
      test = tff_partial.pack(train, measure.example_spec, query=test)

  Args:
    clients: Client id to its examples: fields `x`, `y`, optionally `weight` and
      others, arrays `[examples, ...]`; several inputs of a model by their own
      names next to `y`; a tuple `(x, y)` or `(x, y, weight)`; a data frame of
      such columns; or a `tf.data.Dataset` of these.
    example_spec: Spec of one example: `process.example_spec`.
    query: Client id to the fields of its query examples, which
      `splits.by_mark()` separates from those in `clients`. A client may be in
      only one of the two.
    min_examples: Clients with fewer are left out and counted in the log. If 0,
      all are kept, and clients without examples send nothing; by default all
      are kept, and an empty client is an error.
    capacities: Sizes to pad to; a few suitable ones by default.
    lengths: Lengths to pad sequences to, where a field's is open; by default
      that of the longest, and halves of it.
    num_rows: Client id to name of a table sized per client, such as
      `user/embeddings`, to the number of rows that the client needs, if its
      other examples name more than these.

  Raises:
    ClientDataError: For a field that is missing or unknown, a wrong shape or
      dtype, or a value that is not finite; the message names client, field and
      example.
  """
  for name, given in (('clients', clients), ('query', query or {})):
    what = 'a mapping from client id to examples, or `from_pandas(frame, ...)`'
    spelling.check_kind(name, given, Mapping, what, examples.ClientDataError)
  read = example_spec
  if query is not None:
    clients = _marked(clients, query, example_spec)
    read = examples.as_packed(example_spec)
  wrong = spelling.unknown('client', num_rows or {}, clients)
  if wrong:
    raise examples.ClientDataError(f'num_rows: {wrong}')
  packed = of_clients(
    clients,
    clients.__getitem__,
    read,
    min_examples,
    capacities,
    num_rows,
    lengths,
  )
  packed.example_spec = example_spec
  return packed


def _marked(
  support: Mapping[str, Any],
  query: Mapping[str, Any],
  example_spec: examples.ExampleSpec,
) -> dict[str, Any]:
  """Return clients with both kinds of examples, marked."""
  if splits.MARK not in example_spec:
    raise examples.ClientDataError(
      f'query: an example has no field {splits.MARK!r}, by which query '
      'examples are told from others. Build what reads the clients with '
      '`split=tff_partial.splits.by_mark()`.'
    )
  plain = examples.ExampleSpec(example_spec)
  del plain[splits.MARK]
  marked = {}
  for client in {**support, **query}:
    parts = []
    for mark, given in enumerate((support, query)):
      if client in given:
        where = f'Client {client!r}' + (', query' if mark else '')
        fields, count = populations.checked(where, given[client], plain)
        fields[splits.MARK] = np.full(count, mark, np.int32)
        parts.append(fields)
    marked[client] = examples.map_fields(
      lambda spec, *arrays: lengths_lib.joined(spec, arrays),
      example_spec,
      *parts,
    )
  return marked


def from_arrays(
  fields: Mapping[str, Any],
  partition: Mapping[str, Any],
  example_spec: examples.ExampleSpec,
  *,
  min_examples: int | None = None,
  capacities: Sequence[int] | None = None,
) -> Population:
  """Make clients from one data set and a partition of it.

      spec = process.example_spec
      partition = tff_partial.partitions.dirichlet(y, 100, alpha=0.3)
      clients = tff_partial.from_arrays({'x': x, 'y': y}, partition, spec)

  Args:
    fields: `x`, `y`, optionally `weight` and others: arrays `[examples, ...]`
      of all clients together, in any form that `pack` takes for a client.
    partition: Client id to the indices of its examples, int `[examples]`; see
      `partitions`.
    example_spec: Spec of one example: `process.example_spec`.
    min_examples: As for `pack`.
    capacities: Sizes to pad to; a few suitable ones by default.

  Raises:
    ClientDataError: For fields that `pack` would refuse, or indices out of
      range.
  """
  spelling.check_kind(
    *('partition', partition, Mapping),
    'a mapping from client id to places, such as one of `partitions`',
    examples.ClientDataError,
  )
  flat, count = populations.checked('The data set', fields, example_spec)

  def of_client(client: str) -> Mapping[str, Any]:
    places = np.asarray(partition[client])
    if places.ndim != 1 or (len(places) and places.dtype.kind not in 'iu'):
      raise examples.ClientDataError(
        f'Client {client!r}: expected the places of its examples, an array of '
        f'integers; found {places.dtype} of shape {places.shape}.'
      )
    places = places.astype(np.int64)
    outside = places[(places < 0) | (places >= count)]
    if len(outside):
      raise examples.ClientDataError(
        f'Client {client!r}: there is no example {outside[0]} in a data set of '
        f'{count}, whose places are 0 to {count - 1}.'
      )
    return examples.map_fields(lambda array: array[places], flat)

  return of_clients(
    partition, of_client, example_spec, min_examples, capacities
  )


def from_tff(
  client_data: Any,
  example_spec: examples.ExampleSpec,
  *,
  to_fields: Callable[[Any], Mapping[str, Any]] | None = None,
  client_ids: Sequence[str] | None = None,
  min_examples: int | None = None,
  capacities: Sequence[int] | None = None,
) -> Population:
  """Read clients of a `tff.simulation.datasets.ClientData` into memory.

  Args:
    client_data: The data set of all clients, of single examples.
    example_spec: Spec of one example: `process.example_spec`.
    to_fields: From an example of the data set to the fields `x`, `y`, ...; by
      default an example is a mapping with these keys or a pair `(x, y)`.
    client_ids: The clients to read; all by default.
    min_examples: Clients with fewer are left out and counted in the log.
    capacities: Sizes to pad to; a few suitable ones by default.

  Raises:
    ClientDataError: As for `pack`.
  """

  def of_client(client: str) -> Any:
    dataset = client_data.create_tf_dataset_for_client(client)
    if to_fields is None:
      _check_element(client, dataset.element_spec, example_spec)
      return dataset
    read = [to_fields(example) for example in dataset.as_numpy_iterator()]
    return client_forms.joined(read, example_spec)

  ids = client_data.client_ids if client_ids is None else client_ids
  return of_clients(ids, of_client, example_spec, min_examples, capacities)


# Common names of labels.
_LABELS = ('y', 'label', 'labels', 'target', 'targets')


def _check_element(
  client: str, element: Any, example_spec: examples.ExampleSpec
) -> None:
  """Suggest `to_fields` if examples have fields of other names."""
  if not isinstance(element, Mapping):
    return
  found = client_forms.as_fields(element, example_spec, f'Client {client!r}')
  missing = [n for n in example_spec if n not in found and n != 'weight']
  if missing:
    names = list(element)
    label = next((name for name in names if name in _LABELS), names[-1])
    first = next((name for name in names if name != label), label)
    raise examples.ClientDataError(
      f'Client {client!r} lacks the fields {missing}: an example has {names}. '
      'Say which is which, for instance `to_fields=lambda example: '
      f"{{'x': example[{first!r}], 'y': example[{label!r}]}}`."
    )


def from_leaf(
  path: str | os.PathLike[str],
  example_spec: examples.ExampleSpec,
  *,
  to_fields: Callable[[Mapping[str, Any]], Any] | None = None,
  min_examples: int | None = None,
  capacities: Sequence[int] | None = None,
) -> Population:
  """Read clients from JSON files in the format of the LEAF benchmark.

  Args:
    path: A file with `users` and their `user_data`, or a folder of such files.
    example_spec: Spec of one example: `process.example_spec`.
    to_fields: From a client's `user_data`, lists by name, to an argument of
      `pack`; by default it is used unchanged.
    min_examples: As for `pack`.
    capacities: Sizes to pad to; a few suitable ones by default.

  Raises:
    ClientDataError: As for `pack`, or if files have another format.
  """
  clients: dict[str, Any] = {}
  for client, given in client_forms.leaf_clients(path):
    if client in clients:
      raise examples.ClientDataError(
        f'{path}: client {client!r} is there twice.'
      )
    clients[client] = to_fields(given) if to_fields else given
  return pack(
    clients, example_spec, min_examples=min_examples, capacities=capacities
  )
