"""kNN-Per: clients answer by the nearest of their own examples, and a model.

Features of most tests are the two inputs themselves, so that distances are
those of points in a plane. Three classes have the logits `x W`, which are zero
for all if W is, so that each has the probability 1/3.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import baselines
from tasks.emnist import models as emnist_models
from tests.support import planted
from tff_partial import algorithms
from tff_partial import evaluation
from tff_partial import phases
from tff_partial import tiers
from tff_partial.errors import SettingError
from tff_partial.model import keras_models
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.training import personal_models
from tff_partial.training.errors import ProgramError

_CLASSES = 3


def _build(shape: tuple[int, ...] = ()) -> tf.keras.Model:
  inputs = tf.keras.Input([*shape, 2])
  features = tf.keras.layers.Dense(
    2, use_bias=False, kernel_initializer='identity', name='turn'
  )(inputs)
  head = tf.keras.layers.Dense(_CLASSES, use_bias=False, name='head')
  outputs = {'features': features, 'logits': head(features)}
  return tf.keras.Model(inputs, outputs)


def _loss(labels: tf.Tensor, outputs: Any) -> tf.Tensor:
  losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
    tf.maximum(labels, 0), outputs['logits']
  )
  losses._keras_mask = labels >= 0
  return losses


class _Accuracy(tf.keras.metrics.SparseCategoricalAccuracy):
  def update_state(self, labels, outputs, sample_weight=None):
    super().update_state(labels, outputs['logits'], sample_weight)


def _model(
  build: Callable[[], tf.keras.Model] = _build,
  labels: tuple[int, ...] = (),
  **options: Any,
) -> models.PartialModel:
  return keras_models.from_keras(
    build, loss=_loss, labels=tf.TensorSpec(labels, tf.int32), **options
  )


@pytest.fixture(scope='module', name='model')
def fixture_model() -> models.PartialModel:
  return _model(metrics=lambda: [_Accuracy('accuracy')])


def _weights(head: np.ndarray, **others: Any) -> Any:
  return planted.as_model_weights(
    {
      'turn/kernel': np.eye(2, dtype=np.float32),
      'head/kernel': head.astype(np.float32),
      **others,
    }
  )


_ZEROS = _weights(np.zeros([2, _CLASSES]))


def _fields(
  points: list[list[float]], labels: list[int], **others: Any
) -> planted.Fields:
  """A client's examples: half of them are its support set."""
  return {
    'x': np.array(points, np.float32),
    'y': np.array(labels, np.int32),
    **others,
  }


# ---- numbers to redo ---------------------------------------------------------


def test_near_examples_count_more(model):
  """Questions at the origin, with k = 2, the scale 5 and a share of 1/4.

  Ann has neighbours at the distances 0 and 5. Their weights are 1 and 1/e, so
  that by them the class of the first has the probability e / (e + 1). Bob has
  three at the distance 1, one of each class, which all count, and one at 2,
  which does not. Cid's are at 1000 and 1001: exp(-200) is no float32, but what
  is compared are 1 and exp(-1/5). The model says 1/3 of everything.
  """
  origin = [0, 0]
  found = planted.evaluate(
    baselines.build_knn_per_eval(
      model, num_neighbors=2, scale=5.0, mixing=0.25
    ),
    _ZEROS,
    {
      'ann': _fields([origin, [3, 4], origin, origin], [0, 1, 0, 1]),
      'bob': _fields(
        [[1, 0], [0, -1], [-1, 0], [2, 0], *[origin] * 4], [0, 1, 2, 2] * 2
      ),
      'cid': _fields([[1000, 0], [1001, 0], origin, origin], [2, 1, 2, 2]),
    },
  )
  near, nearer = math.e / (math.e + 1), 1 / (1 + math.exp(-1 / 5))
  by_memory = [[near, 1 - near], [1 / 3] * 4, [nearer] * 2]
  for own, probabilities in zip(found.per_client, by_memory, strict=True):
    right = 0.25 * np.array(probabilities) + 0.75 / 3
    assert own['loss'] == pytest.approx(-np.log(right).mean(), abs=1e-6)
  # It answers with the class of the nearest, which is right once.
  assert found.per_client[0]['accuracy'] == pytest.approx(0.5)


# ---- a NumPy loop ------------------------------------------------------------


def _by_hand(
  head: np.ndarray,
  fields: planted.Fields,
  number: int | None,
  mixing: float,
  scale: float,
) -> tuple[float, int]:
  """The sum of a client's losses, and how many there are."""
  x, y = fields['x'].astype(np.float64), fields['y']
  weight = fields.get('weight', np.ones(len(y)))
  half = max(min(round(len(y) / 2), len(y) - 1), 1)
  kept = [i for i in range(half) if weight[i] > 0 and y[i] >= 0]
  total = 0.0
  for i in range(half, len(y)):
    exponentials = np.exp(x[i] @ head)
    p = exponentials / exponentials.sum()
    nearest = sorted(kept, key=lambda j, i=i: np.linalg.norm(x[i] - x[j]))
    votes = np.zeros(_CLASSES)
    for j in nearest[:number]:
      votes[y[j]] += math.exp(-np.linalg.norm(x[i] - x[j]) / scale)
    if nearest:
      p = mixing * votes / votes.sum() + (1 - mixing) * p
    total -= weight[i] * math.log(p[y[i]])
  return total, len(y) - half


_SIZES = {'ann': 9, 'bob': 1, 'cid': 2, 'dot': 14, 'eve': 5}


@pytest.fixture(scope='module', name='clients')
def fixture_clients() -> dict[str, planted.Fields]:
  """Clients of several sizes; eve's support set has no weight."""
  random = np.random.default_rng(3)
  clients = {
    name: {
      'x': random.normal(size=[size, 2]).astype(np.float32),
      'y': random.integers(0, _CLASSES, size).astype(np.int32),
      'weight': random.choice([0.5, 1.0, 2.0], size).astype(np.float32),
    }
    for name, size in _SIZES.items()
  }
  clients['dot']['weight'][:2] = 0.0
  clients['eve']['weight'][:3] = 0.0
  return clients


_HEAD = np.array([[0.5, -1.0, 0.25], [1.0, 0.5, -0.75]])


@pytest.mark.slow
@pytest.mark.parametrize('number', [3, None])
def test_all_runtimes_give_the_numbers_of_a_loop(model, clients, number):
  measuring = baselines.build_knn_per_eval(
    model, num_neighbors=number, mixing=0.4, scale=0.7, measure_batch_size=4
  )
  expected = {
    name: _by_hand(_HEAD, fields, number, 0.4, 0.7)
    for name, fields in clients.items()
  }
  total, count = map(sum, zip(*expected.values(), strict=True))
  for runtime in planted.RUNTIMES.values():
    found = planted.evaluate(
      measuring, _weights(_HEAD), clients, runtime, capacities=[16]
    )
    assert found.metrics['loss'] == pytest.approx(total / count, abs=1e-6)
    for own, (loss, size) in zip(
      found.per_client, expected.values(), strict=True
    ):
      assert own['loss'] == pytest.approx(loss / max(size, 1), abs=1e-6)


# ---- other models ------------------------------------------------------------


@pytest.mark.slow
def test_each_step_of_a_sequence_has_neighbours():
  """Two steps, of which the second may have no class, -1.

  The support example stands at 0 with class 0; its second step is no key. So
  all questions are answered with class 0 and 1 - mixing of the model.
  """
  model = _model(functools.partial(_build, (2,)), (2,))
  found = planted.evaluate(
    baselines.build_knn_per_eval(model, mixing=0.7),
    _ZEROS,
    {
      'ann': {
        'x': np.array([[[0, 0], [9, 9]], [[9, 9], [9, 8]]], np.float32),
        'y': np.array([[0, -1], [0, 1]], np.int32),
      }
    },
  )
  right = [0.7 + 0.3 / 3, 0.3 / 3]
  assert found.metrics['loss'] == pytest.approx(-np.log(right).mean(), abs=1e-6)


@pytest.mark.slow
def test_local_weights_are_rebuilt_before(clients):
  """Without a share, that is the evaluation of FedRecon."""
  model = _model(local='head')
  weights = planted.as_model_weights({'turn/kernel': np.eye(2, dtype='f')})
  recon = algorithms.build_fed_recon_eval(model, personalise=Phase(epochs=3))
  personalise = Phase(epochs=3)
  alone, mixed, expected = (
    planted.evaluate(measuring, weights, clients).metrics['loss']
    for measuring in (
      baselines.build_knn_per_eval(model, personalise=personalise, mixing=0.0),
      baselines.build_knn_per_eval(model, personalise=personalise, mixing=0.5),
      recon,
    )
  )
  assert alone == expected
  assert abs(mixed - expected) > 1e-3


@pytest.mark.slow
def test_a_memory_is_of_the_tuned_model(model, clients):
  """As if the server's weights were those that the client tunes to."""
  tune = Phase(optimizer=sgd(0.5), epochs=8)
  dot = {'dot': clients['dot']}
  tuning = algorithms.build_fine_tuning_eval(model, personalise=tune)
  (value,) = planted.cohort_of(tuning, dot, 1)
  tuned = tuning.personalise(_weights(_HEAD), (), value)
  moved = np.abs(tuned['turn/kernel'] - np.eye(2))
  assert moved.max() > 0.1  # So that keys and questions are others.
  found, expected = (
    planted.evaluate(measuring, weights, dot).metrics['loss']
    for measuring, weights in (
      (baselines.build_knn_per_eval(model, tune=tune), _weights(_HEAD)),
      (
        baselines.build_knn_per_eval(model),
        planted.as_model_weights(dict(tuned)),
      ),
    )
  )
  assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_any_classifier_with_features_has_neighbours():
  """Two images whose labels the model cannot know, but a neighbour does."""
  model = emnist_models.build_with_prototypes(
    functools.partial(
      emnist_models.build_classifier, emnist_models.CNN, (8, 8), 10, 16
    )
  )
  images = np.random.default_rng(0).integers(0, 16, [2, 8, 8], np.uint8)
  weights = planted.as_model_weights(
    model.initial_weights(tiers.GLOBAL, [0, 1])
  )
  found = planted.evaluate(
    baselines.build_knn_per_eval(model, mixing=0.9),
    weights,
    {
      'ann': {
        'x': np.concatenate([images, images]),
        'y': np.array([7, 3, 7, 3], np.int32),
      }
    },
  )
  assert found.metrics['accuracy'] == 1.0


# ---- refusals ----------------------------------------------------------------


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'mixing': 1.0}, 'mixing=1.0: .* from 0 to less than 1'),
    ({'num_neighbors': 0}, 'num_neighbors=0: give at least 1, or None'),
    ({'scale': 0.0}, 'scale=0.0: .* Give a positive number'),
    ({'features': 'body'}, "features='body': the model has no such output"),
    (
      {'targets': lambda labels: (labels[:, None], labels[:, None] >= 0)},
      r'predictions \[1\] for one example, but classes are \[1, 1\]',
    ),
  ],
)
def test_what_makes_no_sense_is_refused(options, message, model):
  with pytest.raises(SettingError, match=message):
    baselines.build_knn_per_eval(model, **options)


def test_features_of_whole_sequences_are_refused_for_their_steps():
  def build() -> tf.keras.Model:
    given = _build((2,))
    pooled = tf.reduce_sum(given.output['features'], 1)
    outputs = {**given.output, 'features': pooled}
    return tf.keras.Model(given.input, outputs)

  with pytest.raises(
    SettingError,
    match=r'predictions \[1, 2\] for one example, but keys are \[1\]',
  ):
    baselines.build_knn_per_eval(_model(build, (2,)))


# ---- answers of phases -------------------------------------------------------


def test_a_phase_measures_what_the_client_answers(model):
  """The logits of class 2 are raised by log 4: its probability is 4/6."""

  def answer(client: Any) -> Any:
    outputs = client.batch.predictions
    raised = outputs['logits'] + tf.math.log([1.0, 1.0, 4.0])
    return {**outputs, 'logits': raised}

  measuring = evaluation.build_evaluation(
    model, work=[Phase(train=(), measured=True, predict_fn=answer)]
  )
  found = planted.evaluate(measuring, _ZEROS, {'ann': _fields([[0, 0]], [2])})
  assert found.metrics['loss'] == pytest.approx(-math.log(4 / 6))
  assert found.metrics['accuracy'] == 1.0


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (
      {'predict_fn': 3},
      'predict_fn: expected a function from a .* found an? int',
    ),
    (
      {'predict_fn': lambda client: None, 'train': (tiers.LOCAL,)},
      r"train=\('local',\): .* so that it has no `predict_fn`",
    ),
  ],
)
def test_phases_that_cannot_answer_are_refused(options, message):
  with pytest.raises(phases.PhaseError, match=message):
    Phase(**{'train': (), **options})


@pytest.mark.parametrize(
  'answer',
  [
    lambda client: client.batch.predictions['logits'],
    lambda client: {
      **client.batch.predictions,
      'logits': client.batch.predictions['logits'][:, :2],
    },
  ],
)
def test_answers_that_are_no_predictions_are_refused(answer, model):
  with pytest.raises(phases.PhaseError, match='Return the same structure'):
    evaluation.build_evaluation(
      model, work=[Phase(train=(), measured=True, predict_fn=answer)]
    )


def test_a_memory_is_no_part_of_a_keras_model(model):
  measuring = baselines.build_knn_per_eval(model)
  weights = planted.as_model_weights(
    model.initial_weights(tiers.GLOBAL, [0, 0])
  )
  with pytest.raises(ProgramError, match='such as a memory of their examples'):
    personal_models.model_of(measuring, weights, {}, {'examples': {}})
