"""Populations made of dictionaries, of data frames, and of TFF's data sets."""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tff_partial import examples
from tff_partial import populations
from tff_partial.populations import Population


def _of_clients(
  clients: Iterable[tuple[str, Mapping[str, Any]]],
  example_spec: examples.ExampleSpec,
  min_examples: int | None,
  capacities: Sequence[int] | None,
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
  )


def pack(
  clients: Mapping[str, Mapping[str, Any]],
  example_spec: examples.ExampleSpec,
  *,
  min_examples: int | None = None,
  capacities: Sequence[int] | None = None,
) -> Population:
  """Pads every client's arrays to one of a few capacities.

  Args:
    clients: Client id to its fields: `x`, `y`, perhaps `weight` and others,
      arrays `[examples, ...]`.
    example_spec: What one example consists of: `process.example_spec`.
    min_examples: Clients with fewer are left out and counted in the log; by
      default none is, and an empty client is an error.
    capacities: Sizes to pad to; few good ones by default.

  Raises:
    ClientDataError: For a missing field, a wrong shape or dtype, or a value
      that is not finite; the message names client, field and example.
  """
  return _of_clients(clients.items(), example_spec, min_examples, capacities)


def from_pandas(
  frame: Any,
  example_spec: examples.ExampleSpec,
  *,
  client_id: str,
  inputs: str | Mapping[str, str],
  labels: str,
  weight: str | None = None,
  fields: Mapping[str, str] | None = None,
  min_examples: int | None = None,
  capacities: Sequence[int] | None = None,
) -> Population:
  """Makes clients of the rows of a data frame, in the frame's order.

  Args:
    frame: A pandas data frame with one row an example.
    example_spec: What one example consists of: `process.example_spec`.
    client_id: The column that says whose example it is.
    inputs: The column of the model's input, or input name to column.
    labels: The column of the labels.
    weight: The column of the examples' weights, if they differ.
    fields: Further field to column, for splits that ask for one.
    min_examples: Clients with fewer are left out and counted in the log.
    capacities: Sizes to pad to; few good ones by default.

  Raises:
    ClientDataError: For an unknown column or values that do not fit.
  """
  columns = {'y': labels, **(fields or {})}
  if weight:
    columns['weight'] = weight
  named = isinstance(inputs, Mapping)
  # One input has no name.
  inputs = dict(inputs) if isinstance(inputs, Mapping) else {'': inputs}
  wanted = [client_id, *columns.values(), *inputs.values()]
  missing = [column for column in wanted if column not in frame.columns]
  if missing:
    raise examples.ClientDataError(
      f'The data frame has no columns {missing}; it has {list(frame.columns)}.'
    )

  def column(name: str) -> Any:
    values = frame[name].to_numpy()
    if values.dtype == object and len(values) and np.ndim(values[0]):
      return list(values)  # Arrays, whose shapes are compared below.
    return values

  raw: dict[str, Any] = {name: column(c) for name, c in columns.items()}
  arrays = {name: column(c) for name, c in inputs.items()}
  raw['x'] = arrays if named else arrays['']
  flat = examples.check_fields(raw, example_spec, 'The data frame')
  try:
    codes, ids = frame[client_id].factorize(sort=True)
    names = [str(client) for client in ids]
  except (TypeError, ValueError) as error:
    raise examples.ClientDataError(
      f'The column {client_id!r} of the data frame holds values that can be '
      'no names of clients, such as lists or integers of thousands of digits. '
      'Give texts or numbers.'
    ) from error
  if (codes < 0).any():
    row = int(np.flatnonzero(codes < 0)[0])
    raise examples.ClientDataError(
      f'Row {row} of the data frame has no client: {client_id!r} is missing.'
    )
  counts = np.bincount(codes, minlength=len(ids))
  enough = counts >= max(min_examples or 0, 1)
  filtered = int((~enough).sum())
  populations.report_filtered(filtered, int(enough.sum()), min_examples)
  order = np.argsort(codes, kind='stable')
  order = order[enough[codes[order]]]
  flat = examples.map_fields(lambda array: array[order], flat)
  return Population(
    [name for name, is_kept in zip(names, enough, strict=True) if is_kept],
    example_spec,
    flat,
    np.concatenate([[0], np.cumsum(counts[enough])]),
    capacities=capacities,
    num_filtered=filtered,
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
