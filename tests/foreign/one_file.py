"""Runs one file of TFF's own tests with the cohort runtime as its context.

  python -m tests.foreign.one_file SOURCE FILE JIT RESULTS

The tests import TensorFlow Federated as it is installed; what only its sources
hold, such as helpers of tests, is taken from there. Whatever context a test
installs as the default becomes ours.
"""

import importlib.machinery
import importlib.util
import pathlib
import runpy
import sys
import types
from typing import Any

import tensorflow_federated as tff

from tff_partial import runtimes

_PACKAGE = 'tensorflow_federated'


class SourceFinder:
  """Finds modules in a source checkout that no other finder has found."""

  def __init__(self, source: pathlib.Path):
    self._source = source

  def find_spec(
    self, name: str, path: Any = None, target: types.ModuleType | None = None
  ) -> importlib.machinery.ModuleSpec | None:
    """The module of a name; Python calls this."""
    del path, target
    if not name.startswith(f'{_PACKAGE}.'):
      return None
    file = self._source / f'{name.replace(".", "/")}.py'
    if not file.is_file():
      return None
    return importlib.util.spec_from_file_location(name, file)


def install(jit: bool) -> None:
  """Makes our runtime the default, also where a test installs another one."""
  stack = tff.framework.get_context_stack()
  set_default = stack.set_default_context
  ours = {
    asynchronous: runtimes.cohort(jit=jit, asynchronous=asynchronous)
    for asynchronous in (False, True)
  }

  def set_ours(context: Any) -> None:
    set_default(ours[isinstance(context, tff.framework.AsyncContext)])

  stack.set_default_context = set_ours


def main() -> None:
  """Reads the arguments and runs the file."""
  source, file, jit, results = sys.argv[1:]
  sys.meta_path.append(SourceFinder(pathlib.Path(source)))
  install(jit == 'true')
  sys.argv = [file, f'--xml_output_file={results}']
  runpy.run_path(file, run_name='__main__')


if __name__ == '__main__':
  main()
