"""A client's data as dense tensors: pack, pad, bucket.

A client's value inside a computation is

    examples: what the model and the splits read, each `[capacity, ...]`
      x       inputs, in the structure that the model takes
      y       labels
      weight  how much an example counts, 1 unless said otherwise
      ...     further fields that a split asks for, such as a time
    count:    how many of the examples are real; the rest is padding
    seed:     the client's randomness in this round

Clients are padded to one of a few capacities (buckets), so that few shapes
occur. Padding never changes a result: whoever reads examples honours `count`.

A source of clients is a `Population`, whose arrays are resident and are only
indexed, or a `Reader`, which loads one cohort at a time. Both make a `Cohort`:
a sequence of client values that also tells a runtime which rows of which arrays
it consists of, so that nothing needs copying client by client.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import operator
from typing import Any, NamedTuple, Protocol

from absl import logging
import numpy as np
import tensorflow as tf

from tff_partial import errors

# Field to a structure of `tf.TensorSpec` of one example, without batch axis.
ExampleSpec = collections.OrderedDict[str, Any]

WEIGHT_SPEC = tf.TensorSpec([], tf.float32)

_MAX_BUCKETS = 3
_BUCKET_RATIO = 4
_WASTED_BYTES = 2**28  # Padding up to this size is not worth a bucket.


class ClientDataError(errors.UserError, ValueError):
  """Raised for client data that cannot be trained on."""


class EmptyClientError(ClientDataError):
  """Raised for a client without examples."""


class NoEligibleClientError(ClientDataError):
  """Raised when no client has enough examples."""


def client_spec(example_spec: ExampleSpec) -> collections.OrderedDict[str, Any]:
  """Returns the structure of `tf.TensorSpec` of one client's value."""
  return collections.OrderedDict(
    examples=tf.nest.map_structure(
      lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), example_spec
    ),
    count=tf.TensorSpec([], tf.int32),
    seed=tf.TensorSpec([2], tf.int32),
  )


def _each(fn: Callable[..., Any], *structures: Any) -> Any:
  """Maps over nested ordered dicts, keeping their order of fields.

  `tf.nest` sorts keys when it flattens; a computation's fields have an order.
  """
  first = structures[0]
  if isinstance(first, Mapping):
    return collections.OrderedDict(
      (key, _each(fn, *(s[key] for s in structures))) for key in first
    )
  if isinstance(first, tuple):
    return tuple(_each(fn, *parts) for parts in zip(*structures, strict=True))
  return fn(*structures)


class CohortGroup(NamedTuple):
  """Members of a cohort whose examples share one capacity.

  Attributes:
    resident: Nested arrays `[rows of the bucket, ...]`; the same object round
      after round, so that a runtime can keep its copy on a device.
    rows: int32 `[members]`, the members' rows in `resident`.
    positions: int32 `[members]`, the members' places in the cohort.
    given: Nested arrays `[members, ...]` which are new in every round.
  """

  resident: Any
  rows: np.ndarray
  positions: np.ndarray
  given: Any


class Cohort(Sequence[Any]):
  """The clients of one round: a sequence of their values, made when asked for.

  Attributes:
    client_ids: Ids of the members in order.
    groups: The members by capacity.
  """

  def __init__(self, client_ids: Sequence[str], groups: Sequence[CohortGroup]):
    self.client_ids = tuple(client_ids)
    self.groups = tuple(groups)
    self._places = {
      int(position): (group, index)
      for group in self.groups
      for index, position in enumerate(group.positions)
    }

  def __len__(self) -> int:
    return len(self.client_ids)

  def __getitem__(self, position: Any) -> Any:
    if isinstance(position, slice):
      return [self[p] for p in range(*position.indices(len(self)))]
    position = operator.index(position)
    if position < 0:
      position += len(self)
    if not 0 <= position < len(self):
      raise IndexError(f'The cohort has {len(self)} clients.')
    group, index = self._places[position]
    row = group.rows[index]
    return collections.OrderedDict(
      **_each(lambda array: array[row], group.resident),
      **_each(lambda array: array[index], group.given),
    )


class ClientSource(Protocol):
  """Whoever can hand out cohorts: a `Population` or a `Reader`."""

  example_spec: ExampleSpec

  @property
  def client_ids(self) -> tuple[str, ...]:
    """Ids of all clients, in a fixed order."""

  def cohort(self, client_ids: Sequence[str], seeds: np.ndarray) -> Cohort:
    """Returns the values of some clients with their seeds, int32 `[n, 2]`."""


def check_array(array: Any, spec: tf.TensorSpec, where: str) -> np.ndarray:
  """Returns examples as an array of the spec's dtype, or says what is wrong.

  Args:
    array: Values of one field, `[examples, ...]`.
    spec: Shape and dtype of one example.
    where: Names the field and its client in error messages.

  Raises:
    ClientDataError: For another shape, a dtype that would lose information, or
      a value that is not finite.
  """
  try:
    array = np.asarray(array)
  except ValueError as error:
    raise ClientDataError(
      f'{where}: the examples differ in shape. Pad or cut them to the shape '
      f'{tuple(spec.shape)}.'
    ) from error
  wanted = spec.dtype.as_numpy_dtype
  if tuple(array.shape[1:]) != tuple(spec.shape) or array.ndim == 0:
    raise ClientDataError(
      f'{where}: expected one example to have shape {tuple(spec.shape)}, found '
      f'{tuple(array.shape[1:])}. Reshape the data, or describe them in the '
      'specs given to `from_keras`.'
    )
  is_float = array.dtype.kind == 'f'
  if is_float and not np.isfinite(array).all():
    row = int(np.argwhere(~np.isfinite(array))[0][0])
    raise ClientDataError(
      f'{where}: example {row} is {array[row]}, which is not finite. Drop or '
      'repair it before packing.'
    )
  if array.dtype == wanted:
    result = array
  elif array.dtype.kind in 'OSU' and np.dtype(wanted).kind == 'O':
    result = array.astype(object)
  elif array.dtype.kind not in 'biuf' or np.dtype(wanted).kind == 'O':
    first = f' (first value {array.flat[0]!r})' if array.size else ''
    raise ClientDataError(
      f'{where}: expected values of type {spec.dtype.name}, found '
      f'{array.dtype}{first}. Convert them before packing.'
    )
  else:
    if is_float and np.dtype(wanted).kind not in 'fc':
      raise ClientDataError(
        f'{where}: expected {spec.dtype.name}, found {array.dtype}, whose '
        'fractions would be lost. Round the values or change the spec.'
      )
    with np.errstate(over='ignore', invalid='ignore'):
      result = array.astype(wanted)
    fits = np.isfinite(result) if is_float else result == array
    if not fits.all():
      raise ClientDataError(
        f'{where}: the value {array[~fits][0]} does not fit into '
        f'{spec.dtype.name}. Change the spec, or the values.'
      )
  return result


class _Bucket:
  """Clients padded to one capacity."""

  def __init__(self, resident: Any, indices: np.ndarray):
    self.resident = resident
    self.indices = indices


def _default_capacities(counts: np.ndarray, example_bytes: int) -> list[int]:
  """One capacity, and smaller ones where they save much memory.

  Padding costs memory alone, while each capacity is one more shape for a
  compiling runtime to compile.
  """
  capacities = [max(int(counts.max()), 1)]
  while len(capacities) < _MAX_BUCKETS:
    inside = counts <= capacities[-1]
    wasted = (capacities[-1] - counts[inside]).sum() * example_bytes
    smaller = -(-capacities[-1] // _BUCKET_RATIO)
    if wasted <= _WASTED_BYTES or not (counts <= smaller).any():
      break
    capacities.append(smaller)
  return sorted(capacities)


def _fill_buckets(
  client_ids: Sequence[str],
  flat: Any,
  offsets: np.ndarray,
  capacities: Sequence[int] | None,
) -> list[_Bucket]:
  """Cuts concatenated examples into clients and pads each to its capacity."""
  counts = np.diff(offsets)
  example_bytes = sum(
    array.nbytes // max(len(array), 1) for array in tf.nest.flatten(flat)
  )
  capacities = sorted(capacities or _default_capacities(counts, example_bytes))
  if counts.max() > capacities[-1]:
    raise ClientDataError(
      f'Client {client_ids[int(counts.argmax())]!r} has {counts.max()} '
      f'examples but the largest bucket holds {capacities[-1]}. Add a larger '
      'one to `capacities`, or cut the client.'
    )
  which = np.searchsorted(capacities, counts)
  buckets = []
  for number, capacity in enumerate(capacities):
    indices = np.flatnonzero(which == number)
    if not indices.size:
      continue
    held = counts[indices]
    rows = np.repeat(np.arange(indices.size), held)
    columns = np.arange(held.sum()) - np.repeat(np.cumsum(held) - held, held)
    sources = np.repeat(offsets[:-1][indices], held) + columns

    def pad(
      array: np.ndarray,
      shape: tuple[int, int] = (indices.size, capacity),
      where: tuple[np.ndarray, np.ndarray] = (rows, columns),
      sources: np.ndarray = sources,
    ) -> np.ndarray:
      empty = b'' if array.dtype == object else 0
      padded = np.full((*shape, *array.shape[1:]), empty, array.dtype)
      padded[where] = array[sources]
      return padded

    resident = collections.OrderedDict(
      examples=_each(pad, flat), count=held.astype(np.int32)
    )
    buckets.append(_Bucket(resident, indices))
  return buckets


def _groups(
  buckets: Sequence[_Bucket], members: np.ndarray, seeds: np.ndarray
) -> list[CohortGroup]:
  """Finds the rows of the members in the buckets."""
  groups = []
  for bucket in buckets:
    inside = np.isin(members, bucket.indices)
    positions = np.flatnonzero(inside).astype(np.int32)
    if positions.size:
      rows = np.searchsorted(bucket.indices, members[positions])
      groups.append(
        CohortGroup(
          bucket.resident,
          rows.astype(np.int32),
          positions,
          collections.OrderedDict(seed=np.asarray(seeds, np.int32)[positions]),
        )
      )
  return groups


class Population:
  """Clients whose examples stay in memory, padded and grouped by capacity.

  Attributes:
    example_spec: What one example consists of.
    num_filtered: Clients left out because they had too few examples.
  """

  def __init__(
    self,
    client_ids: Sequence[str],
    example_spec: ExampleSpec,
    flat: Any,
    offsets: np.ndarray,
    *,
    capacities: Sequence[int] | None = None,
    num_filtered: int = 0,
  ):
    """Takes over checked, concatenated examples; see `pack` and `from_pandas`.

    Args:
      client_ids: Distinct ids, `[clients]`.
      example_spec: What one example consists of.
      flat: Arrays `[all examples, ...]` in the structure of `example_spec`.
      offsets: `[clients + 1]`: client i has examples offsets[i] to
        offsets[i+1].
      capacities: Sizes to pad to; few good ones if None.
      num_filtered: Clients left out before.
    """
    self.example_spec = example_spec
    self.num_filtered = num_filtered
    self._client_ids = tuple(client_ids)
    self._index = {client: i for i, client in enumerate(self._client_ids)}
    self._counts = np.diff(offsets)
    self._buckets = _fill_buckets(
      self._client_ids, flat, np.asarray(offsets), capacities
    )

  @property
  def client_ids(self) -> tuple[str, ...]:
    """Ids of all clients, in a fixed order."""
    return self._client_ids

  @property
  def num_examples(self) -> int:
    """The number of real examples of all clients together."""
    return int(self._counts.sum())

  def __len__(self) -> int:
    return len(self._client_ids)

  def cohort(self, client_ids: Sequence[str], seeds: np.ndarray) -> Cohort:
    """Returns the values of some clients.

    Args:
      client_ids: Ids, in the order in which the cohort shall have them.
      seeds: int32 `[clients, 2]`.

    Raises:
      ClientDataError: If an id is unknown.
    """
    try:
      members = np.array([self._index[c] for c in client_ids], np.int64)
    except KeyError as error:
      raise ClientDataError(
        f'There is no client {error.args[0]!r} among the {len(self)} clients.'
      ) from None
    return Cohort(client_ids, _groups(self._buckets, members, seeds))


def _concatenate(
  clients: Iterable[tuple[str, Mapping[str, Any]]],
  example_spec: ExampleSpec,
  min_examples: int | None,
) -> tuple[list[str], Any, np.ndarray, int]:
  """Checks clients one by one and concatenates those with enough examples."""
  ids: list[str] = []
  kept: list[Any] = []
  counts: list[int] = []
  filtered = 0
  for client, fields in clients:
    arrays = _checked(fields, example_spec, f'Client {client!r}')
    lengths = {len(array) for array in tf.nest.flatten(arrays)}
    if len(lengths) != 1:
      raise ClientDataError(
        f'Client {client!r}: fields have different numbers of examples: '
        f'{sorted(lengths)}.'
      )
    count = lengths.pop()
    if min_examples is None and not count:
      raise EmptyClientError(
        f'Client {client!r} has no examples. Leave it out, or pass '
        '`min_examples` to have small clients filtered and counted.'
      )
    if count < max(min_examples or 0, 1):
      filtered += 1
      continue
    ids.append(client)
    kept.append(arrays)
    counts.append(count)
  _report_filtered(filtered, len(ids), min_examples)
  flat = _each(lambda *arrays: np.concatenate(arrays), *kept)
  return ids, flat, np.concatenate([[0], np.cumsum(counts)]), filtered


def _report_filtered(
  filtered: int, kept: int, min_examples: int | None
) -> None:
  if filtered:
    logging.info(
      'Left out %d of %d clients, which have fewer than %s examples.',
      filtered,
      filtered + kept,
      min_examples,
    )
  if not kept:
    raise NoEligibleClientError(
      f'None of {filtered} clients has the {min_examples or 1} examples that '
      'it takes. Lower `min_examples` or give more data.'
    )


def _checked(
  fields: Mapping[str, Any], example_spec: ExampleSpec, where: str
) -> Any:
  """Checks every field of some examples; ones stand in for missing weights."""
  missing = [n for n in example_spec if n not in fields and n != 'weight']
  if missing:
    raise ClientDataError(
      f'{where} lacks the fields {missing}; an example consists of '
      f'{list(example_spec)}.'
    )

  def check(spec: Any, value: Any, path: str) -> Any:
    if isinstance(spec, Mapping):
      if not isinstance(value, Mapping) or set(spec) - set(value):
        raise ClientDataError(
          f'{where}: {path} must be a mapping with the keys {list(spec)}.'
        )
      return collections.OrderedDict(
        (key, check(spec[key], value[key], f'{path}.{key}')) for key in spec
      )
    if isinstance(spec, tuple):
      if not isinstance(value, (tuple, list)) or len(value) != len(spec):
        raise ClientDataError(
          f'{where}: {path} must be a tuple of {len(spec)} arrays.'
        )
      return tuple(
        check(s, v, f'{path}[{i}]')
        for i, (s, v) in enumerate(zip(spec, value, strict=True))
      )
    return check_array(value, spec, f'{where}, {path}')

  checked = collections.OrderedDict(
    (name, check(spec, fields[name], name) if name in fields else None)
    for name, spec in example_spec.items()
  )
  if 'weight' not in fields:
    first, spec = tf.nest.flatten(checked['y'])[0], example_spec['weight']
    checked['weight'] = np.ones(
      [len(first), *spec.shape], spec.dtype.as_numpy_dtype
    )
  return checked


def pack(
  clients: Mapping[str, Mapping[str, Any]],
  example_spec: ExampleSpec,
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
  ids, flat, offsets, filtered = _concatenate(
    clients.items(), example_spec, min_examples
  )
  return Population(
    ids,
    example_spec,
    flat,
    offsets,
    capacities=capacities,
    num_filtered=filtered,
  )


def from_pandas(
  frame: Any,
  example_spec: ExampleSpec,
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
    raise ClientDataError(
      f'The data frame has no columns {missing}; it has {list(frame.columns)}.'
    )

  def column(name: str) -> np.ndarray:
    values = frame[name].to_numpy()
    if values.dtype == object and len(values) and np.ndim(values[0]):
      values = np.stack(list(values))
    return values

  raw: dict[str, Any] = {name: column(c) for name, c in columns.items()}
  arrays = {name: column(c) for name, c in inputs.items()}
  raw['x'] = arrays if named else arrays['']
  flat = _checked(raw, example_spec, 'The data frame')
  codes, ids = frame[client_id].factorize(sort=True)
  if (codes < 0).any():
    row = int(np.flatnonzero(codes < 0)[0])
    raise ClientDataError(
      f'Row {row} of the data frame has no client: {client_id!r} is missing.'
    )
  counts = np.bincount(codes, minlength=len(ids))
  enough = counts >= max(min_examples or 0, 1)
  filtered = int((~enough).sum())
  _report_filtered(filtered, int(enough.sum()), min_examples)
  order = np.argsort(codes, kind='stable')
  order = order[enough[codes[order]]]
  flat = _each(lambda array: array[order], flat)
  return Population(
    [str(client) for client in np.asarray(ids)[enough]],
    example_spec,
    flat,
    np.concatenate([[0], np.cumsum(counts[enough])]),
    capacities=capacities,
    num_filtered=filtered,
  )


def from_tff(
  client_data: Any,
  example_spec: ExampleSpec,
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
  """

  def as_fields(example: Any) -> Mapping[str, Any]:
    if to_fields is not None:
      return to_fields(example)
    if isinstance(example, Mapping):
      return example
    return collections.OrderedDict(x=example[0], y=example[1])

  def read() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for client in client_ids or client_data.client_ids:
      dataset = client_data.create_tf_dataset_for_client(client)
      examples = [as_fields(example) for example in dataset.as_numpy_iterator()]
      if examples:
        yield client, _each(lambda *values: np.stack(values), *examples)
      else:
        yield (
          client,
          _each(
            lambda spec: np.zeros([0, *spec.shape], spec.dtype.as_numpy_dtype),
            example_spec,
          ),
        )

  ids, flat, offsets, filtered = _concatenate(
    read(), example_spec, min_examples
  )
  return Population(
    ids,
    example_spec,
    flat,
    offsets,
    capacities=capacities,
    num_filtered=filtered,
  )


@dataclasses.dataclass(frozen=True)
class Reader:
  """Clients that are loaded only for the rounds in which they take part.

  Attributes:
    ids: Ids of all clients.
    read: From a client's id to its fields, arrays `[examples, ...]`. A
      function that can be pickled, if other processes shall read too.
    example_spec: What one example consists of.
    capacities: Sizes to pad to. Give them: sizes that change from cohort to
      cohort make a compiling runtime compile again.
  """

  ids: Sequence[str]
  read: Callable[[str], Mapping[str, Any]]
  example_spec: ExampleSpec
  capacities: Sequence[int] | None = None

  @property
  def client_ids(self) -> tuple[str, ...]:
    """Ids of all clients, in a fixed order."""
    return tuple(self.ids)

  def __len__(self) -> int:
    return len(self.ids)

  def cohort(self, client_ids: Sequence[str], seeds: np.ndarray) -> Cohort:
    """Loads some clients and returns their values.

    Args:
      client_ids: Ids, in the order in which the cohort shall have them.
      seeds: int32 `[clients, 2]`.

    Raises:
      ClientDataError: If a client's examples cannot be used.
    """
    if not client_ids:
      return Cohort((), ())
    ids, flat, offsets, _ = _concatenate(
      ((client, self.read(client)) for client in client_ids),
      self.example_spec,
      None,
    )
    buckets = _fill_buckets(ids, flat, offsets, self.capacities)
    return Cohort(
      client_ids, _groups(buckets, np.arange(len(client_ids)), seeds)
    )
