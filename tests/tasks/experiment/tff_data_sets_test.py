"""The recipes of Stack Overflow and FEMNIST, on TFF's synthetic data sets.

TFF invents two or three clients; here each stands under several names.
"""

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


@pytest.mark.slow
@pytest.mark.parametrize('recipe', ['femnist_fed_avg', 'femnist_fed_recon'])
def test_recipes_of_femnist(recipe, monkeypatch, tmp_path):
  given = _DATA_SETS.emnist.get_synthetic()
  arguments = {}

  def load_data(**kwargs):
    arguments.update(kwargs)
    return _repeated(given, 6), _repeated(given, 6)

  monkeypatch.setattr(_DATA_SETS.emnist, 'load_data', load_data)
  config = from_recipe(recipe, download=True, data_dir=str(tmp_path), **_SMALL)
  result = run(config, Output(str(tmp_path / 'run'), tensorboard=False))
  assert arguments['only_digits'] is False
  assert result.report['data']['users'] == 12
  unseen = result.report['test']['unseen']
  assert 0.0 <= unseen['accuracy'] <= 1.0 and unseen['num_clients'] >= 1


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
  sizes = {'next_word_vocabulary_size': 40, 'lstm_units': 8}
  config = from_recipe(recipe, data_dir=str(tmp_path), **sizes, **_SMALL)
  result = run(config, Output(str(tmp_path / 'run'), tensorboard=False))
  unseen = result.report['test']['unseen']
  assert 0.0 <= unseen['accuracy'] <= 1.0 and unseen['num_clients'] >= 1
