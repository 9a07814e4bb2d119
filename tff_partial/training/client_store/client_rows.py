"""Client states padded to the table sizes of their cohort.

A client computes the same from fewer rows, since it knows how many are real.
But a compiling runtime compiles for each shape: without this, once for tables
that have no rows yet, and again for those that have.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow_federated as tff

from tff_partial.data import cohorts
from tff_partial.runtimes.values import client_batch
from tff_partial.runtimes.values import readers
from tff_partial.runtimes.values import typed_values


def fitted(
  states: Sequence[Any], kind: tff.Type, cohort: cohorts.Cohort
) -> Sequence[Any]:
  """Pad the tables of a cohort's clients with zeros.

  Returns:
    The states with larger tables, or unchanged if all tables have a fixed
    size.
  """
  sizes: dict[str, np.ndarray] = {}
  for group in cohort.groups:
    for table, is_real in group.resident.get('rows', {}).items():
      rows = sizes.setdefault(table, np.zeros([len(cohort)], np.int64))
      rows[group.positions] = is_real.shape[1]
  names = typed_values.leaf_names(kind)
  specs = typed_values.tensor_specs(kind)
  rows_of = [
    next((sizes[t] for t in sizes if f'/{name}'.endswith(f'/{t}')), None)
    if None in spec.shape.as_list()
    else None
    for name, spec in zip(names, specs, strict=True)
  ]
  if all(rows is None for rows in rows_of):
    return states
  reader = readers.ValueReader(kind)
  flat = [
    typed_values.leaves(reader(state, f'client state {place}'))
    for place, state in enumerate(states)
  ]
  leaves: list[Any] = []
  for column, needed in zip(zip(*flat, strict=True), rows_of, strict=True):
    if needed is None:
      leaves.append(np.stack(column))
    else:
      leaves.append(list(map(_with_rows, column, needed)))
  convert = typed_values.converter(kind)
  return client_batch.Columns.of(len(states), leaves, convert)


def _with_rows(table: np.ndarray, number: int) -> np.ndarray:
  """Pad a table to at least `number` rows."""
  missing = max(int(number) - len(table), 0)
  return np.pad(table, [(0, missing), *[(0, 0)] * (table.ndim - 1)])
