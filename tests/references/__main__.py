"""Compares our methods with those of other implementations.

  make references REFERENCE_SOURCES=DIR REFERENCE_PYTHON=PYTHON

where DIR holds checkouts of the references, in folders of their names: PFLlib,
FL_partial_personalization, fed-att and fedjax; TFF is installed. PYTHON is that
of an environment with the packages of tests/references/requirements.txt. All
run the same small problem from the same weights on the same batches. Fails if
any weight differs by more than rounding, if a departure that is taken out of a
reference would make no difference, or if nothing could be compared.
"""

import argparse
from collections.abc import Mapping
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

from tests.references import problem
from tests.references import recorded
from tests.references import table

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def why_not(reference: str, source: pathlib.Path, python: str) -> str | None:
  """Returns why a reference cannot be run, or None."""
  wanted = table.REFERENCES[reference]
  if reference != table.TFF and not source.is_dir():
    return f'{source} is missing; it is a checkout of {wanted.source}.'
  found = subprocess.run(
    [
      python,
      '-c',
      'import importlib.util as u, sys; '
      'print(*(n for n in sys.argv[1:] if u.find_spec(n) is None))',
      *wanted.packages,
    ],
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  )
  missing = found.stdout.split()
  if missing:
    return (
      f'{python} lacks {", ".join(missing)}: make an environment with '
      'tests/references/requirements.txt, and name its Python in '
      'REFERENCE_PYTHON.'
    )
  return None


def run(
  reference: str, source: pathlib.Path, python: str
) -> dict[str, problem.Arrays]:
  """Runs a reference in a process of its own; returns its results by name.

  Raises:
    SystemExit: If it fails, with what it wrote.
  """
  with tempfile.TemporaryDirectory() as folder:
    results = pathlib.Path(folder) / 'results.npz'
    done = subprocess.run(
      [
        python,
        '-m',
        'tests.references.one_reference',
        reference,
        str(source),
        str(results),
      ],
      cwd=_ROOT,
      env={**os.environ, 'OMP_NUM_THREADS': '1'},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      check=False,
    )
    if done.returncode:
      sys.exit(f'{done.stdout[-3000:]}\n{reference} failed.')
    found: dict[str, problem.Arrays] = {}
    with np.load(results) as archive:
      for key, value in archive.items():
        name, _, array = key.partition('|')
        found.setdefault(name, {})[array] = value
  return found


def compare(
  one: table.Comparison,
  mine: problem.Arrays,
  theirs: Mapping[str, problem.Arrays],
) -> bool:
  """Says how far we are from a reference, and from one with a departure.

  Returns whether we agree, and would not with any of the departures.
  """
  agree = True
  for left_in in (None, *one.taken_out):
    name = table.result_name(one, left_in)
    difference = problem.difference(mine, theirs[name])
    right = (difference > one.tolerance) is bool(left_in)
    mark = '' if right else 'FAILED: '
    print(
      f'{"  " if left_in else ""}{mark}{name}: {difference:.1e}', flush=True
    )
    agree = agree and right
  return agree


def main() -> None:
  """Reads the arguments, runs the references and says what differs."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add('sources', type=pathlib.Path, help='the folder of the checkouts')
  add('references', nargs='*', choices=[*table.REFERENCES, []], help='which')
  add('--python', default=sys.executable, help='that of their environment')
  add('--record', action='store_true', help='rewrite recorded.json')
  options = parser.parse_intermixed_args()
  failed, compared = 0, 0
  for reference in options.references or table.REFERENCES:
    source = options.sources.resolve() / reference
    python = sys.executable if reference == table.TFF else options.python
    reason = why_not(reference, source, python)
    if reason:
      print(f'not compared: {reference}: {reason}', flush=True)
      continue
    from tests.references import ours  # TensorFlow, which no refusal needs.

    theirs = run(reference, source, python)
    for one in table.COMPARISONS:
      if one.reference == reference:
        compared += 1
        failed += not compare(one, ours.run(one), theirs)
    if options.record:
      recorded.write(reference, theirs, source)
  for name, reason in table.LEFT_OUT.items():
    print(f'left out: {name}: {reason}')
  print(f'{compared - failed} of {compared} agree.')
  if failed or not compared:
    sys.exit(1)


if __name__ == '__main__':
  main()
