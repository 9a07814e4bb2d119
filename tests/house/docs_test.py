"""Runs the blocks of Python that the documentation shows."""

import pathlib
import re
import tempfile
from typing import Any

import numpy as np
import pytest
from sklearn import datasets
import tensorflow as tf

import tff_partial
from tff_partial import runtimes

ROOT = pathlib.Path(__file__).parents[2]


def _run(name: str, known: dict[str, Any]) -> dict[str, Any]:
  """Runs all blocks of a page in turn, and returns what they define."""
  text = (ROOT / name).read_text(encoding='utf-8')
  for block in re.finditer(r'^```python\n(.*?)^```', text, re.M | re.S):
    # Errors name the page and its line.
    line = text[: block.start(1)].count('\n')
    code = compile('\n' * line + block[1], name, 'exec')
    exec(code, known)
  return known


@pytest.mark.slow
def test_the_study_compares_methods_and_counts_epsilon():
  known = _run('docs/study.md', {})
  table = known['table']
  assert list(table.index) == ['FedRecon', 'FURL', 'FedAvg, fine-tuned']
  # Who always predicts the mean of all ratings is off by their deviation.
  deviation = known['frame']['test']['rating'].std()
  assert (table['rmse'] < 0.5 * deviation).all()
  assert table['rmse'].idxmin() == 'FedRecon'
  assert known['tested']['rmse'] < 0.6 * deviation
  assert known['plan'].epsilon <= 16.0
  assert known['trained'].client_store is not None
  assert known['state'].client_work['round'] == 10
  assert 0.0 < known['measured']['rmse'] < 2.0 * deviation


@pytest.mark.slow
def test_ten_methods_are_compared(monkeypatch):
  """One round of one seed, on scikit-learn's digits in place of MNIST."""
  digits = datasets.load_digits()
  images = np.kron(digits.images, np.ones([1, 4, 4]))[:, 2:-2, 2:-2]
  data = (images * 16, digits.target), None
  monkeypatch.setattr(tf.keras.datasets.mnist, 'load_data', lambda: data)
  compare = tff_partial.compare

  def small(methods: Any, clients: Any, **options: Any) -> Any:
    return compare(methods, clients, **{**options, 'rounds': 1, 'seeds': [0]})

  monkeypatch.setattr(tff_partial, 'compare', small)
  known = _run('docs/compare.md', {})
  found = known['found']
  assert len(found.table()) == 10
  assert set(known['tuned'].table()['num_settings']) == {3}
  assert found.table()['mean'].between(0.02, 1.0).all()
  found.draw('accuracy')  # As the notebook goes on.


def test_the_page_on_privacy_plans_what_it_says():
  known = _run('docs/privacy.md', {})
  assert 7.9 < known['plan'].epsilon <= 8.0
  assert 0.0 < known['ledger'].epsilon(50) < known['plan'].epsilon
  assert known['aggregator'].mechanism == known['plan'].mechanism


@pytest.mark.slow
def test_the_page_on_training_ends_early_and_stays_so():
  known = _run('docs/training.md', {})
  assert sum(map(len, known['partition'].values())) == len(known['y'])
  trained, again = known['trained'], known['again']
  assert trained.ended_by.startswith('EarlyStopping(patience=3')
  assert trained.rounds < 500 and trained.rounds % 10 == 0
  assert len(known['seen']) == trained.rounds  # And none when called again.
  assert trained.best_validation['accuracy'] > 0.6
  assert (again.rounds, again.ended_by) == (trained.rounds, trained.ended_by)


@pytest.mark.slow
def test_exact_reconstruction():
  known = _run('docs/exact.md', {})
  assert known['low'].shape == (5,)
  assert (known['low'] < known['high']).all()
  assert known['head'].exact == known['Exact'](ridge=2.0)


@pytest.mark.slow
def test_the_page_of_how_to_does_what_it_says():
  known = _run('docs/how_to.md', {})
  # Clients of two digits each, who are measured on what they never trained on.
  assert known['measured']['accuracy'] > 0.9
  assert known['measured']['num_examples'] == known['held_out'].sum()
  assert len(known['remembered']) > 10  # Of clients in five rounds of ten.
  states = known['falling'].client_store.read(known['population'].client_ids)
  slots = [dict(state['slots']['phase_0_0']) for state in states]
  assert all(list(kept) == ['local'] for kept in slots)
  # Two epochs of some batches, in each of the rounds that a client was in.
  assert max(kept['local']['step'] for kept in slots) >= 4


@pytest.mark.slow
def test_the_page_on_adapters_says_what_is_trained():
  known = _run('docs/adapters.md', {})
  model, whole = known['model'], known['whole']
  assert set(model.specs('local')) == {
    *('lora_b/body/kernel', 'lora_b/head/kernel')
  }
  assert [v.shape for v in known['own'].variables] == [
    v.shape for v in known['pretrained'].variables
  ]
  assert known['measured']['accuracy'] > 0.8  # Of two digits each.
  assert set(known['ffa'].specs('local')) == set()
  assert len(known['two'].specs('local')) == 4
  assert set(known['biases'].specs('global')) == {'body/bias', 'head/bias'}
  assert set(known['prompted'].specs('global')) == {'prompt/default'}
  base = known['prompted'].frozen_weights()
  for name, value in base.items():
    np.testing.assert_array_equal(value, whole.given_values[name])


@pytest.mark.slow
def test_the_page_on_experiments_runs_some():
  known = _run('docs/experiments.md', {})
  assert known['result'].trained.rounds == 6
  assert known['result'].report['config']['loop']['clients_per_round'] == 10
  losses = [run.report['train']['loss'] for run in known['found'].values()]
  assert len(losses) == len(set(losses)) == 2


@pytest.mark.slow
def test_the_page_on_new_algorithms_writes_one_that_is_right():
  # It asserts, as a reader's first test would.
  known = _run('docs/new_algorithm.md', {})
  assert np.abs(known['x']).max() < 10.0
  assert np.abs(known['c']).min() > 1e-3


def test_the_quickstart_of_the_readme_runs_as_it_stands():
  known = _run('README.md', {})
  result, frame = known['result'], known['frame']
  assert result.rounds == 200 and not result.diverged
  assert result.train['loss'] < 0.3 * np.var(frame['rating'])
  film, score = known['choices'][0]
  assert film in set(frame['film']) - set(known['seen'])
  # What the user would say of all films, but for the noise.
  taste = known['of_user'].predict(np.arange(40), verbose=0)[:, 0]
  rated = [known['films'].index(name) for name in known['seen']]
  given = frame.rating[frame.user == 'u_42']
  places = known['clients'].vocabularies['film'].encode(known['seen'])
  assert len(rated) == len(places) == 16
  assert np.corrcoef(taste[places], given)[0, 1] > 0.8
  assert score >= np.median(taste)


@pytest.mark.slow
def test_the_page_on_hpfl_makes_a_model_of_a_schools_own_size() -> None:
  known = _run('docs/hpfl.md', {})
  users, items = (
    known['of_north'].get_layer(name).get_weights()[0]
    for name in ('users', 'items')
  )
  # Five users and forty items, of which the answers name most.
  assert users.shape == (5, 3)
  assert 30 < len(items) <= 40


@pytest.mark.slow
def test_the_page_on_scale_trains_wherever_clients_lie(monkeypatch, tmp_path):
  # What differs on Ray, its own tests say; here threads do the work.
  monkeypatch.setattr(
    runtimes, 'ray', lambda workers: runtimes.cohort(threads=workers)
  )
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  known = _run('docs/scale.md', {})
  (folder,) = tmp_path.glob('*/clients')
  assert str(folder) == known['folder']
  assert len(known['on_disk']) == 500
  assert known['result'].rounds == 3 and not known['result'].diverged


@pytest.mark.slow
def test_the_page_on_export_serves_a_user():
  known = _run('docs/export.md', {})
  assert set(known['exported'].paths) == {'saved_model', 'tflite'}
  assert known['predicted'].shape == (20, 1)
  assert np.isfinite(known['predicted']).all()
