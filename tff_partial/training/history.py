"""The rounds of a run as numbers: the content of `metrics.csv`, for plots.

A resumed run takes earlier rounds from the table in its checkpoint, so that its
history covers the whole run.
"""

from collections.abc import Mapping
import csv
import io
from typing import Any


def entry(round_number: int, row: Mapping[str, Any]) -> dict[str, Any]:
  """Return a round's number and the columns that have a value.

  Args:
    round_number: The round.
    row: Column of `metrics.csv` to a number, or to an empty text.
  """
  measured = {name: value for name, value in row.items() if value != ''}
  return {'round': round_number, **measured}


def read(table: str) -> list[dict[str, Any]]:
  """Return the entries of all rounds of a table.

  Args:
    table: The text of a `metrics.csv`; empty for a new run.
  """
  rows = csv.DictReader(io.StringIO(table, newline=''))
  return [
    {name: _number(cell) for name, cell in row.items() if cell} for row in rows
  ]


def _number(cell: str) -> Any:
  """Parse a cell into the value that was written."""
  if cell in ('True', 'False'):
    return cell == 'True'
  try:
    return int(cell)
  except ValueError:
    return float(cell)
