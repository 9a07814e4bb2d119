"""Populations from pandas data frames and Parquet files."""

from collections.abc import Iterable, Mapping, Sequence
import os
from typing import Any, TypeAlias

import numpy as np

from tff_partial.arguments import spelling
from tff_partial.data import data_frames
from tff_partial.data import examples
from tff_partial.data import populations
from tff_partial.data.populations import Population
from tff_partial.data.vocabularies import Vocabulary

# A column; or several of numbers, to join to one vector; or names to these.
_Columns: TypeAlias = str | list[str] | Mapping[str, str | list[str]]


def from_pandas(
  frame: Any,
  example_spec: examples.ExampleSpec,
  *,
  client_id: str,
  inputs: _Columns,
  labels: _Columns,
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
  datetimes to sort by.

  Args:
    frame: A pandas data frame with one example per row, or the name of a
      Parquet file that holds one.
    example_spec: Spec of one example: `process.example_spec`.
    client_id: The column of client ids.
    inputs: The column of the model's input; or several columns of numbers, to
      join to one vector; or input name to these.
    labels: The column of the labels; or several columns, or label name to
      these, likewise.
    weight: The column of the examples' weights, if they differ.
    fields: Further field to column, for splits that require one.
    time: The column, numbers or datetimes, by which each client's examples are
      sorted, so that splits such as `splits.halves` train on the past; by
      default they keep the frame's order. It is also the field `time`, if a
      split requires one that is not among `fields`. Datetimes become
      nanoseconds since 1970.
    encode: Columns whose values are replaced by ids: their sorted values are
      numbered from 0. Or column to `Vocabulary`, such as the `vocabularies` of
      the training clients: unknown values are refused, unless it has an id for
      them, as in `Vocabulary(values, unseen=True)`.
    missing: Treatment of rows that lack a value (None, NaN, NaT or NA) in one
      of the columns above: 'refuse', with the first one's label, or 'drop'.
      Dropped rows are logged as a warning, and are in `clients.dropped`.
    min_examples: Clients with fewer are left out and counted in the log.
    capacities: Sizes to pad to; a few suitable ones by default.

  Raises:
    ClientDataError: For a missing column, or values that are missing or unfit.
  """
  examples.check_is_spec(example_spec)
  if isinstance(frame, str | os.PathLike):
    frame = data_frames.read_parquet(frame)
  columns = _columns(example_spec, inputs, labels, weight, fields, time)
  named = [
    name
    for found in columns.values()
    for name in (found if isinstance(found, list) else [found])
  ]
  sorting = [] if time is None else [time]
  table = data_frames.FrameTable(frame, client_id, [*named, *sorting], missing)
  vocabularies = table.vocabularies(encode, named)
  flat = _flat(table, example_spec, columns, vocabularies)
  codes, ids = table.clients()
  counts = np.bincount(codes, minlength=len(ids))
  enough = counts >= max(min_examples or 0, 1)
  filtered = int((~enough).sum())
  populations.report_filtered(filtered, int(enough.sum()), min_examples)
  order = np.lexsort([*map(table.times, sorting), codes])
  order = order[enough[codes[order]]]
  return Population(
    [client for client, kept in zip(ids, enough, strict=True) if kept],
    example_spec,
    examples.map_fields(lambda array: array[order], flat),
    np.concatenate([[0], np.cumsum(counts[enough])]),
    capacities=capacities,
    num_filtered=filtered,
    vocabularies=vocabularies,
    columns=columns,
    dropped=table.dropped,
  )


def _columns(
  example_spec: examples.ExampleSpec,
  inputs: _Columns,
  labels: _Columns,
  weight: str | None,
  fields: Mapping[str, str] | None,
  time: str | None,
) -> dict[str, str | list[str]]:
  """Return the columns of each field, by its path."""
  columns: dict[str, str | list[str]] = {
    **_named('inputs', 'x', example_spec['x'], inputs),
    **_named('labels', 'y', example_spec['y'], labels),
  }
  if weight is not None:
    columns['weight'] = weight
  if twice := ({*columns, 'x', 'y'}).intersection(fields or {}):
    raise examples.ClientDataError(
      f'fields: {sorted(twice)} have columns by other arguments, such as '
      '`inputs` and `labels`. Name each once.'
    )
  columns |= fields or {}
  if time is not None and 'time' in example_spec:
    columns.setdefault('time', time)
  for path in dict(examples.leaves(example_spec)):
    if path not in columns and path != 'weight':
      how = f'Say which: `fields={{{path!r}: column}}`.'
      if path not in example_spec:
        how = 'For inputs or labels without names, use `pack`.'
      raise examples.ClientDataError(
        f'An example has a field {path!r}, for which no column is named. {how}'
      )
  return columns


def _flat(
  table: data_frames.FrameTable,
  example_spec: examples.ExampleSpec,
  columns: Mapping[str, str | list[str]],
  vocabularies: Mapping[str, Vocabulary],
) -> Any:
  """Return the checked fields of all rows."""
  specs = dict(examples.leaves(example_spec))
  for path, layer in examples.lifted_of(example_spec).items():
    specs[path] = layer.raw

  def values(path: str, name: str | list[str]) -> np.ndarray:
    if isinstance(name, list):
      return np.stack([values(path, each) for each in name], axis=1)
    return table.values(name, specs.get(path), vocabularies.get(name))

  raw: dict[str, Any] = {p: values(p, name) for p, name in columns.items()}
  for field in ('x', 'y'):
    if isinstance(spec := example_spec[field], Mapping):
      raw[field] = {name: raw.pop(f'{field}.{name}') for name in spec}
  return examples.check_fields(
    raw,
    example_spec,
    'The data frame',
    lambda path: f'Column {columns[path]!r}',
    table.row,
  )


def _named(
  what: str, field: str, spec: Any, given: _Columns
) -> dict[str, str | list[str]]:
  """Return the path of each part of a field, such as `x.item`, with columns.

  Args:
    what: The argument, 'inputs' or 'labels'.
    field: The field, 'x' or 'y'.
    spec: Its spec.
    given: The columns.
  """
  if isinstance(given, Mapping) != isinstance(spec, Mapping) or (
    isinstance(given, Mapping) and set(spec) - set(given)
  ):
    reads, example = f'one {what[:-1]}', "'column'"
    if isinstance(spec, Mapping):
      reads = f'the {what} {list(spec)}'
      example = repr(dict.fromkeys(spec, 'column'))
    raise examples.ClientDataError(
      f'{what}={given!r}: the model reads {reads}. Name the column of each: '
      f'`{what}={example}`.'
    )
  if isinstance(given, Mapping):
    if wrong := spelling.unknown(what.removesuffix('s'), given, spec):
      raise examples.ClientDataError(
        f'{what}={given!r}: {wrong} The model reads {list(spec)}.'
      )
    return {f'{field}.{name}': given[name] for name in spec}
  return {field: given}
