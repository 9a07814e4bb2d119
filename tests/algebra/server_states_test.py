"""What the server holds beside weights is there where clients are measured."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests.support.stacks import linear
from tests.support.stacks import stack
import tff_partial
from tff_partial import evaluation
from tff_partial.client_statistics import Statistic
from tff_partial.contexts import batch_of
from tff_partial.errors import SettingError
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.training import evaluation_sets
from tff_partial.training import programs


def _count(model):
  del model
  return {'rounds': tf.constant(0.0)}


_build = stack(1, linear(name='shared'), linear(name='own'))


def _predicted(client) -> tf.Tensor:
  """How many rounds the server has counted."""
  predictions = batch_of(client).predictions
  return tf.zeros_like(predictions) + client.server['rounds']


@pytest.fixture(scope='module', name='process')
def fixture_process():
  """The server counts rounds, which a term of clients reads."""

  def held_near(client):
    return 0.0 * client.server['rounds']

  return tff_partial.compose(
    tff_partial.from_keras(_build, loss='mae', local='own'),
    work=[
      Phase(
        ('global', 'local'),
        optimizer=sgd(0.0),
        terms=(held_near,),
        measured=True,
      )
    ],
    client_state=tff_partial.client_state.persist_local,
    statistics=[
      Statistic(
        'one',
        lambda client: client.outcome.weight,
        update=lambda server, total: server._replace(
          state={'rounds': server.state['rounds'] + 1.0}
        ),
      )
    ],
    server_state=_count,
  )


@pytest.fixture(scope='module', name='exam')
def fixture_exam(process):
  """Labels are 2: the loss is |2 - rounds|."""
  measuring = evaluation.build_evaluation(
    process.model,
    work=[Phase(train=(), measured=True, predict_fn=_predicted)],
    client_state=tff_partial.client_state.persist_local,
    server_state=_count,
  )
  examples = {'x': np.ones([3, 1], 'f'), 'y': np.full([3, 1], 2.0, 'f')}
  clients = tff_partial.pack({'ann': examples}, measuring.example_spec)
  return programs.EvaluationSet(measuring, clients)


@pytest.mark.slow
def test_the_best_round_has_its_server_state(process, exam, tmp_path):
  def train(rounds):
    return tff_partial.train(
      process,
      exam.clients,
      rounds=rounds,
      clients_per_round=1,
      validation=exam,
      evaluate_every=1,
      output_dir=tmp_path,
    )

  result = train(3)
  assert [row['validation_loss'] for row in result.history] == [1.0, 0.0, 1.0]
  assert result.best_round == 2
  # Also of a run that goes on, and of one that is loaded.
  longer, saved = train(4), programs.load(process, tmp_path)
  assert longer.history[-1]['validation_loss'] == 2.0
  for each, last in ((result, 3.0), (longer, 4.0)):
    assert float(each.server_state['rounds']) == last
  for each in (result, longer, saved):
    assert float(each.best_server_state['rounds']) == 2.0
    measured = tff_partial.evaluate(
      exam, each.best_weights, server_state=each.best_server_state
    )
    assert measured == result.best_validation
  found = evaluation_sets.measure_by_support(
    lambda split: exam.evaluation,
    saved.best_weights,
    exam.clients,
    [0],
    server_state=saved.best_server_state,
  )
  assert found[0]['loss'] == 0.0


@pytest.mark.slow
def test_a_new_client_personalises_by_the_servers_state(process, exam):
  result = tff_partial.train(
    process, exam.clients, rounds=1, clients_per_round=1
  )
  new = tff_partial.pack(
    {'bob': {'x': np.ones([1, 1], 'f'), 'y': np.ones([1, 1], 'f')}},
    process.example_spec,
  )
  keras_model = tff_partial.personalise(result, new, 'bob')
  assert math.isfinite(keras_model.predict(np.ones([1, 1]), verbose=0)[0, 0])


@pytest.mark.slow
def test_an_evaluation_says_what_it_misses(process, exam):
  weights = tff_partial.train(
    process, exam.clients, rounds=1, clients_per_round=1
  ).weights
  with pytest.raises(SettingError, match='<rounds=float32>, bu'):
    tff_partial.evaluate(exam, weights)
