"""Tables of results: pages show what their data say, and runs make rows."""

import importlib.util
import pathlib
import re
import shutil

import pandas as pd
import pytest

from tests.support import run_folders

ROOT = pathlib.Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location(
  'results_tables', ROOT / 'docs/results_tables.py'
)
results_tables = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(results_tables)


@pytest.fixture(name='pages')
def fixture_pages(tmp_path):
  """A page with one table."""
  (tmp_path / 'tables').mkdir()
  (tmp_path / 'tables/mine.csv').write_text(
    'row,rounds,RMSE ↓ paper,RMSE ↓,RMSE ↓ ±,"ACC, % ↑"\n'
    'one,1600,0.9,0.81,0.01,44.0\ntwo,20,,0.79,,\nthree,,0.7,,,45.0\n'
  )
  (tmp_path / 'page.md').write_text('Old.\n\n<!-- table: mine -->\n\n| old |\n')
  return tmp_path


def test_pages_are_what_their_data_say(tmp_path):
  shutil.copytree(results_tables.PAGES, tmp_path / 'results')
  changed = results_tables.write(tmp_path / 'results')
  assert not changed, 'not their data: `python docs/results_tables.py`'


def test_every_table_of_data_is_on_a_page():
  pages = results_tables.PAGES.glob('*.md')
  text = ''.join(page.read_text('utf-8') for page in pages)
  for path in (results_tables.PAGES / 'tables').glob('*.csv'):
    assert f'<!-- table: {path.stem} -->\n\n|' in text, path.name


def test_figures_of_the_readme_are_in_the_data():
  section = (ROOT / 'README.md').read_text('utf-8').split('\n## Results\n')[1]
  rows = re.findall(r'^\|.*\|([^|]+)\|$', section.split('\n## ')[0], re.M)[2:]
  figures = {figure for row in rows for figure in re.findall(r'\d+\.\d+', row)}
  known = {
    value
    for path in (results_tables.PAGES / 'tables').glob('*.csv')
    for value in results_tables.read(path.stem).to_numpy().ravel()
  }
  assert len(figures) > 10 and not figures - known


def test_a_table_names_the_best(pages):
  assert results_tables.write(pages) == ['page.md']
  assert results_tables.write(pages) == []
  assert (pages / 'page.md').read_text().splitlines()[4:] == [
    '| | rounds | RMSE ↓ | ACC, % ↑ |',
    '|---|---|---|---|',
    '| one | 1,600 | 0.9 / 0.81 ± 0.01 | 44.0 |',
    '| **two** | 20 | **0.79** | |',
    '| three | | 0.7 / – | **45.0** |',
  ]


def test_a_blank_line_ends_a_table(pages):
  page = pages / 'page.md'
  page.write_text(page.read_text() + 'Text.\n')
  results_tables.write(pages)
  assert page.read_text().endswith(' |\n\nText.\n')


def test_runs_make_a_row(tmp_path, pages):
  runs = tmp_path / 'runs'
  for seed, rmse in enumerate((0.8, 1.0)):
    run_folders.write(runs, f'seed{seed}', seed=seed, rmse=rmse)
  results_tables.add('mine', 'four', runs, ['RMSE ↓=rmse'], pages=pages)
  columns = ['ACC, % ↑=rmse', 'of 5 %=rmse']
  results_tables.add('mine', 'two', runs, columns, pages=pages)
  frame = pd.read_csv(pages / 'tables/mine.csv', index_col='row')
  assert frame.loc['four', ['RMSE ↓', 'RMSE ↓ ±']].tolist() == [0.9, 0.141]
  assert frame.loc['two', ['ACC, % ↑', 'ACC, % ↑ ±']].tolist() == [90.0, 14.1]
  assert frame.loc['two', 'of 5 %'] == 0.9
  assert frame.loc['one', 'RMSE ↓'] == 0.81
  assert list(frame)[-3:] == ['ACC, % ↑ ±', 'of 5 %', 'of 5 % ±']


def test_runs_differ_in_flags_that_are_named(tmp_path, pages):
  runs, columns = tmp_path / 'runs', ['RMSE ↓=rmse']
  for cut, rmse in enumerate((0.6, 0.7, 0.8)):
    run_folders.write(runs, f'p{cut}', cut=cut, seed=cut, rmse=rmse)
  with pytest.raises(ValueError, match=r"in seed alone.*in \['cut'\]"):
    results_tables.add('mine', 'one', runs, columns, pages=pages)
  results_tables.add('mine', 'one', runs, columns, over='cut,seed', pages=pages)
  frame = pd.read_csv(pages / 'tables/mine.csv', index_col='row')
  assert frame.loc['one', ['RMSE ↓', 'RMSE ↓ ±']].tolist() == [0.7, 0.1]
