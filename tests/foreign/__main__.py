"""Runs TFF's own tests with the cohort runtime as their context.

  make foreign TFF_SOURCE=DIR

where DIR is a checkout of TensorFlow Federated's sources of the version that
is installed. Fails if a test fails that `allowed.txt` does not list.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

from tests.foreign import outcomes

_HERE = pathlib.Path(__file__).parent
_ROOT = _HERE.parents[1]
_PYTHON = 'tensorflow_federated/python'
# What computes something in a context.
_PATTERNS = (
  'aggregators/*_test.py',
  'analytics/**/*_test.py',
  'core/impl/federated_context/*_test.py',
  'core/templates/*_test.py',
  'learning/*_test.py',
  'learning/algorithms/*_test.py',
  'learning/metrics/*_test.py',
  'learning/models/*_test.py',
  'learning/templates/*_test.py',
  'tests/*_test.py',
)


def run(
  source: pathlib.Path, file: pathlib.Path, jit: str, seconds: float
) -> dict[str, str | None]:
  """Runs a file in a process of its own; returns what became of its tests."""
  with tempfile.TemporaryDirectory() as folder:
    results = pathlib.Path(folder) / 'results.xml'
    command = [sys.executable, '-m', 'tests.foreign.one_file']
    command += [str(source), str(file), jit, str(results)]
    try:
      ended = subprocess.run(
        command,
        cwd=_ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=seconds,
        check=False,
      )
    except subprocess.TimeoutExpired:
      return outcomes.results_of(results, None, '')
    return outcomes.results_of(results, ended.returncode, ended.stderr)


def main() -> None:
  """Reads the arguments, runs the files and says what failed."""
  parser = argparse.ArgumentParser(description=__doc__)
  add = parser.add_argument
  add('source', type=pathlib.Path, help="a checkout of TFF's sources")
  add('patterns', nargs='*', default=_PATTERNS, help=f'files in {_PYTHON}')
  add('--jit', nargs='+', choices=('true', 'false'), default=['false', 'true'])
  add('--seconds', type=float, default=1800, help='for a file at most')
  options = parser.parse_intermixed_args()
  folder = options.source.resolve() / _PYTHON
  files = sorted(
    {file for pattern in options.patterns for file in folder.glob(pattern)}
  )
  if not files:
    parser.error(f'{folder} holds no {", ".join(options.patterns)}')
  allowed = outcomes.read_allowed(
    (_HERE / 'allowed.txt').read_text(encoding='utf-8')
  )
  results = {}
  for jit in options.jit:
    for file in files:
      name = f'jit={jit}/{file.relative_to(folder)}'
      found = run(options.source.resolve(), file, jit, options.seconds)
      results[name] = found
      passed = sum(problem is None for problem in found.values())
      print(f'{name}: {passed} of {len(found)} pass', flush=True)
  verdict = outcomes.judge(results, allowed)
  for name, reason in verdict.allowed.items():
    print(f'allowed: {name}: {reason}')
  for one in verdict.unused:
    print(f'no longer fails: {one.pattern}')
  for name, problem in verdict.failed.items():
    print(f'FAILED: {name}: {problem.strip()[:300]}')
  if verdict.failed:
    sys.exit(1)


if __name__ == '__main__':
  main()
