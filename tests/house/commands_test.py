"""The commands on pages name programs, flags and recipes that exist."""

from collections.abc import Iterator
import pathlib
import re
import shlex

import pytest

from tests.support import commands

ROOT = commands.ROOT
PAGES = [
  ROOT / 'README.md',
  *sorted((ROOT / 'docs').glob('*.md')),
  *sorted((ROOT / 'docs' / 'results').glob('*.md')),
]
_CODE = re.compile(r'```.*?\n(.*?)```|`([^`]*)`', re.DOTALL)
_COMMAND = re.compile(r'tff-partial (\w+)((?: (?!#)[^ \n]+)*)')
# The flags of a run alone, as cells of tables have them.
_FLAGS = re.compile(r'()(--recipe=[^\n]*)')
# What a reader fills in, or a flag that is only named.
_OPEN = re.compile(
  r'--(recipe|algorithm|flagfile)=[A-Z]+|--\w+=\.\.\.|--search'
)


def _commands(page: pathlib.Path) -> Iterator[tuple[str, list[str]]]:
  """Yield the program and the arguments of each whole command on a page."""
  for block, inline in _CODE.findall(page.read_text('utf-8')):
    code = block.replace('\\\n', ' ') if block else inline.replace('\n', ' ')
    code = re.sub(' +', ' ', code)
    alone = _FLAGS.fullmatch(code)
    for program, given in [alone.groups()] if alone else _COMMAND.findall(code):
      arguments = shlex.split(given)
      if not any(map(_OPEN.fullmatch, arguments)):
        yield program or 'train', arguments


@pytest.mark.parametrize('page', PAGES, ids=lambda page: str(page.name))
def test_commands_can_be_parsed(page):
  for program, arguments in _commands(page):
    try:
      commands.parse(program, arguments)
    except Exception as error:
      command = shlex.join(['tff-partial', program, *arguments])
      raise AssertionError(f'{command}: {error}') from error


def test_tests_that_pages_name_exist():
  texts = [page.read_text('utf-8') for page in PAGES]
  named = re.findall(r'`pytest ([^`]+)`', '\n'.join(texts))
  assert named
  for command in named:
    files, _, word = command.partition(' -k ')
    for file in files.split():
      tests = re.findall(r'def (test_\w+)', (ROOT / file).read_text('utf-8'))
      assert any(word in test for test in tests), f'pytest {command}'
