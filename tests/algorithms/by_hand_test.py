"""Baselines with a state at the server or a mixed model, beside NumPy loops.

The model is `w x` for two inputs, the loss the squared error, and clients take
their examples in their order, so that a reader can follow each loop.
"""

from collections.abc import Iterator
import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import baselines
from baselines import fed_opt
from tests.support import planted
from tests.support.stacks import linear
from tests.support.stacks import stack
from tff_partial import algorithms
from tff_partial import layers
from tff_partial import phases
from tff_partial import tiers
from tff_partial.composition import Aggregation
from tff_partial.data import splits
from tff_partial.errors import SettingError
from tff_partial.model import keras_models
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.phases import PhaseError
from tff_partial.phases import sgd
from tff_partial.training import personal_models

_SIZES = {'ann': 5, 'bob': 3, 'cid': 4, 'dan': 2}
_BATCH, _EPOCHS, _RATE = 2, 2, 0.1
_TRAINING = Phase(optimizer=sgd(_RATE), batch_size=_BATCH, epochs=_EPOCHS)
# Two take part in each round, and some of them again.
_ROUNDS = (['ann', 'bob'], ['cid', 'ann'], ['bob', 'dan'], ['ann', 'cid'])
_NAME = 'predict/kernel'
pytestmark = pytest.mark.usefixtures('in_cohorts')


_build = stack(2, linear('ones', name='predict'))


@pytest.fixture(scope='module', name='model')
def fixture_model() -> models.PartialModel:
  return keras_models.from_keras(_build, loss='mse')


@pytest.fixture(scope='module', name='clients')
def fixture_clients() -> dict[str, planted.Fields]:
  return planted.drawn(_SIZES)


def _gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
  """Of the mean squared error."""
  return 2 * x.T @ (x @ w - y) / len(y)


def _thrice(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
  """Another loss of a phase than the model's own."""
  return 3.0 * tf.square(labels - predictions)[:, 0]


def _batches(
  fields: planted.Fields, size: int = _BATCH
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  x, y = (fields[name].astype(np.float64) for name in ('x', 'y'))
  for _ in range(_EPOCHS):
    for begin in range(0, len(y), size):
      yield x[begin : begin + size], y[begin : begin + size]


def _descended(w: np.ndarray, fields: planted.Fields) -> np.ndarray:
  """After plain steps on a client's examples."""
  for x, y in _batches(fields):
    w = w - _RATE * _gradient(w, x, y)
  return w


def _mean(found: list[Any], names: list[str]) -> Any:
  """Of clients, who count by their examples."""
  weights = [_SIZES[name] for name in names]
  return np.average(found, axis=0, weights=weights)


def _global(state: Any, name: str = _NAME) -> Any:
  return state.global_model_weights.trainable[tiers.GLOBAL][name]


def _assert_kept(
  remembered: Any, own: Any, *place: str, atol: float = 1e-6
) -> None:
  """What clients remember in some place is as by hand."""
  for name, kept in remembered.items():
    for part in place:
      kept = kept[part]
    np.testing.assert_allclose(kept, own[name], atol=atol)


def _assert_measured(
  measuring: Any, trained: Any, name: str, fields: planted.Fields, w: Any
) -> None:
  """A client's loss is that of some weights."""
  process, state, remembered = trained
  cohort = planted.cohort_of(measuring, {name: fields}, 0)
  weights = process.get_model_weights(state)
  found = measuring.evaluate(weights, [remembered[name]], cohort)
  errors = fields['x'] @ w - fields['y']
  assert found.metrics['loss'] == pytest.approx(np.mean(errors**2), rel=1e-5)


# ---- SCAFFOLD ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize('option', [1, 2])
def test_scaffold(option, model, clients):
  process = baselines.build_scaffold(
    model,
    num_clients=len(clients),
    option=option,
    training=_TRAINING,
    server_optimizer=sgd(0.8),
  )
  state, remembered = planted.trained(process, clients, _ROUNDS)
  w, c = np.ones([2, 1]), np.zeros([2, 1])
  own = {name: np.zeros([2, 1]) for name in clients}
  for names in _ROUNDS:
    moves, changes = [], []
    for name in names:
      local, steps = w, 0
      for x, y in _batches(clients[name]):
        local = local - _RATE * (_gradient(local, x, y) - own[name] + c)
        steps += 1
      new = own[name] - c + (w - local) / (steps * _RATE)
      if option == 1:
        new = _gradient(w, clients[name]['x'], clients[name]['y'])
      moves.append(local - w)
      changes.append(new - own[name])
      own[name] = new
    w = w + 0.8 * np.mean(moves, 0)
    c = c + len(names) / len(clients) * np.mean(changes, 0)
  np.testing.assert_allclose(_global(state), w, atol=1e-6)
  np.testing.assert_allclose(state.client_work['server'][_NAME], c, atol=1e-6)
  _assert_kept(remembered, own, _NAME)


@pytest.mark.slow
def test_control_variates_are_gradients_of_what_clients_train_on(
  model, clients
):
  training = dataclasses.replace(
    _TRAINING, loss=_thrice, on=splits.halves().support
  )
  process = baselines.build_scaffold(
    model, num_clients=1, option=1, training=training
  )
  _, remembered = planted.trained(process, clients, [['cid']])
  x, y = (clients['cid'][name][:2] for name in 'xy')
  np.testing.assert_allclose(
    remembered['cid'][_NAME], 3 * _gradient(np.ones([2, 1]), x, y), atol=1e-5
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  ('on', 'aggregation'),
  [
    # One example leaves none for the second half.
    (splits.halves().query, Aggregation()),
    (
      splits.everything(),
      Aggregation(
        client_weighting=lambda done: tf.cast(done.num_examples > 1, tf.float32)
      ),
    ),
  ],
  ids=['no examples', 'weight zero'],
)
def test_a_client_that_does_not_count_keeps_its_control_variate(
  model, clients, on, aggregation
):
  training = dataclasses.replace(_TRAINING, on=on)
  process = baselines.build_scaffold(
    model, num_clients=2, training=training, aggregation=aggregation
  )
  single = {name: values[:1] for name, values in clients['ann'].items()}
  state, remembered = planted.trained(
    process, {'ann': clients['ann'], 'eve': single}, [['ann', 'eve']] * 2
  )
  np.testing.assert_array_equal(remembered['eve'][_NAME], [[0.0], [0.0]])
  own = remembered['ann'][_NAME]
  assert np.abs(own).min() > 0
  planted.assert_close(state.client_work['server'][_NAME], own / 2)


@pytest.mark.slow
def test_first_weights_may_be_set_and_control_variates_stay(model, clients):
  process = baselines.build_scaffold(model, num_clients=4, training=_TRAINING)
  state, _ = planted.trained(process, clients, _ROUNDS[:1])
  weights = process.get_model_weights(state)
  changed = process.set_model_weights(state, weights)
  planted.assert_same(
    dict(changed.client_work['server']), dict(state.client_work['server'])
  )


# ---- FedAdam and FedYogi -----------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
  ('rule', 'betas'),
  [(fed_opt.TFF, {'beta_1': 0.8, 'beta_2': 0.9}), (fed_opt.PAPER, {})],
)
@pytest.mark.parametrize('name', ['adam', 'yogi'])
def test_adaptive_servers(name, rule, betas, model, clients):
  # Of the size of updates, so that it matters where it stands.
  rate, tau = 0.1, 0.1
  beta_1, beta_2 = betas.get('beta_1', 0.9), betas.get('beta_2', 0.99)
  build = {'adam': baselines.build_fed_adam, 'yogi': baselines.build_fed_yogi}
  process = build[name](
    model,
    training=_TRAINING,
    server_learning_rate=rate,
    tau=tau,
    rule=rule,
    **betas,
  )
  state, _ = planted.trained(process, clients, _ROUNDS)
  w, m = np.ones([2, 1]), np.zeros([2, 1])
  begins = 0.0 if (name, rule) == ('adam', fed_opt.TFF) else tau**2
  v = np.full([2, 1], begins)
  for number, names in enumerate(_ROUNDS, 1):
    move = _mean([_descended(w, clients[each]) - w for each in names], names)
    m = beta_1 * m + (1 - beta_1) * move
    if name == 'adam':
      v = beta_2 * v + (1 - beta_2) * move**2
    else:
      v = v - (1 - beta_2) * move**2 * np.sign(v - move**2)
    step = rate * m / (np.sqrt(v) + tau)
    if rule == fed_opt.TFF:
      step *= np.sqrt(1 - beta_2**number) / (1 - beta_1**number)
    w = w + step
  np.testing.assert_allclose(_global(state), w, atol=1e-6)


@pytest.mark.parametrize('rule', [fed_opt.TFF, fed_opt.PAPER])
@pytest.mark.parametrize(
  ('options', 'message'),
  [({'tau': 0.0}, 'tau=0.0: give a positive'), ({'beta_2': 1.5}, 'beta_2')],
)
def test_numbers_of_no_adaptive_server_are_refused(
  rule, options, message, model
):
  with pytest.raises(ValueError, match=message):
    baselines.build_fed_adam(model, rule=rule, **options)


# ---- FedDyn ------------------------------------------------------------------


@pytest.mark.slow
def test_fed_dyn(model, clients):
  alpha = 0.2
  process = baselines.build_fed_dyn(
    model, penalty=alpha, participation=0.5, training=_TRAINING
  )
  state, remembered = planted.trained(process, clients, _ROUNDS)
  w, h = np.ones([2, 1]), np.zeros([2, 1])
  own = {name: np.zeros([2, 1]) for name in clients}
  for names in _ROUNDS:
    found = []
    for name in names:
      local = w
      for x, y in _batches(clients[name]):
        pull = alpha * (local - w) - own[name]
        local = local - _RATE * (_gradient(local, x, y) + pull)
      own[name] = own[name] - alpha * (local - w)
      found.append(local)
    h = h - alpha * sum(local - w for local in found) / len(clients)
    w = np.mean(found, 0) - h / alpha
  np.testing.assert_allclose(_global(state), w, atol=1e-5)
  _assert_kept(remembered, own, _NAME, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('build', ['build_fed_dyn', 'build_fed_adam'])
def test_a_round_in_which_no_client_counts_moves_nothing(build, model, clients):
  # One example leaves none for the second half.
  training = dataclasses.replace(_TRAINING, on=splits.halves().query)
  process = getattr(baselines, build)(model, training=training)
  clients = {
    'ann': clients['ann'],
    'eve': {name: values[:1] for name, values in clients['ann'].items()},
  }
  once, twice = (
    planted.trained(process, clients, rounds)[0]
    for rounds in ([['ann']], [['ann'], ['eve']])
  )
  assert np.abs(_global(once) - 1.0).min() > 0
  np.testing.assert_array_equal(_global(twice), _global(once))
  planted.assert_same(twice.finalizer, once.finalizer)


# ---- pFedMe ------------------------------------------------------------------


@pytest.mark.parametrize(
  ('rate', 'factor', 'overshoots'),
  [(0.05, 1.0, False), (0.1, 1.0, True), (0.05, 2.0, True)],
)
def test_p_fed_me_warns_of_steps_beyond_theta(
  rate, factor, overshoots, model, caplog
):
  algorithms.build_p_fed_me(
    model,
    penalty=15.0,
    client_learning_rate=rate,
    personal=Phase(optimizer=sgd(0.05), rate_factor=factor),
  )
  assert ('w moves beyond theta' in caplog.text) == overshoots


def test_p_fed_me_measures_theta_alone(model):
  personal = Phase(optimizer=sgd(0.05), steps_per_batch=5, measured=True)
  work = algorithms.build_p_fed_me(model, personal=personal).work
  assert [p.measured for p in phases.all_phases(work.work)] == [True, False]


# ---- Per-FedAvg --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
  ('hessian_free', 'loss', 'times'),
  [(False, None, 1), (True, None, 1), (True, _thrice, 3)],
)
def test_per_fed_avg(hessian_free, loss, times, model, clients):
  alpha = 0.2 / times
  training = dataclasses.replace(
    _TRAINING, batch_size=3, loss=loss, optimizer=sgd(_RATE / times)
  )
  process = baselines.build_per_fed_avg(
    model,
    adaptation_rate=alpha,
    hessian_free=hessian_free,
    delta=0.5,  # The loss is a parabola, on which any distance is exact.
    training=training,
  )
  state, _ = planted.trained(process, clients, _ROUNDS)
  w = np.ones([2, 1])
  for names in _ROUNDS:
    moves = []
    for name in names:
      local = w
      for x, y in _batches(clients[name], 3):
        # Of a single example both gradients.
        first, second = (x[::2], y[::2]), (x[1::2], y[1::2])
        second = second if len(y) > 1 else first
        slope = _gradient(local - 0.2 * _gradient(local, *first), *second)
        if hessian_free:
          hessian = 2 * first[0].T @ first[0] / len(first[1])
          slope = slope - 0.2 * hessian @ slope
        local = local - _RATE * slope
      moves.append(local - w)
    w = w + _mean(moves, names)
  np.testing.assert_allclose(_global(state), w, atol=1e-5)


@pytest.mark.slow
def test_of_clients_without_a_whole_batch_per_fed_avg_has_none(model, clients):
  training = Phase(optimizer=sgd(_RATE), batch_size=4, drop_remainder=True)
  process = baselines.build_per_fed_avg(model, training=training)
  found = [
    _global(planted.trained(process, clients, [names])[0])
    for names in (['ann', 'dan'], ['ann'])
  ]
  np.testing.assert_allclose(*found, rtol=1e-6)


# ---- APFL --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize('mixture_rate', [0.0, 0.3], ids=['fixed', 'adaptive'])
def test_apfl(mixture_rate, model, clients):
  process = algorithms.build_apfl(
    model, mixture=0.4, mixture_learning_rate=mixture_rate, training=_TRAINING
  )
  state, remembered = planted.trained(process, clients, _ROUNDS)
  w = np.ones([2, 1])
  own: dict[str, tuple[np.ndarray, float]] = {}
  for names in _ROUNDS:
    moves = []
    for name in names:
      local = w
      v, alpha = own.get(name, (w, 0.4))
      for x, y in _batches(clients[name]):
        slope = _gradient(alpha * v + (1 - alpha) * local, x, y)
        new_alpha = alpha - mixture_rate * float(np.sum((v - local) * slope))
        v = v - _RATE * alpha * slope
        local = local - _RATE * _gradient(local, x, y)
        alpha = min(max(new_alpha, 0.0), 1.0)
      own[name] = v, alpha
      moves.append(local - w)
    w = w + _mean(moves, names)
  np.testing.assert_allclose(_global(state), w, atol=1e-6)
  for name, kept in remembered.items():
    v, alpha = own[name]
    np.testing.assert_allclose(kept[tiers.PERSONAL][_NAME], v, atol=1e-6)
    if mixture_rate:
      assert alpha != 0.4
      assert kept[tiers.CLIENT_VALUES]['alpha'] == pytest.approx(
        alpha, abs=1e-6
      )
  # A client is measured with its mixture, and that is its own Keras model.
  measuring = algorithms.build_apfl_eval(
    model, mixture=0.4, mixture_learning_rate=mixture_rate
  )
  v, alpha = own['ann']
  mixed = alpha * v + (1 - alpha) * w
  trained = process, state, remembered
  _assert_measured(measuring, trained, 'ann', clients['ann'], mixed)
  (value,) = planted.cohort_of(measuring, {'ann': clients['ann']}, 0)
  keras_model = personal_models.model_of(
    measuring, process.get_model_weights(state), remembered['ann'], value
  )
  np.testing.assert_allclose(
    keras_model.get_layer('predict').kernel, mixed, atol=1e-6
  )


@pytest.mark.slow
def test_fed_ala(model, clients):
  adaptation = dataclasses.replace(_TRAINING, optimizer=sgd(0.5))
  process = algorithms.build_fed_ala(
    model, adaptation=adaptation, training=_TRAINING
  )
  state, remembered = planted.trained(process, clients, _ROUNDS)
  w = np.ones([2, 1])
  own: dict[str, tuple[np.ndarray, np.ndarray]] = {}
  for names in _ROUNDS:
    moves = []
    for name in names:
      v, share = own.get(name, (w, np.ones([2, 1])))
      for x, y in _batches(clients[name]):
        slope = _gradient(v + (w - v) * share, x, y) * (w - v)
        share = np.clip(share - 0.5 * slope, 0.0, 1.0)
      own[name] = _descended(v + (w - v) * share, clients[name]), share
      moves.append(own[name][0] - w)
    w = w + _mean(moves, names)
  np.testing.assert_allclose(_global(state), w, atol=1e-5)
  assert own['ann'][1].min() < 1.0
  for place, tier in enumerate((tiers.PERSONAL, tiers.CLIENT_VALUES)):
    expected = {name: each[place] for name, each in own.items()}
    _assert_kept(remembered, expected, tier, _NAME, atol=1e-5)
  # A client is measured with the mixture from which it would train.
  v, share = own['ann']
  _assert_measured(
    algorithms.build_fed_ala_eval(model),
    (process, state, remembered),
    'ann',
    clients['ann'],
    v + (w - v) * share,
  )


@pytest.mark.slow
def test_mr_mtl(model, clients):
  penalty = 0.3
  process = algorithms.build_mr_mtl(model, penalty=penalty, training=_TRAINING)
  state, remembered = planted.trained(process, clients, _ROUNDS)
  w, own = np.ones([2, 1]), {}
  for names in _ROUNDS:
    for name in names:
      v = own.get(name, w)
      for x, y in _batches(clients[name]):
        v = v - _RATE * (_gradient(v, x, y) + penalty * (v - w))
      own[name] = v
    w = _mean([own[name] for name in names], names)
  np.testing.assert_allclose(_global(state), w, atol=1e-6)
  _assert_kept(remembered, own, tiers.PERSONAL, _NAME)


@pytest.mark.slow
def test_pp_sgd(model, clients):
  rates = {tiers.GLOBAL: sgd(_RATE), tiers.PERSONAL: sgd(0.2)}
  process = algorithms.build_pp_sgd(
    model, training=dataclasses.replace(_TRAINING, optimizer=rates)
  )
  state, remembered = planted.trained(process, clients, _ROUNDS)
  w, own = np.ones([2, 1]), {}
  for names in _ROUNDS:
    moves = []
    for name in names:
      local, v = w, own.get(name, np.zeros([2, 1]))
      for x, y in _batches(clients[name]):
        slope = _gradient(local + v, x, y)
        local, v = local - _RATE * slope, v - 0.2 * slope
      own[name] = v
      moves.append(local - w)
    w = w + _mean(moves, names)
  np.testing.assert_allclose(_global(state), w, atol=1e-6)
  _assert_kept(remembered, own, _NAME)
  measuring = algorithms.build_pp_sgd_eval(model)
  trained = process, state, remembered
  _assert_measured(measuring, trained, 'bob', clients['bob'], w + own['bob'])


@pytest.mark.slow
@pytest.mark.parametrize(
  ('build', 'arguments'),
  [
    (algorithms.build_ditto, ('training', 'personal')),
    (algorithms.build_fed_ala, ('adaptation', 'training')),
    (algorithms.build_fed_alt, ('personal', 'shared')),
    (algorithms.build_fed_rep, ('head', 'representation')),
  ],
)
def test_no_default_phase_trains_on_what_the_other_holds_out(
  build, arguments, model
):
  on = splits.halves().support
  for given in ([], *([name] for name in arguments)):
    process = build(model, **{name: Phase(on=on) for name in given})
    found = [part.on for part in process.work.work if isinstance(part, Phase)]
    assert found == [on if given else splits.everything()] * 2


@pytest.mark.slow
@pytest.mark.parametrize('rate', [0.0, 0.1])
def test_a_mixture_may_be_a_whole_number(rate, model):
  process = algorithms.build_apfl(
    model, mixture=1, mixture_learning_rate=rate, training=_TRAINING
  )
  assert 'int' not in str(process.initialize_client.type_signature.result)


@pytest.mark.slow
def test_a_mixture_is_learned_beside_the_variables_that_are_named(
  model, clients
):
  process = algorithms.build_apfl(
    model,
    mixture_learning_rate=0.3,
    training=dataclasses.replace(_TRAINING, variable_filter='predict/.*'),
  )
  # In its first round a client's own model begins as what it received.
  _, found = planted.trained(process, clients, _ROUNDS)
  every = algorithms.build_apfl(
    model, mixture_learning_rate=0.3, training=_TRAINING
  )
  _, expected = planted.trained(every, clients, _ROUNDS)
  assert expected['ann'][tiers.CLIENT_VALUES]['alpha'] != 0.5
  planted.assert_same(found, expected)


# ---- FedProto, MOON and FedDBE -----------------------------------------------


def _two_layers() -> tf.keras.Model:
  """Features `w x`, of which the sum of both is the prediction."""
  inputs = tf.keras.Input([2])
  features = linear('identity', 2, name='features')()(inputs)
  total = tf.keras.layers.Lambda(
    lambda t: tf.reduce_sum(t, -1, keepdims=True), name='total'
  )(features)
  return tf.keras.Model(inputs, {'features': features, 'total': total})


@pytest.fixture(scope='module', name='with_features')
def fixture_with_features() -> models.PartialModel:
  return keras_models.from_keras(
    _two_layers,
    loss=lambda labels, outputs: tf.square(labels - outputs['total'])[:, 0],
    labels=tf.TensorSpec([1], tf.float32),
  )


def _proto(model: models.PartialModel, **options: Any) -> Any:
  return baselines.build_fed_proto(
    model,
    **{
      'num_classes': 3,
      'features': lambda outputs: outputs['features'],
      'classes': _classes,
      'penalty': 0.5,
      'training': _TRAINING,
      **options,
    },
  )


def test_prototypes_are_of_one_precision_whatever_that_of_features(
  with_features,
):
  options = {'features': lambda o: tf.cast(o['features'], tf.float64)}
  assert not _proto(with_features, **options).sent
  baselines.build_fed_proto_nearest_eval(
    with_features, num_classes=1, logits='total', **options
  )


def _classes(labels: tf.Tensor) -> tf.Tensor:
  """Labels below and above zero; nobody has the third class."""
  return tf.cast(labels[:, 0] > 0, tf.int32)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('weight', 'on'),
  [([1.0, 0.0], splits.everything()), ([1.0, 1.0], splits.halves().support)],
  ids=['of weight zero', 'held out'],
)
def test_what_clients_do_not_train_on_has_no_share_in_features(
  weight, on, with_features
):
  clients = {
    'ann': {
      'x': np.array([[1.0, 2.0], [50.0, 70.0]], np.float32),
      'y': np.zeros([2, 1], np.float32),
      'weight': np.array(weight, np.float32),
    }
  }
  training = Phase(optimizer=sgd(0.0), on=on)
  process = _proto(with_features, training=training)
  state, _ = planted.trained(process, clients, [['ann']])
  server = state.client_work['server']
  np.testing.assert_array_equal(server['prototypes'][0], [1.0, 2.0])
  process = baselines.build_fed_dbe(
    _shifted(), features=lambda outputs: outputs['features'], training=training
  )
  state, _ = planted.trained(process, clients, [['ann']])
  server = state.client_work['server']
  np.testing.assert_array_equal(server['sum'], [1.0, 2.0])
  assert server['count'] == 1.0


@pytest.mark.slow
def test_moon(with_features, clients):
  process = baselines.build_moon(
    with_features,
    features=lambda outputs: outputs['features'],
    penalty=0.5,
    temperature=0.4,
    training=_TRAINING,
  )
  state, remembered = planted.trained(process, clients, _ROUNDS)
  w, own = tf.eye(2, dtype=tf.float64), {}
  for names in _ROUNDS:
    moves = []
    for name in names:
      local, before = w, own.get(name, w)
      for x, y in _batches(clients[name]):
        with tf.GradientTape() as tape:
          tape.watch(local)
          z, received, old = x @ local, x @ w, x @ before
          total = tf.reduce_sum(z, -1, keepdims=True)
          alike, unlike = (
            tf.exp(tf.reduce_sum(z * o, -1) / tf.norm(z, axis=-1) / n / 0.4)
            for o, n in ((o, tf.norm(o, axis=-1)) for o in (received, old))
          )
          loss = tf.reduce_mean(tf.square(total - y)) - 0.5 * tf.reduce_mean(
            tf.math.log(alike / (alike + unlike))
          )
        local = local - _RATE * tape.gradient(loss, local)
      own[name] = local
      moves.append(local - w)
    w = w + _mean(moves, names)
  np.testing.assert_allclose(_global(state, 'features/kernel'), w, atol=1e-5)
  kept = remembered['bob'][tiers.PERSONAL]['features/kernel']
  np.testing.assert_allclose(kept, own['bob'], atol=1e-5)


def _shifted() -> models.PartialModel:
  """The same with a vector of the client's own."""

  def build() -> tf.keras.Model:
    plain = _two_layers()
    features = plain.get_layer('features').output
    shift = layers.PrivateVector(2, initializer='zeros', name='shift')
    total = plain.get_layer('total')(features + shift(features))
    return tf.keras.Model(plain.input, {'features': features, 'total': total})

  return keras_models.from_keras(
    build,
    loss=lambda labels, outputs: tf.square(labels - outputs['total'])[:, 0],
    labels=tf.TensorSpec([1], tf.float32),
    local='shift',
  )


@pytest.mark.slow
def test_fed_dbe(clients):
  penalty = 0.7
  process = baselines.build_fed_dbe(
    _shifted(),
    features=lambda outputs: outputs['features'],
    penalty=penalty,
    collecting_rounds=2,
    training=_TRAINING,
  )
  state, remembered = planted.trained(process, clients, _ROUNDS)
  w, total, count = np.eye(2), np.zeros(2), 0
  own = {name: np.zeros(2) for name in clients}
  for number, names in enumerate(_ROUNDS):
    moves = []
    for name in names:
      local, v = w, own[name]
      for x, y in _batches(clients[name]):
        z = x @ local
        slopes = 2 * (np.sum(z + v, 1, keepdims=True) - y) / len(y)
        slopes = slopes * np.ones([1, 2])
        v = v - _RATE * slopes.sum(0)
        if number >= 2:
          # Of penalty / 2 times the mean over two features.
          slopes += penalty / 2 * (z.mean(0) - total / count) / len(y)
        local = local - _RATE * x.T @ slopes
      own[name] = v
      moves.append(local - w)
      if number < 2:
        total = total + np.sum(clients[name]['x'] @ local, 0)
        count += _SIZES[name]
    w = w + _mean(moves, names)
  np.testing.assert_allclose(_global(state, 'features/kernel'), w, atol=1e-5)
  server = state.client_work['server']
  np.testing.assert_allclose(server['sum'], total, atol=1e-5)
  assert (server['count'], server['rounds_left']) == (count, 0)
  _assert_kept(remembered, own, 'shift/own', atol=1e-5)


def _with_logits() -> models.PartialModel:
  """The same features, and the logits of three classes."""

  def build() -> tf.keras.Model:
    inputs = tf.keras.Input([2])
    features = linear('identity', 2, name='features')()(inputs)
    head = tf.keras.layers.Dense(3, kernel_initializer='ones', name='head')
    return tf.keras.Model(
      inputs, {'features': features, 'logits': head(features)}
    )

  return keras_models.from_keras(
    build,
    loss=lambda labels, outputs: tf.nn.sparse_softmax_cross_entropy_with_logits(
      _classes(labels), outputs['logits']
    ),
    labels=tf.TensorSpec([1], tf.float32),
  )


def _cross_entropy(logits: np.ndarray, classes: np.ndarray) -> float:
  odds = np.exp(logits - logits.max(1, keepdims=True))
  chosen = odds[np.arange(len(classes)), classes] / odds.sum(1)
  return float(-np.log(chosen).mean())


@pytest.mark.slow
@pytest.mark.parametrize('runtime', planted.RUNTIMES)
def test_fed_proto_by_the_nearest_prototype(runtime, clients):
  model = _with_logits()
  process = _proto(model)
  state, remembered = planted.trained(process, clients, _ROUNDS)
  server = process.get_server_state(state)
  measuring = baselines.build_fed_proto_nearest_eval(
    model,
    num_classes=3,
    features=lambda outputs: outputs['features'],
    logits='logits',
  )
  cohort = planted.cohort_of(measuring, clients, 0)
  losses = []
  for name, fields in clients.items():
    own = remembered[name][tiers.PERSONAL]['features/kernel']
    ways = (fields['x'] @ own)[:, np.newaxis] - server['prototypes']
    distances = np.sum(ways**2, -1)
    # Nobody has the third class.
    distances[:, 2] = distances[:, :2].max(1) + 1.0
    losses.append(
      _cross_entropy(-distances, (fields['y'][:, 0] > 0).astype(int))
    )
  with planted.RUNTIMES[runtime]():
    found = measuring.evaluate(
      process.get_model_weights(state),
      [remembered[name] for name in clients],
      cohort,
      *measuring.beside(server),
    )
  measured = [client['loss'] for client in found.per_client]
  np.testing.assert_allclose(measured, losses, rtol=1e-5)


@pytest.mark.slow
def test_without_prototypes_heads_predict(clients):
  model = _with_logits()
  process = _proto(model)
  state = process.initialize()
  options = {
    'num_classes': 3,
    'features': lambda outputs: outputs['features'],
    'logits': 'logits',
  }
  measuring = baselines.build_fed_proto_nearest_eval(model, **options)
  by_head = baselines.build_fed_proto_eval(model)
  cohort = planted.cohort_of(measuring, clients, 0)
  kept = planted.first_states(measuring, cohort)
  weights = process.get_model_weights(state)
  beside = measuring.beside(process.get_server_state(state))
  planted.assert_same(
    measuring.evaluate(weights, kept, cohort, *beside).metrics,
    by_head.evaluate(weights, kept, cohort).metrics,
  )
  with pytest.raises(SettingError, match="server's state, <"):
    measuring.beside(None)
  with pytest.raises(SettingError, match="logits='features': the"):
    baselines.build_fed_proto_nearest_eval(
      model, **{**options, 'logits': 'features'}
    )


# ---- refusals ----------------------------------------------------------------

_FEATURES = {'features': lambda outputs: outputs['features']}
_PROTO = {'num_classes': 3, 'classes': _classes, **_FEATURES}


@pytest.mark.parametrize(
  ('algorithm', 'options', 'message'),
  [
    ('scaffold', {'option': 3}, 'option=3: the paper has the options 1 and 2'),
    ('scaffold', {'num_clients': 0}, 'num_clients: expected at least 1'),
    *(
      (
        'scaffold',
        {'training': Phase(optimizer=optimizer)},
        'training.optimizer: clients take plain steps of a positive rate',
      )
      for optimizer in (sgd(0.0), tff.learning.optimizers.build_adam(0.1))
    ),
    (
      'scaffold',
      {'training': Phase(rate_factor=0.5)},
      'rate_factor: option 2 divides by .*`training.optimizer`. Give that rate',
    ),
    ('fed_yogi', {'rule': 'adam'}, "rule='adam' is none of"),
    ('fed_dyn', {'participation': 0.0}, 'participation=0.0: the share'),
    ('fed_dyn', {'penalty': 0.0}, 'penalty=0.0: the server moves by'),
    ('per_fed_avg', {'delta': 0.0}, 'delta=0.0: the rate must be 0'),
    ('per_fed_avg', {'delta': float('nan')}, 'delta=nan: the rate must be 0'),
    ('fed_ala', {'adapted': 'head/.*'}, "unknown variable 'head/.*'"),
    *(
      ('apfl', {'mixture': mixture}, 'lies between 0 and 1')
      for mixture in (-0.1, 1.1, float('nan'))
    ),
    (
      'moon',
      {'temperature': 0.0, **_FEATURES},
      'temperature=0.0: the penalty must',
    ),
    (
      'moon',
      {'temperature': float('nan'), **_FEATURES},
      'temperature=nan: the penalty must',
    ),
    (
      'fed_dbe',
      {'penalty': -1.0, **_FEATURES},
      'the penalty must be a finite number of 0 or more',
    ),
    (
      'fed_dbe',
      {'collecting_rounds': 0, **_FEATURES},
      'collecting_rounds=0: .* there must be a round',
    ),
    (
      'fed_dbe',
      _FEATURES,
      'The model has no local variable, .* Add a `layers.PrivateVector`',
    ),
    (
      'fed_proto',
      {**_PROTO, 'penalty': -1.0},
      'the penalty must be a finite number of 0 or more',
    ),
    (
      'fed_proto',
      {**_PROTO, 'num_classes': 0},
      'num_classes=0: .* there must be a class',
    ),
    (
      'fed_proto',
      {**_PROTO, 'features': lambda outputs: outputs['features'][:, 0]},
      r'features: those of one example are \(\), not a vector',
    ),
  ],
)
def test_what_cannot_be_done_is_refused(
  algorithm, options, message, model, with_features
):
  builder = f'build_{algorithm}'
  package = algorithms if hasattr(algorithms, builder) else baselines
  if algorithm == 'scaffold':
    options = {'num_clients': 4, **options}
  with pytest.raises(SettingError, match=message):
    getattr(package, builder)(
      with_features if 'features' in options else model, **options
    )


@pytest.mark.parametrize(
  ('algorithm', 'argument', 'message'),
  [
    ('apfl', 'personal', 'none of the variables .*: .*predict/kernel'),
    ('fed_ala', 'adaptation', 'none of the values .*: .*predict/kernel'),
  ],
)
def test_names_of_nothing_that_is_mixed_are_refused(
  algorithm, argument, message, model
):
  options = {argument: Phase(variable_filter='head/.*')}
  if algorithm == 'apfl':
    options['mixture_learning_rate'] = 0.1
  with pytest.raises(PhaseError, match=message):
    getattr(algorithms, f'build_{algorithm}')(model, **options)


@pytest.mark.parametrize(
  ('algorithm', 'argument'),
  [('apfl', 'personal'), ('ditto', 'personal'), ('fed_ala', 'adaptation')],
)
def test_optimizers_of_other_tiers_are_refused(algorithm, argument, model):
  training = Phase(optimizer={tiers.GLOBAL: sgd(0.1)})
  with pytest.raises(PhaseError, match=r"optimizers for \['global'\] alone"):
    getattr(algorithms, f'build_{algorithm}')(model, **{argument: training})
