"""The project's Python files, parsed once for all tests of the house."""

import ast
from collections.abc import Iterator
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


def dotted_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
  """All chains of attributes that start at a name, each in full, with lines."""
  inner = {
    id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)
  }
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute) and id(node) not in inner:
      parts, start = [], node
      while isinstance(start, ast.Attribute):
        parts.append(start.attr)
        start = start.value
      if isinstance(start, ast.Name):
        yield node.lineno, '.'.join([start.id, *reversed(parts)])
