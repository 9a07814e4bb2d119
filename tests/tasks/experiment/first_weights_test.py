"""Runs that start from the weights of a public run."""

import pytest

from tasks.errors import OptionError
from tasks.experiment.options.first_weights import FirstWeights
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
