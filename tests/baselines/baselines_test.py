"""Other papers' methods: what they are special cases of, and by hand."""

import collections
from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import baselines
from tests.support import planted
from tests.support.stacks import dense
from tests.support.stacks import linear
from tests.support.stacks import stack
from tff_partial import algorithms
from tff_partial import client_state
from tff_partial import evaluation
from tff_partial import phases
from tff_partial import processes
from tff_partial import random_bits
from tff_partial import tiers
from tff_partial.data import packing
from tff_partial.data import splits
from tff_partial.errors import SettingError
from tff_partial.model import keras_models
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.phases import sgd

layers = tf.keras.layers
_TRAINING = Phase(batch_size=4, epochs=2, shuffle=True)
_PLAIN = Phase(batch_size=4)
pytestmark = pytest.mark.usefixtures('in_cohorts')


# ---- a small network and its clients -----------------------------------------


_network = stack(3, dense(4, 'tanh', name='body'), dense(1, name='head'))


@functools.cache
def _model(local: str | None = None) -> models.PartialModel:
  return keras_models.from_keras(
    _network, local=local, loss=tf.keras.losses.MeanSquaredError()
  )


def _clients() -> dict[str, planted.Fields]:
  """Some clients like what others do not."""
  generator = np.random.default_rng(0)
  clients = {}
  for place, count in enumerate((9, 6, 13)):
    x = generator.normal(size=[count, 3]).astype(np.float32)
    y = (-1) ** place * x.sum(1, keepdims=True) + 0.5
    clients[f'client {place}'] = {'x': x, 'y': y.astype(np.float32)}
  return clients


@dataclasses.dataclass(frozen=True)
class Run:
  """What rounds of all clients come to."""

  process: processes.PartialProcess
  weights: dict[str, np.ndarray]
  kept: list[Any]
  state: Any


def _run(
  process: processes.PartialProcess,
  rounds: int = 2,
  clients: Mapping[str, planted.Fields] | None = None,
) -> Run:
  clients = clients or _clients()
  state, kept = planted.trained(process, clients, [list(clients)] * rounds)
  weights = planted.global_weights(process, state)
  return Run(process, weights, list(kept.values()), state)


def _personal_weights(
  measuring: evaluation.Evaluation,
  run: Run,
  kept: list[Any] | None = None,
  clients: Mapping[str, planted.Fields] | None = None,
) -> list[dict[str, np.ndarray]]:
  """The weights that each client would use, by name."""
  cohort = planted.cohort_of(measuring, clients or _clients(), 'measured')
  if kept is None:
    kept = planted.first_states(measuring, cohort)
  weights = run.process.get_model_weights(run.state)
  return [
    dict(measuring.personalise(weights, remembered, client))
    for remembered, client in zip(kept, cohort, strict=True)
  ]


def _assert_moved(one: Any, other: Any) -> None:
  flat = zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True)
  assert max(abs(a - b).max() for a, b in flat) > 1e-3


# ---- special cases of one another --------------------------------------------


@pytest.fixture(scope='module', name='fed_avg')
def fixture_fed_avg() -> Run:
  return _run(algorithms.build_fed_avg(_model(), training=_TRAINING))


@pytest.mark.slow
@pytest.mark.parametrize(
  ('build', 'options'),
  [
    (baselines.build_fed_prox, {'penalty': 0.0, 'training': _TRAINING}),
    (algorithms.build_fed_per, {'training': _TRAINING}),
    (algorithms.build_fed_babu, {'training': _TRAINING}),
    (baselines.build_centralized, {'training': _TRAINING}),
    (algorithms.build_ditto, {'penalty': 2.0, 'training': _TRAINING}),
  ],
)
def test_without_local_weights_it_is_fed_avg_bit_for_bit(
  fed_avg, build, options
):
  planted.assert_same(_run(build(_model(), **options)).weights, fed_avg.weights)
  _assert_moved(_run(fed_avg.process, 0).weights, fed_avg.weights)


_HALVES = splits.halves()


@pytest.mark.slow
@pytest.mark.parametrize(
  ('build', 'options', 'training'),
  [
    # Not in a random order, which is another one in a second phase.
    (algorithms.build_fed_rep, {'representation': _PLAIN}, _PLAIN),
    (
      algorithms.build_fed_recon,
      {'split': _HALVES, 'reconstruct': _PLAIN},
      dataclasses.replace(_PLAIN, on=_HALVES.query),
    ),
    (
      baselines.build_fed_sgd,
      {'client_learning_rate': 0.3},
      Phase(optimizer=sgd(0.3), batch_size=None),
    ),
  ],
)
def test_without_local_weights_it_is_fed_avg_of_a_phase(
  build, options, training
):
  expected = _run(algorithms.build_fed_avg(_model(), training=training))
  found = _run(build(_model(), **options))
  planted.assert_same(found.weights, expected.weights)


@pytest.fixture(scope='module', name='fed_per')
def fixture_fed_per() -> Run:
  return _run(algorithms.build_fed_per(_model('head'), training=_TRAINING))


# ---- one number, to redo by hand ---------------------------------------------


# The prediction is a weight w, which begins with 0.
_one_number = stack(1, linear('zeros', name='w'))


@functools.cache
def _number() -> models.PartialModel:
  return keras_models.from_keras(
    _one_number, loss=tf.keras.losses.MeanSquaredError()
  )


def _labelled(*labels: float) -> dict[str, planted.Fields]:
  y = np.array(labels, np.float32)[:, None]
  return {'ann': {'x': np.ones_like(y), 'y': y}}


_STRENGTHS = (1.0, 6.0)


@pytest.mark.slow
def test_p_fed_me_uses_the_minimum_of_the_moreau_envelope():
  process = algorithms.build_p_fed_me(_number())
  for penalty in _STRENGTHS:
    measuring = algorithms.build_p_fed_me_eval(
      _number(),
      penalty=penalty,
      personalise=Phase(optimizer=sgd(0.05), steps_per_batch=300),
    )
    clients = _labelled(1.0, 9.0)  # The second is for measuring.
    (own,) = _personal_weights(measuring, _run(process, 0), clients=clients)
    (theta,) = own.values()
    np.testing.assert_allclose(theta, [[2 / (2 + penalty)]], rtol=1e-4)


# ---- how they personalise ----------------------------------------------------


@pytest.mark.slow
def test_seen_clients_use_what_they_remember_and_new_ones_train_it(fed_per):
  seen = algorithms.build_fed_per_eval(_model('head'))
  for own, kept in zip(
    _personal_weights(seen, fed_per, fed_per.kept), fed_per.kept, strict=True
  ):
    planted.assert_same(own, {**fed_per.weights, **kept})
  new = algorithms.build_fed_per_eval(_model('head'), personalise=Phase())
  cohort = planted.cohort_of(new, _clients(), 'measured')
  firsts = planted.first_states(new, cohort)
  for own, first in zip(
    _personal_weights(new, fed_per, firsts), firsts, strict=True
  ):
    planted.assert_same({n: own[n] for n in fed_per.weights}, fed_per.weights)
    _assert_moved({n: own[n] for n in first}, dict(first))


@pytest.mark.slow
@pytest.mark.parametrize(
  'options', [{'personalise': Phase()}, {'split': splits.halves()}]
)
def test_who_personalises_is_measured_on_the_query_set_alone(fed_per, options):
  measuring = algorithms.build_fed_per_eval(_model('head'), **options)
  cohort = planted.cohort_of(measuring, _clients())
  weights = fed_per.process.get_model_weights(fed_per.state)
  output = measuring.evaluate(weights, fed_per.kept, cohort)
  assert [client['num_examples'] for client in output.per_client] == [5, 3, 7]


@pytest.mark.slow
def test_personal_copies_are_measured():
  run = _run(algorithms.build_ditto(_model()))
  seen = algorithms.build_ditto_eval(_model())
  for own, kept in zip(
    _personal_weights(seen, run, run.kept), run.kept, strict=True
  ):
    planted.assert_same(own, dict(kept[tiers.PERSONAL]))
    _assert_moved(own, run.weights)
  # Who never took part has but the global weights, unless it trains first.
  for own in _personal_weights(seen, run):
    planted.assert_same(own, run.weights)
  new = algorithms.build_ditto_eval(_model(), personalise=Phase())
  for own in _personal_weights(new, run):
    _assert_moved(own, run.weights)


@pytest.mark.slow
def test_fed_babu_has_one_head_for_all_until_it_is_measured():
  model = _model('head')
  run = _run(algorithms.build_fed_babu(model))
  assert run.process.is_stateless
  assert list(run.weights) == ['body/kernel', 'body/bias']
  seed = random_bits.derive(model.seed, 'alike')
  drawn = model.initial_weights(tiers.LOCAL, seed)
  head = {name: tensor.numpy() for name, tensor in drawn.items()}
  idle = algorithms.build_fed_babu_eval(model, personalise=Phase(max_steps=0))
  for own in _personal_weights(idle, run):
    planted.assert_same(own, {**run.weights, **head})
  tuned = _personal_weights(algorithms.build_fed_babu_eval(model), run)
  for own in tuned:
    _assert_moved({n: own[n] for n in run.weights}, run.weights)
    _assert_moved({n: own[n] for n in head}, head)


@pytest.mark.slow
def test_fine_tuning_moves_the_part_that_is_named(fed_avg, fed_per):
  tuned = algorithms.build_fine_tuning_eval(
    _model(), personalise=Phase(variable_filter='head/.*')
  )
  for own in _personal_weights(tuned, fed_avg):
    for name, tensor in own.items():
      moved = (tensor != fed_avg.weights[name]).any()
      assert moved == name.startswith('head/')
  # Local weights begin as they are remembered.
  tuned = algorithms.build_fine_tuning_eval(
    _model('head'),
    personalise=Phase(variable_filter='body/kernel'),
    client_state=client_state.persist_local,
  )
  for own, kept in zip(
    _personal_weights(tuned, fed_per, fed_per.kept), fed_per.kept, strict=True
  ):
    planted.assert_same({n: own[n] for n in kept}, dict(kept))
    _assert_moved(own['body/kernel'], fed_per.weights['body/kernel'])


# ---- centralized -------------------------------------------------------------


@pytest.mark.slow
def test_centralized_training_is_that_of_keras_on_the_pool():
  process = baselines.build_centralized(_model(), training=Phase(batch_size=8))
  packed = packing.pack(_clients(), process.example_spec)
  pool = baselines.centralized.pool(packed)
  assert pool.client_ids == (baselines.centralized.ALL_CLIENTS,)
  assert pool.num_examples == 9 + 6 + 13
  state = process.initialize()
  keras = _model().to_keras(planted.global_weights(process, state))
  keras.compile(tf.keras.optimizers.legacy.SGD(0.1), 'mse')
  cohort = pool.cohort(pool.client_ids, np.zeros([1, 2], np.int32))
  for _ in range(2):
    state = process.next(state, [collections.OrderedDict()], cohort).state
  x, y = (
    np.concatenate([fields[name] for fields in _clients().values()])
    for name in ('x', 'y')
  )
  keras.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
  planted.assert_close(
    list(planted.global_weights(process, state).values()), keras.get_weights()
  )


# ---- refusals ----------------------------------------------------------------


@pytest.mark.parametrize(
  'build',
  [
    baselines.build_fed_prox,
    algorithms.build_ditto,
    algorithms.build_p_fed_me,
    algorithms.build_ditto_eval,
    algorithms.build_p_fed_me_eval,
  ],
)
def test_terms_that_drive_away_are_refused(build):
  with pytest.raises(SettingError, match='the penalty: expected .* found -0.1'):
    build(_number(), penalty=-0.1)


def test_a_part_that_does_not_exist_cannot_be_tuned():
  with pytest.raises(
    phases.PhaseError, match="variable_filter='tail/.*' names none"
  ):
    algorithms.build_fine_tuning_eval(
      _model(), personalise=Phase(variable_filter='tail/.*')
    )
