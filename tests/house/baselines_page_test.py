"""The page on baselines: all modules, with figures that were measured."""

import pathlib
import re
import shlex

import pytest

from tests.support import commands

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / 'baselines'
TEXT = (FOLDER / 'README.md').read_text('utf-8')
ROWS = [
  [cell.strip() for cell in line.strip('|').split(' | ')]
  for line in TEXT.splitlines()
  if line.startswith('| [')
]


def test_every_module_has_a_line():
  modules = {path.name for path in FOLDER.glob('*.py')} - {'__init__.py'}
  assert modules == set(re.findall(r'\]\((\w+\.py)\)', TEXT))
  assert all(len(row) == 5 for row in ROWS)


@pytest.mark.parametrize('row', ROWS, ids=[row[1] for row in ROWS])
def test_expected_figures_were_measured(row):
  *_, expected = row
  if expected == '-':
    return
  shown, page = re.fullmatch(r'\[(.*)\]\((.*\.md)\)', expected).groups()
  results = (FOLDER / page).read_text('utf-8')
  figures = re.findall(r'\d[\d.]*(?: ± [\d.]+)?', shown)
  assert figures
  for figure in figures:
    assert figure in results, figure


@pytest.mark.parametrize('row', ROWS, ids=[row[1] for row in ROWS])
def test_commands_can_be_parsed(row):
  program, given = re.match(r'(\w+).*?`(.*)`', row[3]).groups()
  commands.parse(program, shlex.split(given))
