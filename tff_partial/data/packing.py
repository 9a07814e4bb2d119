"""Populations from dictionaries, arrays, data frames and TFF's data sets."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import os
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial.arguments import spelling
from tff_partial.data import client_forms
from tff_partial.data import data_frames
from tff_partial.data import examples
from tff_partial.data import populations
from tff_partial.data import splits
from tff_partial.data import table_rows
from tff_partial.data.populations import Population
from tff_partial.data.vocabularies import Vocabulary


def _of_clients(
  clients: Iterable[tuple[str, Any]],
  example_spec: examples.ExampleSpec,
  min_examples: int | None,
  capacities: Sequence[int] | None,
  num_rows: table_rows.NumRows | None = None,
) -> Population:
  ids, flat, offsets, filtered = populations.concatenate(
    clients, example_spec, min_examples
  )
  return Population(
    ids,
    example_spec,
    flat,
    offsets,
    capacities=capacities,
    num_filtered=filtered,
    num_rows=num_rows,
  )


def pack(
  clients: Mapping[str, Any],
  example_spec: examples.ExampleSpec,
  *,
  query: Mapping[str, Any] | None = None,
  min_examples: int | None = None,
  capacities: Sequence[int] | None = None,
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
    num_rows: Client id to name of a table sized per client, such as
      `user/embeddings`, to the number of rows that the client needs, if its
      other examples name more than these.

  Raises:
    ClientDataError: For a field that is missing or unknown, a wrong shape or
      dtype, or a value that is not finite; the message names client, field and
      example.
  """
  for name, given in (('clients', clients), ('query', query or {})):
    if not isinstance(given, Mapping):
      raise examples.ClientDataError(
        f'{name}: expected a mapping from client id to examples, found a '
        f'{type(given).__name__}. Of a data frame, `from_pandas` makes clients.'
      )
  if query is not None:
    clients = _marked(clients, query, example_spec)
  wrong = spelling.unknown('client', num_rows or {}, clients)
  if wrong:
    raise examples.ClientDataError(f'num_rows: {wrong}')
  return _of_clients(
    clients.items(), example_spec, min_examples, capacities, num_rows
  )


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
  plain = examples.ExampleSpec(
    {n: spec for n, spec in example_spec.items() if n != splits.MARK},
    examples.ids_of(example_spec),
  )
  marked = {}
  for client in {**support, **query}:
    parts = []
    for mark, given in enumerate((support, query)):
      if client in given:
        where = f'Client {client!r}' + (', query' if mark else '')
        fields = examples.check_fields(
          client_forms.as_fields(given[client], plain, where), plain, where
        )
        fields[splits.MARK] = np.full(len(fields['weight']), mark, np.int32)
        parts.append(fields)
    marked[client] = examples.map_fields(
      lambda *arrays: np.concatenate(arrays), *parts
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
  where = 'The data set'
  flat = examples.check_fields(
    client_forms.as_fields(fields, example_spec, where), example_spec, where
  )
  lengths = {len(array) for array in tf.nest.flatten(flat)}
  if len(lengths) != 1:
    raise examples.ClientDataError(
      'The fields of the data set have different numbers of examples: '
      f'{sorted(lengths)}.'
    )
  count = lengths.pop()

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

  return _of_clients(
    ((client, of_client(client)) for client in partition),
    example_spec,
    min_examples,
    capacities,
  )


def from_pandas(
  frame: Any,
  example_spec: examples.ExampleSpec,
  *,
  client_id: str,
  inputs: str | list[str] | Mapping[str, str | list[str]],
  labels: str,
  weight: str | None = None,
  fields: Mapping[str, str] | None = None,
  time: str | None = None,
  encode: str | Iterable[str] | Mapping[str, Vocabulary] = (),
  missing: str = data_frames.REFUSE,
  min_examples: int | None = None,
  capacities: Sequence[int] | None = None,
) -> Population:
  """Make clients from the rows of a data frame.

  Columns may be of any pandas type that holds numbers, strings to encode, or
  datetimes to sort by:

      frame = pd.DataFrame({
        'user': ['ann', 'ann', 'bob'],
        'item': ['Heat', 'Alien', 'Heat'],
        'rating': [4, 5, 3],
        'day': pd.to_datetime(['2001-02-03', '2000-01-01', '2000-05-05']),
      })

      def build():
        item = tf.keras.Input([], dtype=tf.int32)
        table = tf.keras.layers.Embedding(frame['item'].nunique(), 8)
        user = tf.keras.layers.Dense(1, name='user')
        return tf.keras.Model(item, user(table(item)))

      model = tff_partial.from_keras(build, loss='mse', local='user')
      clients = tff_partial.from_pandas(
        frame,
        model.example_spec,
        client_id='user',
        inputs='item',
        labels='rating',
        time='day',
        encode=['item'],
      )
      clients.vocabularies['item'].decode([0])  # ['Alien']

  Args:
    frame: A pandas data frame with one example per row, or the name of a
      Parquet file that holds one.
    example_spec: Spec of one example: `process.example_spec`.
    client_id: The column of client ids.
    inputs: The column of the model's input; or several columns of numbers, to
      join to one vector; or input name to these.
    labels: The column of the labels.
    weight: The column of the examples' weights, if they differ.
    fields: Further field to column, for splits that require one.
    time: The column, numbers or datetimes, by which each client's examples are
      sorted, so that splits such as `splits.halves` train on the past; by
      default they keep the frame's order. It is also the field `time`, if a
      split requires one that is not among `fields`. Datetimes become
      nanoseconds since 1970.
    encode: Columns whose values, such as names of items, are replaced by ids:
      their sorted values are numbered from 0. Or column to `Vocabulary`, such
      as the `vocabularies` of the training clients: unknown values are refused,
      unless it has an id for them, as in `Vocabulary(values, unseen=True)`.
    missing: Treatment of rows that lack a value (None, NaN, NaT or NA) in one
      of the columns above: 'refuse', with the first one's label, or 'drop'.
      Dropped rows are logged as a warning, and are in `clients.dropped`.
    min_examples: Clients with fewer are left out and counted in the log.
    capacities: Sizes to pad to; a few suitable ones by default.

  Raises:
    ClientDataError: For a column that is missing, lacks values, or holds values
      that the model cannot read.
  """
  if isinstance(frame, str | os.PathLike):
    frame = data_frames.read_parquet(frame)
  columns: dict[str, str | list[str]] = {
    **_input_columns(example_spec['x'], inputs),
    'y': labels,
    **(fields or {}),
  }
  if weight is not None:
    columns['weight'] = weight
  if time is not None and 'time' in example_spec:
    columns.setdefault('time', time)
  for path in dict(examples.leaves(example_spec)):
    if path not in columns and path != 'weight':
      raise examples.ClientDataError(
        f'An example has a field {path!r}, for which no column is named. Say '
        f'which: `fields={{{path!r}: column}}`.'
      )
  sorting = [] if time is None else [time]
  named = [
    name
    for found in columns.values()
    for name in (found if isinstance(found, list) else [found])
  ]
  table = data_frames.Table(frame, client_id, [*named, *sorting], missing)
  unread = [name for name in _names(encode) if name not in named]
  if unread:
    raise examples.ClientDataError(
      f'encode={list(_names(encode))}: {unread} are no columns of inputs, '
      f'labels or fields, which are {named}.'
    )
  vocabularies = table.vocabularies(encode)
  specs = dict(examples.leaves(example_spec))

  def values(path: str, name: str | list[str]) -> np.ndarray:
    if isinstance(name, list):
      return np.stack([values(path, each) for each in name], axis=1)
    return table.values(name, specs.get(path), vocabularies.get(name))

  arrays = {path: values(path, name) for path, name in columns.items()}
  raw: dict[str, Any] = dict(arrays)
  if isinstance(example_spec['x'], Mapping):
    raw['x'] = {name: raw.pop(f'x.{name}') for name in example_spec['x']}
  flat = examples.check_fields(
    raw,
    example_spec,
    'The data frame',
    lambda path: f'Column {columns[path]!r}',
    table.row,
  )
  codes, ids = table.clients()
  counts = np.bincount(codes, minlength=len(ids))
  enough = counts >= max(min_examples or 0, 1)
  filtered = int((~enough).sum())
  populations.report_filtered(filtered, int(enough.sum()), min_examples)
  keys = [codes] if time is None else [table.times(time), codes]
  order = np.lexsort(keys)
  order = order[enough[codes[order]]]
  flat = examples.map_fields(lambda array: array[order], flat)
  return Population(
    [client for client, kept in zip(ids, enough, strict=True) if kept],
    example_spec,
    flat,
    np.concatenate([[0], np.cumsum(counts[enough])]),
    capacities=capacities,
    num_filtered=filtered,
    vocabularies=vocabularies,
    dropped=table.dropped,
  )


def _input_columns(
  spec: Any, inputs: str | list[str] | Mapping[str, str | list[str]]
) -> dict[str, str | list[str]]:
  """Return the path of each input, such as `x.item`, and its columns."""
  if isinstance(inputs, Mapping) != isinstance(spec, Mapping) or (
    isinstance(inputs, Mapping) and set(spec) - set(inputs)
  ):
    reads, example = 'one input', "'column'"
    if isinstance(spec, Mapping):
      reads = f'the inputs {list(spec)}'
      example = repr(dict.fromkeys(spec, 'column'))
    raise examples.ClientDataError(
      f'inputs={inputs!r}: the model reads {reads}. Name the column of each: '
      f'`inputs={example}`.'
    )
  if isinstance(inputs, Mapping):
    wrong = spelling.unknown('input', inputs, spec)
    if wrong:
      raise examples.ClientDataError(
        f'inputs={inputs!r}: {wrong} The model reads {list(spec)}.'
      )
    return {f'x.{name}': inputs[name] for name in spec}
  return {'x': inputs}


def _names(encode: str | Iterable[str]) -> list[str]:
  """Return the columns to encode."""
  return [encode] if isinstance(encode, str) else list(encode)


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

  ids = client_ids or client_data.client_ids
  return _of_clients(
    ((client, of_client(client)) for client in ids),
    example_spec,
    min_examples,
    capacities,
  )


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
  return _of_clients(clients.items(), example_spec, min_examples, capacities)
