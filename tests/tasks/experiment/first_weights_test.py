"""Runs that start from the weights of a public run."""

import pytest

from tasks.errors import OptionError
from tasks.experiment.options.first_weights import FirstWeights
from tests.support import planted
from tests.support.commands import result
from tests.support.commands import run_well
from tests.support.commands import train_small
from tests.support.stacks import linear
from tests.support.stacks import stack
import tff_partial
from tff_partial.errors import UserError
from tff_partial.training import checkpoints
from tff_partial.training.errors import RunError


def test_names_without_a_public_run_are_refused():
  with pytest.raises(OptionError, match='--set=public_run'):
    FirstWeights(public_weights=('dense.*',))


def test_a_run_that_is_not_there_is_refused(tmp_path):
  with pytest.raises(RunError, match='no checkpoint that can be read. Name'):
    FirstWeights(public_run=str(tmp_path)).begin(None)


@pytest.mark.parametrize('wrong', ['(', 'haed/.*'])
def test_names_of_no_weights_are_refused(monkeypatch, wrong):
  monkeypatch.setattr(checkpoints, 'best_shared_weights', lambda _: {})
  model = tff_partial.from_keras(stack(1, linear(name='head')), loss='mse')
  how = FirstWeights(public_run='', public_weights=(wrong, 'head/.*'))
  with pytest.raises(UserError, match='public_weights=.*(is not a|matches no)'):
    how.begin(model)


@pytest.mark.slow
@pytest.mark.parametrize('is_measured', [True, False])
def test_public_weights_are_those_of_the_best_round(tmp_path, is_measured):
  # The last round is the best, and no multiple of `evaluate_every`.
  model = tff_partial.from_keras(stack(2, linear(name='head')), loss='mse')
  process = tff_partial.algorithms.build_fed_avg(model)
  measure = tff_partial.algorithms.build_fed_avg_eval(model)
  clients = tff_partial.pack(planted.drawn({'ann': 8}), process.example_spec)
  result = tff_partial.train(
    process,
    clients,
    rounds=3,
    clients_per_round=1,
    evaluate_every=50,
    validation=tff_partial.EvaluationSet(measure, clients)
    if is_measured
    else None,
    output_dir=tmp_path,
  )
  planted.assert_same(
    checkpoints.best_shared_weights(tmp_path / 'checkpoints'),
    dict(result.weights.trainable['global']),
  )


@pytest.mark.slow
def test_public_weights_are_kept_and_not_sent(tmp_path):
  public, private = tmp_path / 'public', tmp_path / 'private'
  train_small(public, run=run_well)
  train_small(private, '--biases', f'--set=public_run={public}', run=run_well)
  shared = checkpoints.best_shared_weights(public / 'checkpoints')
  trained = checkpoints.best_shared_weights(private / 'checkpoints')
  assert set(shared) == {'item_embedding/embeddings'}
  assert set(trained) == {'item_bias/embeddings'}
  sent = [
    result(folder)['communication']['upload_bytes']
    for folder in (public, private)
  ]
  assert 0 < sent[1] < sent[0]
