"""The recipes of Stack Overflow and FEMNIST, on TFF's synthetic data sets.

TFF invents two or three clients; here each stands under several names.
"""

import pathlib
from unittest import mock

import pytest
import tensorflow_federated as tff

from tasks.experiment import from_recipe
from tasks.experiment import Output
from tasks.experiment import run

_DATA_SETS = tff.simulation.datasets
_SMALL = {'rounds': 2, 'evaluate_every': 2, 'clients_per_round': 2}


def _repeated(client_data, number: int):
  """Each client's examples under so many names."""
  examples = {
    f'{client} {copy}': client_data.create_tf_dataset_for_client(client)
    for client in client_data.client_ids
    for copy in range(number)
  }
  return tff.simulation.datasets.ClientData.from_clients_and_tf_fn(
    list(examples), examples.get
  )


def _report(recipe: str, folder: pathlib.Path, **flags) -> dict:
  """The report of a small run, which has measured new clients."""
  config = from_recipe(recipe, data_dir=str(folder), **flags, **_SMALL)
  report = run(config, Output(str(folder / 'run'), tensorboard=False)).report
  unseen = report['test']['unseen']
  assert 0.0 <= unseen['accuracy'] <= 1.0 and unseen['num_clients'] >= 1
  return report


@pytest.mark.slow
@pytest.mark.parametrize('recipe', ['femnist_fed_avg', 'femnist_fed_recon'])
def test_recipes_of_femnist(recipe, monkeypatch, tmp_path):
  given = _repeated(_DATA_SETS.emnist.get_synthetic(), 6)
  load_data = mock.Mock(return_value=(given, given))
  monkeypatch.setattr(_DATA_SETS.emnist, 'load_data', load_data)
  report = _report(recipe, tmp_path, download=True)
  assert load_data.call_args.kwargs['only_digits'] is False
  assert report['data']['users'] == 12


@pytest.mark.slow
@pytest.mark.parametrize(
  'recipe', ['stackoverflow_fed_recon', 'stackoverflow_fed_yogi']
)
def test_recipes_of_stack_overflow(recipe, tmp_path):
  given = _repeated(_DATA_SETS.stackoverflow.get_synthetic(), 5)
  (tmp_path / 'stackoverflow').mkdir()
  _DATA_SETS.save_to_sql_client_data(
    given.client_ids,
    given.create_tf_dataset_for_client,
    str(tmp_path / 'stackoverflow/stackoverflow.sqlite'),
    split_names_by_client_id=dict.fromkeys(given.client_ids, 'train'),
  )
  _report(recipe, tmp_path, next_word_vocabulary_size=40, lstm_units=8)
