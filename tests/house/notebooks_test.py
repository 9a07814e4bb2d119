"""The notebooks: stored without outputs, and right when they are run."""

from collections.abc import Mapping
import json
import pathlib
import re
import sys
import tempfile
import types
from typing import Any

import matplotlib
import numpy as np
from packaging import requirements
import pytest

import tff_partial

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / 'notebooks').glob('*.ipynb'))


def _cells(path: pathlib.Path) -> list[dict[str, Any]]:
  return json.loads(path.read_text(encoding='utf-8'))['cells']


def _code(path: pathlib.Path) -> dict[str, str]:
  """Id of each cell of code to its text, in their order."""
  return {
    cell['id']: ''.join(cell['source'])
    for cell in _cells(path)
    if cell['cell_type'] == 'code'
  }


# ---- as they are stored ------------------------------------------------------


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem, name='path')
def fixture_path(request):
  return request.param


def test_there_are_six():
  assert [path.stem for path in NOTEBOOKS] == [
    'fed_embed_epsilon',
    'fed_recon_own_csv',
    'furl_embeddings',
    'hpfl_private_tables',
    'new_algorithm',
    'ten_methods',
  ]


def test_a_notebook_is_one_without_outputs(path):
  notebook = json.loads(path.read_text(encoding='utf-8'))
  assert set(notebook) == {'cells', 'metadata', 'nbformat', 'nbformat_minor'}
  # From version 4.5 on cells have ids.
  assert (notebook['nbformat'], notebook['nbformat_minor']) == (4, 5)
  assert set(notebook['metadata']) == {'kernelspec', 'language_info'}
  assert notebook['metadata']['kernelspec']['name'] == 'python3'
  for cell in notebook['cells']:
    stored = {'cell_type', 'id', 'metadata', 'source'}
    if cell['cell_type'] == 'code':
      stored |= {'execution_count', 'outputs'}
      assert cell['execution_count'] is None and cell['outputs'] == []
    else:
      assert cell['cell_type'] == 'markdown'
    assert set(cell) == stored
    assert cell['metadata'] == {}


def test_cells_have_names_and_each_is_introduced(path):
  cells = _cells(path)
  ids = [cell['id'] for cell in cells]
  assert len(set(ids)) == len(ids)
  assert all(re.fullmatch('[a-z-]{1,64}', name) for name in ids)
  for before, cell in zip(cells[:-1], cells[1:], strict=True):
    if cell['cell_type'] == 'code':
      assert before['cell_type'] == 'markdown'
      assert before['id'] == f'{cell["id"]}-text'
  # The installation, and at most nine more.
  assert len(_code(path)) <= 10


def test_code_compiles_and_tff_partial_comes_before_tensorflow(path):
  code = _code(path)
  for name, text in code.items():
    compile(text, f'{path.name}, {name}', 'exec')
  text = '\n'.join(code.values())
  assert text.index('\nimport tff_partial') < text.index('import tensorflow')


def test_a_page_names_the_notebook(path):
  page = (ROOT / 'docs/training.md').read_text(encoding='utf-8')
  assert f'(../notebooks/{path.name})' in page


# ---- the first cell ----------------------------------------------------------


def _installed(path: pathlib.Path) -> list[str]:
  """What the first cell has pip do."""
  called: list[str] = []

  def run_line_magic(name: str, line: str) -> None:
    assert name == 'pip'
    called.append(line)

  shell = types.SimpleNamespace(run_line_magic=run_line_magic)
  exec(_code(path)['install'], {'get_ipython': lambda: shell})
  return called


def test_the_first_cell_does_nothing_elsewhere(path):
  assert next(iter(_code(path))) == 'install'
  assert _installed(path) == []


def test_the_first_cell_installs_in_colab_what_the_lock_has(path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'google.colab', types.ModuleType('colab'))
  (line,) = _installed(path)
  command, *arguments = line.split()
  options = [word for word in arguments if word.startswith('--')]
  *packages, wheel = [word for word in arguments if word not in options]
  assert command == 'install'
  assert options == ['--quiet', '--no-deps', '--ignore-requires-python']
  lock = (ROOT / 'requirements/base-3.11.txt').read_text(encoding='utf-8')
  pins = dict(re.findall(r'^([\w.-]+)==(\S+)', lock, re.M))
  for package in map(requirements.Requirement, packages):
    assert package.specifier.contains(pins[package.name]), package
  assert wheel == f'tff_partial-{tff_partial.__version__}-py3-none-any.whl'
  # The cell before says which file to upload.
  assert any(f'dist/{wheel}' in ''.join(c['source']) for c in _cells(path))


# ---- as they run -------------------------------------------------------------


@pytest.fixture(name='run')
def fixture_run(tmp_path, monkeypatch):
  """Runs all cells of a notebook in turn, and returns what they define.

  Changes are made to the text of the only cell that has it.
  """
  pyplot = pytest.importorskip('matplotlib.pyplot')
  backend = matplotlib.get_backend()
  pyplot.switch_backend('Agg')
  # `show` has no window to open.
  monkeypatch.setattr(pyplot, 'show', lambda: pyplot.gcf().canvas.draw())
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  monkeypatch.chdir(tmp_path)

  def run(name: str, changes: Mapping[str, str] = {}) -> dict[str, Any]:
    known: dict[str, Any] = {}
    path = ROOT / 'notebooks' / f'{name}.ipynb'
    code = _code(path)
    for old, new in changes.items():
      (cell,) = [cell for cell, text in code.items() if old in text]
      code[cell] = code[cell].replace(old, new)
    for cell, text in code.items():
      exec(compile(text, f'{path.name}, {cell}', 'exec'), known)
    return known

  yield run
  pyplot.close('all')
  pyplot.switch_backend(backend)


@pytest.mark.slow
def test_fed_recon_on_a_csv_file_of_ones_own(run):
  known = run('fed_recon_own_csv')
  frame, result, seen = (known[name] for name in ('frame', 'result', 'seen'))
  # Who always says the mean is off by the deviation, about 1.1 stars.
  assert result.best_validation['rmse'] < 0.5 * frame['stars'].std()
  dropped = known['train_clients'].dropped.num_rows
  dropped += known['new_clients'].dropped.num_rows
  assert dropped == frame['stars'].isna().sum() > 0
  # What the reader would choose, as its taste was invented.
  taste = known['about'] @ known['tastes'][known['reader']]
  unseen = [n for n, book in enumerate(known['books']) if book not in set(seen)]
  chosen = [known['books'].index(n.candidate) for n in known['choices']]
  assert len(set(chosen)) == 5 and set(chosen) <= set(unseen)
  assert np.mean(taste[chosen]) > np.quantile(taste[unseen], 0.75)


@pytest.mark.slow
def test_furls_vectors_show_the_planted_tastes(run):
  known = run('furl_embeddings')
  assert known['result'].train['rmse'] < 1.0
  assert known['share_alike'] > 0.9
  assert known['separation'] > 0.4
  assert known['vectors'].shape == (150, 8)
  assert set(known['maps']) == {'principal components', 't-SNE'}


@pytest.mark.slow
def test_fed_embed_keeps_its_epsilon_and_most_of_its_accuracy(run):
  known = run('fed_embed_epsilon')
  assert 7.9 < known['epsilon'] <= 8.0
  exact, private = known['table'].to_numpy()
  # A head for each sub-population is worth more than the noise costs.
  assert exact[0] > exact[1] + 0.08 and private[0] > private[1] + 0.08
  assert exact[0] > 0.75 and private[0] > exact[0] - 0.06
  (first, *_) = known['results']['epsilon 8'].history
  assert 'loss' not in first and 'privacy/epsilon' in first


@pytest.mark.slow
def test_hpfls_drafts_come_nearer_to_rows_than_rows_to_one_another(run):
  known = run('hpfl_private_tables')
  assert list(known['silhouettes']) == list(known['METHODS'])
  records, drafts = known['records'], known['drafts']
  counts = np.bincount(records.client)[known['largest']]
  assert (np.diff(counts) <= 0).all()
  np.testing.assert_allclose(known['shares'].sum(axis=1), 1.0)
  assert 0.0 < known['apart'] < 0.5
  # One center for ten rows, of users and of items, of each method but central
  # training, and those that HPFL-R and HPFL have at the server.
  assert len(drafts) == 12
  for table, kept in known['task'].kept_tables().items():
    sent = drafts.xs((table, 'centers'), level=(1, 2))
    assert (sent['number'] == sum(-(-rows // 10) for rows in kept)).all()
    assert (sent['median distance'] < sent['between rows']).all()
  # By hand: a row, one beside it, and rows that are 1 and 2 apart.
  rows = {'ann': np.array([[0.0], [1.0]]), 'bob': np.array([[3.0]])}
  found = known['nearness'](np.array([[3.0], [1.5]]), rows)
  assert found == {
    'number': 2,
    'median distance': 0.25,
    'share that is a row': 0.5,
    'between rows': 1.0,
  }
  assert all(-1.0 < found < 0.5 for found in known['silhouettes'].values())


@pytest.mark.slow
def test_hpfls_figures_are_also_of_teachers_with_two_answers(run):
  known = run(
    'hpfl_private_tables',
    {
      "RECIPE = 'movielens_hpfl'": "RECIPE = 'assist_hpfl_paper'",
      'in METHODS.items()': 'in list(METHODS.items())[::4]',
    },
  )
  assert list(known['silhouettes']) == ['Central', 'HPFL']
  assert known['records'].scale == (0.0, 1.0)
  # Central training has the users of all in one table.
  users = known['characteristics'](known['runs']['Central'][1])
  kept = known['task'].kept_tables()['user/embeddings']
  assert tuple(map(len, users.values())) == kept


def _lines(text: str) -> list[str]:
  return [line for line in text.splitlines() if line.strip()]


def test_ten_methods_are_those_of_the_page_in_fewer_than_40_lines():
  page = (ROOT / 'docs/compare.md').read_text(encoding='utf-8')
  block, _ = re.findall(r'```python\n(.*?)```', page, re.S)
  code = _code(ROOT / 'notebooks/ten_methods.ipynb')
  cells = 'library', 'data', 'model', 'methods', 'table'
  assert _lines(block) == _lines('\n'.join(code[name] for name in cells))
  assert _lines(block)[-1] == 'print(found.to_markdown())'
  assert len(_lines(block)) < 40
  # What docs_test.py runs after the page's.
  assert list(code)[1:] == [*cells, 'figure']
  assert code['figure'] == "found.draw('accuracy')"


@pytest.mark.slow
def test_the_new_algorithm_passes_its_laws_and_gains(run):
  known = run('new_algorithm')  # Which asserts the first law.
  assert known['report'].holds
  remembers, forgets = (
    np.mean([entry['loss'] for entry in result.history[-20:]])
    for result in known['results'].values()
  )
  assert remembers < 0.3 * forgets
