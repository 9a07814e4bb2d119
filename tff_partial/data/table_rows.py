"""How many rows clients need of the tables that have their own size."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from tff_partial.data import examples
from tff_partial.data import id_ranges

# Client id to name of a table to how many rows it has.
NumRows: TypeAlias = Mapping[str, Mapping[str, int]]


def count(
  example_spec: examples.ExampleSpec,
  client_ids: Sequence[str],
  flat: Any,
  offsets: np.ndarray,
  num_rows: NumRows | None = None,
) -> dict[str, np.ndarray]:
  """Counts the rows that clients' examples name.

  Args:
    example_spec: What one example consists of.
    client_ids: Ids, `[clients]`.
    flat: Nested arrays `[all examples, ...]`.
    offsets: `[clients + 1]`: client i has examples offsets[i] to offsets[i+1].
    num_rows: What clients need besides, such as rows that only examples held
      out for tests name.

  Returns:
    Name of a table to the number of rows of each client, int64 `[clients]`.

  Raises:
    ClientDataError: If fewer rows are said than examples name.
  """
  fields = dict(examples.leaves(flat))
  found = {}
  for name, paths in id_ranges.client_sized(
    examples.ids_of(example_spec)
  ).items():
    numbers = np.zeros([len(client_ids)], np.int64)
    for path, ranges in paths.items():
      for ids in ranges:
        values = ids.values(fields[path])
        largest = values.max(axis=1, initial=-1).astype(np.int64) + 1
        is_filled = np.diff(offsets) > 0
        numbers[is_filled] = np.maximum(
          numbers[is_filled],
          np.maximum.reduceat(largest, offsets[:-1][is_filled]),
        )
    found[name] = _at_least(name, numbers, client_ids, num_rows)
  return found


def _at_least(
  name: str,
  numbers: np.ndarray,
  client_ids: Sequence[str],
  num_rows: NumRows | None,
) -> np.ndarray:
  """The rows that are said, where any are."""
  if num_rows is None:
    return numbers
  said = np.array(
    [
      num_rows.get(client, {}).get(name, number)
      for client, number in zip(client_ids, numbers, strict=True)
    ],
    np.int64,
  )
  if (said < numbers).any():
    place = int(np.argmax(said < numbers))
    raise examples.ClientDataError(
      f'Client {client_ids[place]!r}: num_rows says {said[place]} rows of '
      f'{name!r}, but its examples name {numbers[place]}. Ids are numbered '
      'from 0 within each client.'
    )
  return said
