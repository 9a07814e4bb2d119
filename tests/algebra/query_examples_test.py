"""Clients without query examples, and query examples that lie apart."""

from typing import Any

import numpy as np
import pytest

from tests.support import planted
import tff_partial
from tff_partial.algorithms import build_fed_recon
from tff_partial.algorithms import build_fed_recon_eval
from tff_partial.data import examples
from tff_partial.training.errors import ProgramError


@pytest.fixture(scope='module', name='model')
def fixture_model() -> Any:
  return tff_partial.from_keras(planted.build_slope, local='own', loss='mse')


def _fields(*labels: float) -> dict[str, Any]:
  return {'x': np.ones([len(labels), 1]), 'y': np.array(labels)}


@pytest.mark.slow
@pytest.mark.parametrize('others', [0, 3])
def test_clients_without_query_examples_are_counted(model, others, caplog):
  process = build_fed_recon(model)
  given = {f'one {n}': _fields(1.0) for n in range(3)}
  given |= {f'four {n}': _fields(1.0, 1.0, n, n) for n in range(others)}
  clients = tff_partial.pack(given, process.example_spec)
  exam = tff_partial.EvaluationSet(build_fed_recon_eval(model), clients)

  def train() -> Any:
    return tff_partial.train(
      process,
      clients,
      rounds=2,
      clients_per_round=3 + others,
      validation=exam,
      evaluate_every=1,
    )

  if not others:
    with pytest.raises(
      ProgramError,
      match=r'None of the 3 clients has query examples, those of '
      r'fraction\(0.5\).query',
    ):
      train()
    return
  result = train()
  assert not result.diverged
  assert result.train['num_clients'] == 3
  assert [row['num_without_query'] for row in result.history] == [3, 3]
  assert result.validation['num_without_query'] == 3
  said = [record.getMessage() for record in caplog.records]
  said = [text for text in said if '3 of 6 clients have no query' in text]
  # One warning of training and one of evaluations, however many these are.
  assert [text[:8] for text in said] == ['Round 1:', '3 of 6 c']


@pytest.mark.slow
def test_clients_whose_examples_have_the_weight_zero_move_nothing(model):
  process = build_fed_recon(model)
  given = {'ann': _fields(1.0, 3.0)}
  nil = {'nil': {**_fields(9.0, 9.0), 'weight': np.zeros(2)}}
  alone, both = (
    tff_partial.train(
      process,
      tff_partial.pack(clients, process.example_spec),
      rounds=1,
      clients_per_round=len(clients),
    )
    for clients in (given, given | nil)
  )
  planted.assert_close(both.weights.trainable, alone.weights.trainable)
  assert both.train['loss'] == pytest.approx(alone.train['loss'])
  assert both.train['num_examples'] == alone.train['num_examples'] == 1


@pytest.mark.slow
def test_each_client_has_values_of_its_own_by_its_id(model):
  # A step of 0.1 from 0 against the mean label 1 makes 0.2 of it.
  measure = build_fed_recon_eval(model)
  given = {'ann': _fields(1.0, 1.0), 'one': _fields(9.0)}
  given['bob'] = _fields(1.0, 2.0)
  given['nil'] = {**_fields(1.0, 9.0), 'weight': np.array([1.0, 0.0])}
  clients = tff_partial.pack(given, measure.example_spec)
  shared = {'shared/own': np.float32([0.0])}
  weights = tff_partial.client.client_work.ModelWeights({'global': shared}, {})
  told = []
  measured = tff_partial.evaluate(
    tff_partial.EvaluationSet(measure, clients), weights, on_clients=told.append
  )
  (values,) = told
  assert values['loss'] == pytest.approx({'ann': 0.8**2, 'bob': 1.8**2})
  assert measured['per_client']['loss']['mean'] == pytest.approx(1.94)
  assert (measured['num_clients'], measured['num_without_query']) == (2, 2)


@pytest.mark.slow
def test_query_examples_may_lie_apart(model):
  split = tff_partial.splits.by_mark()
  measure = build_fed_recon_eval(model, split=split)
  support = {'ann': _fields(1.0, 1.0), 'bob': _fields(1.0)}
  query = {'ann': _fields(2.0), 'cid': _fields(3.0, 4.0)}
  clients = tff_partial.pack(support, measure.example_spec, query=query)
  assert clients.client_ids == ('ann', 'bob', 'cid')
  ann, _, cid = clients.cohort(clients.client_ids, np.zeros([3, 2], np.int32))
  assert ann['examples']['is_query'][:3].tolist() == [0, 0, 1]
  assert ann['examples']['y'][:3, 0].tolist() == [1, 1, 2]
  assert cid['examples']['is_query'][:2].tolist() == [1, 1]
  with pytest.raises(
    examples.ClientDataError, match="has no field 'is_query'.*by_mark"
  ):
    tff_partial.pack(support, model.example_spec, query=query)
  with pytest.raises(
    examples.ClientDataError, match="Client 'ann', query: unknown field 'z'"
  ):
    tff_partial.pack(
      support, measure.example_spec, query={'ann': {**query['ann'], 'z': [1]}}
    )
