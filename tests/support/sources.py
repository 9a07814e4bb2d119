"""The project's Python files, parsed once for all tests of the house."""

import ast
import functools
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]


def files_of(*folders: str) -> list[pathlib.Path]:
  """Python files of top-level folders, in order."""
  return [
    path for folder in folders for path in sorted((ROOT / folder).rglob('*.py'))
  ]


@functools.cache
def parsed(path: pathlib.Path) -> ast.Module:
  return ast.parse(path.read_text(encoding='utf-8'), filename=str(path))
