"""Runs what is compared with one reference, in a process of its own.

  python -m tests.references.one_reference REFERENCE SOURCE RESULTS

An adapter has `prepare(source)`, which makes the checkout ready to import, and
`run(comparison, left_in)`, which trains as the reference does, with the
departures in `left_in` and without all others, and returns what the server and
the clients have at the end. Adapters need no package of this project's, so that
PyTorch and JAX may have an environment of their own.
"""

import importlib
import pathlib
import sys

import numpy as np

from tests.references import table


def main() -> None:
  """Writes the results, and those with one departure left in, as an archive."""
  reference, source, results = sys.argv[1:]
  module = table.REFERENCES[reference].module
  adapter = importlib.import_module(f'tests.references.{module}')
  adapter.prepare(pathlib.Path(source))
  found = {}
  for comparison in table.COMPARISONS:
    if comparison.reference == reference:
      for left_in in (None, *comparison.taken_out):
        arrays = adapter.run(comparison, (left_in,) if left_in else ())
        name = table.result_name(comparison, left_in)
        found |= {f'{name}|{key}': value for key, value in arrays.items()}
  np.savez(results, **found)


if __name__ == '__main__':
  main()
