"""The page on baselines: all modules, with figures that were measured."""

import pathlib
import re
import shlex

import pytest

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
def test_commands_name_recipes_and_algorithms_that_exist(row):
  flags = shlex.split(re.search(r'`(.*)`', row[3])[1])
  algorithms = (
    ROOT / 'tasks' / 'experiment' / 'methods' / 'algorithms.py'
  ).read_text('utf-8')
  for flag in flags:
    name, _, value = flag.removeprefix('--').partition('=')
    if name == 'recipe':
      assert (ROOT / 'tasks' / 'recipes' / f'{value}.flags').exists(), value
    if name == 'algorithm':
      assert f"'{value}':" in algorithms, value
