"""Populations made of dictionaries, arrays, data frames, TFF's data sets."""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial import spelling
from tff_partial.data import data_frames
from tff_partial.data import examples
from tff_partial.data import populations
from tff_partial.data import table_rows
from tff_partial.data.populations import Population
from tff_partial.data.vocabularies import Vocabulary


def _of_clients(
  clients: Iterable[tuple[str, Mapping[str, Any]]],
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
  clients: Mapping[str, Mapping[str, Any]],
  example_spec: examples.ExampleSpec,
  *,
  min_examples: int | None = None,
  capacities: Sequence[int] | None = None,
  num_rows: table_rows.NumRows | None = None,
) -> Population:
  """Pads every client's arrays to one of a few capacities.

  Args:
    clients: Client id to its fields: `x`, `y`, perhaps `weight` and others,
      arrays `[examples, ...]`.
    example_spec: What one example consists of: `process.example_spec`.
    min_examples: Clients with fewer are left out and counted in the log; at 0
      none is, and clients without examples send nothing; by
      default none is, and an empty client is an error.
    capacities: Sizes to pad to; few good ones by default.
    num_rows: Client id to name of a table of the clients' own sizes, such as
      `user/embeddings`, to how many rows the client needs, where its other
      examples will name more than these.

  Raises:
    ClientDataError: For a field that is missing or not read, a wrong shape or
      dtype, or a value that is not finite; the message names client, field and
      example.
  """
  wrong = spelling.unknown('client', num_rows or {}, clients)
  if wrong:
    raise examples.ClientDataError(f'num_rows: {wrong}')
  return _of_clients(
    clients.items(), example_spec, min_examples, capacities, num_rows
  )


def from_arrays(
  fields: Mapping[str, Any],
  partition: Mapping[str, Any],
  example_spec: examples.ExampleSpec,
  *,
  min_examples: int | None = None,
  capacities: Sequence[int] | None = None,
) -> Population:
  """Makes clients of one data set and a partition of it.

      spec = process.example_spec
      partition = tff_partial.partitions.dirichlet(y, 100, alpha=0.3)
      clients = tff_partial.from_arrays({'x': x, 'y': y}, partition, spec)

  Args:
    fields: `x`, `y`, perhaps `weight` and others: arrays `[examples, ...]` of
      all clients together.
    partition: Client id to the places of its examples, int `[examples]`; see
      `partitions`.
    example_spec: What one example consists of: `process.example_spec`.
    min_examples: As for `pack`.
    capacities: Sizes to pad to; few good ones by default.

  Raises:
    ClientDataError: For fields that `pack` would refuse, or places where there
      is no example.
  """
  flat = examples.check_fields(fields, example_spec, 'The data set')
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
  inputs: str | Mapping[str, str],
  labels: str,
  weight: str | None = None,
  fields: Mapping[str, str] | None = None,
  time: str | None = None,
  encode: str | Iterable[str] | Mapping[str, Vocabulary] = (),
  missing: str = data_frames.REFUSE,
  min_examples: int | None = None,
  capacities: Sequence[int] | None = None,
) -> Population:
  """Makes clients of the rows of a data frame.

  Columns may be of any type of pandas that holds numbers, strings to encode, or
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
    frame: A pandas data frame with one row an example.
    example_spec: What one example consists of: `process.example_spec`.
    client_id: The column that says whose example it is.
    inputs: The column of the model's input, or input name to column.
    labels: The column of the labels.
    weight: The column of the examples' weights, if they differ.
    fields: Further field to column, for splits that ask for one.
    time: The column, numbers or datetimes, by which each client's examples are
      sorted, so that splits such as `splits.halves` train on the past; they
      keep the frame's order by default. Where a split asks for a field `time`
      that is not among `fields`, it is this column. Datetimes become
      nanoseconds since 1970.
    encode: Columns whose values, such as names of items, are replaced by ids:
      their sorted values are numbered from 0. Or column to `Vocabulary`, such
      as the `vocabularies` of the training clients: values that it does not
      have are refused, unless it has an id for them, as
      `Vocabulary(values, unseen=True)` has.
    missing: What becomes of rows that lack a value (None, NaN, NaT or NA) in
      one of the columns above: 'refuse', with the first one's label, or 'drop'.
      What was dropped is logged as a warning, and is `clients.dropped`.
    min_examples: Clients with fewer are left out and counted in the log.
    capacities: Sizes to pad to; few good ones by default.

  Raises:
    ClientDataError: For a column that is not there, lacks values, or holds
      what the model cannot read.
  """
  columns = {
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
  table = data_frames.Table(
    frame, client_id, [*columns.values(), *sorting], missing
  )
  unread = [name for name in _names(encode) if name not in columns.values()]
  if unread:
    raise examples.ClientDataError(
      f'encode={list(_names(encode))}: {unread} are no columns of inputs, '
      f'labels or fields, which are {list(columns.values())}.'
    )
  vocabularies = table.vocabularies(encode)
  specs = dict(examples.leaves(example_spec))
  arrays = {
    path: table.values(name, specs.get(path), vocabularies.get(name))
    for path, name in columns.items()
  }
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
  spec: Any, inputs: str | Mapping[str, str]
) -> dict[str, str]:
  """Path of each of the model's inputs, such as `x.item`, to its column."""
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
  """The columns that are to be encoded."""
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
  """Reads clients of a `tff.simulation.datasets.ClientData` into memory.

  Args:
    client_data: The data set of all clients, of single examples.
    example_spec: What one example consists of: `process.example_spec`.
    to_fields: From an example of the data set to the fields `x`, `y`, ...; by
      default an example is a mapping with these keys or a pair `(x, y)`.
    client_ids: The clients to read; all by default.
    min_examples: Clients with fewer are left out and counted in the log.
    capacities: Sizes to pad to; few good ones by default.

  Raises:
    ClientDataError: As for `pack`.
  """

  def as_fields(example: Any) -> Mapping[str, Any]:
    if to_fields is not None:
      return to_fields(example)
    if isinstance(example, Mapping):
      return example
    return collections.OrderedDict(x=example[0], y=example[1])

  def clients() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for client in client_ids or client_data.client_ids:
      dataset = client_data.create_tf_dataset_for_client(client)
      read = [as_fields(example) for example in dataset.as_numpy_iterator()]
      if read:
        fields = examples.map_fields(lambda *values: np.stack(values), *read)
      else:
        fields = examples.map_fields(
          lambda spec: np.zeros([0, *spec.shape], spec.dtype.as_numpy_dtype),
          example_spec,
        )
      yield client, fields

  return _of_clients(clients(), example_spec, min_examples, capacities)
