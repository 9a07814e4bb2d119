"""Numbers of rows that clients need of the tables sized per client."""

from collections.abc import Collection, Mapping, Sequence
import numbers
from typing import Any, TypeAlias

import numpy as np

from tff_partial.data import examples
from tff_partial.data import id_ranges

# Client id to name of a table to number of rows.
NumRows: TypeAlias = Mapping[str, Mapping[str, int]]


def count(
  example_spec: examples.ExampleSpec,
  client_ids: Sequence[str],
  flat: Any,
  offsets: np.ndarray,
  num_rows: NumRows | None = None,
) -> dict[str, np.ndarray]:
  """Count the rows of each table that each client's examples name.

  Args:
    example_spec: Spec of one example.
    client_ids: Ids, `[clients]`.
    flat: Nested arrays `[all examples, ...]`.
    offsets: `[clients + 1]`: client i has examples offsets[i] to offsets[i+1].
    num_rows: Numbers of rows that clients need, if more.

  Raises:
    ClientDataError: If `num_rows` has fewer rows than examples name, an unknown
      table, or an invalid number.
  """
  fields = dict(examples.leaves(flat))
  found = {}
  tables = id_ranges.client_sized(examples.ids_of(example_spec))
  _check(num_rows or {}, tables)
  for name, paths in tables.items():
    counts = np.zeros([len(client_ids)], np.int64)
    for path, ranges in paths.items():
      for ids in ranges:
        # Wide enough for -1, too, where there are no values.
        values = ids.values(fields[path]).astype(np.int64)
        largest = values.max(axis=1, initial=-1) + 1
        is_filled = np.diff(offsets) > 0
        counts[is_filled] = np.maximum(
          counts[is_filled],
          np.maximum.reduceat(largest, offsets[:-1][is_filled]),
        )
    found[name] = _at_least(name, counts, client_ids, num_rows)
  return found


def _check(num_rows: NumRows, tables: Collection[str]) -> None:
  """Refuse numbers of rows of unknown tables."""
  for client, said in num_rows.items():
    where = f'Client {client!r}: num_rows'
    if not isinstance(said, Mapping):
      raise examples.ClientDataError(
        f'{where} is {said!r}. Give a mapping from the name of a table to its '
        f'number of rows; the tables are {list(tables)}.'
      )
    for name, number in said.items():
      if name not in tables:
        raise examples.ClientDataError(
          f'{where} names {name!r}, but the tables that are client_sized are '
          f'{list(tables)}.'
        )
      if not isinstance(number, numbers.Integral):
        raise examples.ClientDataError(
          f'{where} says {number!r} rows of {name!r}. Give a whole number.'
        )


def _at_least(
  name: str,
  counts: np.ndarray,
  client_ids: Sequence[str],
  num_rows: NumRows | None,
) -> np.ndarray:
  """Return the given numbers of rows, or else the counts; refuse smaller."""
  if num_rows is None:
    return counts
  said = np.array(
    [
      num_rows.get(client, {}).get(name, count)
      for client, count in zip(client_ids, counts, strict=True)
    ],
    np.int64,
  )
  if (said < counts).any():
    place = int(np.argmax(said < counts))
    raise examples.ClientDataError(
      f'Client {client_ids[place]!r}: num_rows says {said[place]} rows of '
      f'{name!r}, but its examples name {counts[place]}. Ids are numbered '
      'from 0 within each client.'
    )
  return said
