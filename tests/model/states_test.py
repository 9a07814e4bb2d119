"""Batch normalization: moving averages that are averaged, local or frozen."""

from collections.abc import Callable
import functools
from typing import Any

from absl import logging
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import baselines
from tests.support import planted
import tff_partial
from tff_partial import algorithms
from tff_partial import runtimes
from tff_partial import tiers
from tff_partial.client.client_work import CompositionError
from tff_partial.composition import Aggregation
from tff_partial.dp import clipping
from tff_partial.dp import privacy
from tff_partial.errors import SettingError
from tff_partial.model import keras_models
from tff_partial.model import models
from tff_partial.model.keras_variables import ModelError
from tff_partial.phases import Phase
from tff_partial.phases import sgd

keras = tf.keras
_DRAW = np.random.default_rng(0)


def _drawn(seed: int) -> Any:
  return keras.initializers.RandomNormal(seed=seed)


def build_dense(momentum: float = 0.5) -> tf.keras.Model:
  """Normalizes its inputs and something hidden, before a linear head."""
  x = keras.Input([3])
  normal = functools.partial(keras.layers.BatchNormalization, momentum=momentum)
  hidden = keras.layers.Dense(4, kernel_initializer=_drawn(1), name='hidden')(
    normal(name='first')(x)
  )
  head = keras.layers.Dense(1, kernel_initializer=_drawn(2), name='head')
  return keras.Model(x, head(normal(name='second')(hidden)))


def build_cnn() -> tf.keras.Model:
  """Of the kind that Keras normalizes by one fused operation."""
  x = keras.Input([5, 5, 1])
  conv = keras.layers.Conv2D(3, 3, kernel_initializer=_drawn(1), name='conv')
  norm = keras.layers.BatchNormalization(momentum=0.5, name='norm')
  hidden = keras.layers.Flatten()(norm(conv(x)))
  head = keras.layers.Dense(1, kernel_initializer=_drawn(2), name='head')
  return keras.Model(x, head(hidden))


def _fields(count: int, shape: tuple[int, ...] = (3,)) -> planted.Fields:
  return {
    'x': (_DRAW.normal(size=[count, *shape]) * 2 + 1).astype(np.float32),
    'y': _DRAW.normal(size=[count, 1]).astype(np.float32),
  }


def _model(
  build: Callable[[], Any] = build_dense, **options: Any
) -> models.PartialModel:
  return keras_models.from_keras(
    build, loss='mse', **{'state': 'averaged', **options}
  )


def _round(
  process: Any, clients: dict[str, planted.Fields], capacities: Any = None
) -> tuple[dict[str, np.ndarray], Any]:
  """The server's weights after a round, and what it returns."""
  with runtimes.native():
    cohort = planted.cohort_of(process, clients, 1, capacities=capacities)
    output = planted.run(process, cohort)
  return planted.global_weights(process, output.state), output


# ---- what it computes --------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
  ('build', 'shape'), [(build_dense, (3,)), (build_cnn, (5, 5, 1))]
)
def test_a_client_trains_as_fit_does(build, shape):
  """Ten examples in batches of four, of which the last has two."""
  model, fields = _model(build), _fields(10, shape)
  process = algorithms.build_fed_avg(
    model, training=Phase(optimizer=sgd(0.1), batch_size=4, epochs=2)
  )
  found, _ = _round(process, {'a': fields}, [16])
  made = model.to_keras(process.get_model_weights(process.initialize()))
  made.compile(keras.optimizers.SGD(0.1), 'mse')
  made.fit(fields['x'], fields['y'], 4, epochs=2, shuffle=False, verbose=0)
  for variable in made.variables:
    name = variable.name.split(':')[0]
    np.testing.assert_allclose(
      found[name], variable.numpy(), rtol=2e-5, atol=1e-6, err_msg=name
    )


@pytest.mark.parametrize(
  'server', ['fed_avg', pytest.param('fed_adam', marks=pytest.mark.slow)]
)
def test_averages_are_those_of_all_examples(server):
  """With momentum 0, of one batch each: the moments of 3 + 9 examples."""
  model = _model(functools.partial(build_dense, 0.0))
  training = Phase(optimizer=sgd(0.1), batch_size=None)
  process = (
    algorithms.build_fed_avg(model, training=training)
    if server == 'fed_avg'
    else baselines.build_fed_adam(
      model, training=training, server_learning_rate=0.1
    )
  )
  clients = {'a': _fields(3), 'b': _fields(9)}
  clients['b']['x'] += 5
  found, _ = _round(process, clients)
  x = np.concatenate([fields['x'] for fields in clients.values()])
  np.testing.assert_allclose(found['first/moving_mean'], x.mean(0), rtol=1e-5)
  np.testing.assert_allclose(
    found['first/moving_variance'], x.var(0), rtol=1e-5
  )


@pytest.mark.slow
def test_no_variance_is_negative_where_the_mean_is_large():
  """Of 1e10 float32 has no digits left for a variance of 4."""
  process = algorithms.build_fed_avg(_model())
  clients = {name: _fields(8) for name in 'abc'}
  for fields in clients.values():
    fields['x'] += 1e5
  found, _ = _round(process, clients)
  assert (found['first/moving_mean'] > 4e4).all()
  assert (found['first/moving_variance'] >= 0).all()


@pytest.mark.slow
def test_evaluation_and_users_have_them():
  model = _model()
  process = algorithms.build_fed_avg(model)
  clients = {name: _fields(8) for name in 'abc'}
  data = tff_partial.pack(clients, process.example_spec)
  result = tff_partial.train(process, data, rounds=3, clients_per_round=3)
  measured = tff_partial.evaluate(
    tff_partial.EvaluationSet(algorithms.build_fed_avg_eval(model), data),
    result.weights,
  )
  made = model.to_keras(result.weights)
  made.compile(loss='mse')
  x, y = (np.concatenate([c[n] for c in clients.values()]) for n in 'xy')
  assert measured['loss'] == pytest.approx(
    made.evaluate(x, y, verbose=0), rel=1e-5
  )
  mean = made.get_layer('first').moving_mean.numpy()
  assert (np.abs(mean) > 0.1).all()


@pytest.mark.parametrize(
  'local', [None, pytest.param(['first', 'second'], marks=pytest.mark.slow)]
)
def test_what_is_local_stays_with_the_client(local):
  """SiloBN, whose averages alone are local, and FedBN, whose layers are."""
  model = _model(state='local' if local is None else None, local=local)
  process = algorithms.build_fed_per(
    model, training=Phase(optimizer=sgd(0.0), batch_size=None)
  )
  clients = {'a': _fields(6), 'b': _fields(4)}
  found, output = _round(process, clients)
  assert not [name for name in found if 'moving' in name]
  assert ('first/gamma' in found) == (local is None)
  for kept, fields in zip(output.client_states, clients.values(), strict=True):
    np.testing.assert_allclose(
      kept['first/moving_mean'], 0.5 * fields['x'].mean(0), rtol=1e-5
    )


@pytest.mark.slow
def test_averages_stay_where_no_client_counts():
  """Also with a mean that is 0 / 0 then, which optimizers reject."""
  process = algorithms.build_fed_avg(
    _model(), aggregation=Aggregation(tff.aggregators.MeanFactory())
  )
  with runtimes.native():
    state = process.initialize()
    after = process.next(state, [], []).state
  planted.assert_same_weights(process, after, state)


@pytest.mark.slow
def test_what_is_predicted_for_padding_has_a_loss():
  """The last batch has one example, and no logarithm of 0."""

  def build() -> tf.keras.Model:
    x = keras.Input([3])
    normal = keras.layers.BatchNormalization(name='first')(x)
    return keras.Model(x, keras.layers.Dense(1, 'sigmoid')(normal))

  model = keras_models.from_keras(
    build,
    loss=lambda labels, found: -tf.math.log(found)[:, 0],
    state='averaged',
  )
  process = algorithms.build_fed_avg(model, training=Phase(batch_size=2))
  _, output = _round(process, {'a': _fields(3)})
  assert planted.train_metrics(output)['num_not_finite'] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
  ('build', 'measure'),
  [
    (algorithms.build_pp_sgd, algorithms.build_pp_sgd_eval),
    (algorithms.build_fed_ala, algorithms.build_fed_ala_eval),
  ],
)
def test_a_mixed_model_reads_averages_once(build, measure):
  """Also where a client holds other numbers by the names of the averages."""
  model = _model(state='averaged')
  clients = {'a': _fields(4)}
  process = build(model, training=Phase(optimizer=sgd(0.0), batch_size=None))
  measuring = measure(model)
  with runtimes.cohort(jit=False):
    state, remembered = planted.trained(process, clients, [['a'], ['a']])
    (client,) = planted.cohort_of(measuring, clients, 1)
    weights = process.get_model_weights(state)
    read = measuring.personalise(weights, remembered['a'], client)
  mean, variance = (getattr(clients['a']['x'], of)(0) for of in ('mean', 'var'))
  np.testing.assert_allclose(read['first/moving_mean'], 0.75 * mean, rtol=1e-5)
  np.testing.assert_allclose(
    read['first/moving_variance'], 0.25 + 0.75 * variance, rtol=1e-5
  )


@pytest.mark.slow
def test_steps_of_a_personal_part_leave_the_shared_averages():
  """What a new client of PPSGD adds to the shared weights has no averages."""
  measuring = algorithms.build_pp_sgd_eval(
    _model(), personalise=Phase(optimizer=sgd(0.0), batch_size=None, epochs=3)
  )
  weights = planted.as_model_weights(
    measuring.model.initial_weights(tiers.GLOBAL, [0, 0])
  )
  with runtimes.native():
    cohort = planted.cohort_of(measuring, {'a': _fields(8)}, 1)
    (first,) = planted.first_states(measuring, cohort)
    read = measuring.personalise(weights, first, cohort[0])
  assert not read['first/moving_mean'].any()


@pytest.mark.slow
def test_attention_is_the_same_for_a_mean_and_its_variance():
  model = _model(functools.partial(build_dense, 0.0))
  training = Phase(optimizer=sgd(0.0), batch_size=None)
  process = baselines.build_fed_att(
    model, server_learning_rate=1.0, training=training
  )
  clients = {'a': _fields(9), 'b': _fields(9)}
  clients['b']['x'] += 5
  found, _ = _round(process, clients)
  x = np.concatenate([fields['x'] for fields in clients.values()])
  np.testing.assert_allclose(
    found['first/moving_variance'], x.var(0), rtol=1e-5
  )


@pytest.mark.slow
def test_prototypes_are_of_features_as_training_has_them():
  """Normalized by the client's own moments, features have the mean zero."""

  def build() -> tf.keras.Model:
    x = keras.Input([3])
    features = keras.layers.BatchNormalization(name='first')(x)
    total = keras.layers.Dense(1, name='head')(features)
    return keras.Model(x, {'features': features, 'total': total})

  model = keras_models.from_keras(
    build,
    loss=lambda labels, outputs: tf.square(labels - outputs['total'])[:, 0],
    labels=tf.TensorSpec([1]),
    state='averaged',
  )
  process = baselines.build_fed_proto(
    model,
    num_classes=1,
    classes=lambda labels: 0.0 * labels[:, 0],
    features=lambda outputs: outputs['features'],
    training=Phase(optimizer=sgd(0.0), batch_size=None),
  )
  _, output = _round(process, {'a': _fields(9)}, [16])
  (found,) = output.state.client_work['server']['prototypes']
  np.testing.assert_allclose(found, np.zeros(3), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('momentum', 'state'), [(0.0, 'local'), (0.99, 'local'), (0.9, 'averaged')]
)
def test_a_new_client_may_estimate_averages(momentum, state):
  """From its support set, whatever the momentum."""
  model = _model(functools.partial(build_dense, momentum), state=state)
  clients = {'a': _fields(8)}
  measuring = algorithms.build_fed_bn_eval(model, estimate=True)
  cohort = planted.cohort_of(measuring, clients, 1, capacities=[16])
  weights = planted.as_model_weights(
    model.initial_weights(tiers.GLOBAL, [0, 0])
  )
  with runtimes.native():
    (first,) = planted.first_states(measuring, cohort)
    own = measuring.personalise(weights, first, cohort[0])
  support = clients['a']['x'][:4]
  for name, moment in {
    'mean': support.mean(0),
    'variance': support.var(0),
  }.items():
    np.testing.assert_allclose(own[f'first/moving_{name}'], moment, rtol=1e-4)


@pytest.mark.slow
def test_without_normalization_fed_bn_is_fed_avg():
  """Bit for bit, with what is drawn."""
  model = planted.factorization(planted.build_tastes, local=None)
  training = Phase(optimizer=sgd(0.1), epochs=2, shuffle=True)
  clients = planted.rate({'a': 9, 'b': 23})
  of_fed_bn, of_fed_avg = (
    _round(build(model, training=training), clients)[0]
    for build in (algorithms.build_fed_bn, algorithms.build_fed_avg)
  )
  planted.assert_same(of_fed_bn, of_fed_avg)


def test_frozen_averages_are_not_estimated():
  with pytest.raises(SettingError, match='no moving averages to estimate'):
    algorithms.build_fed_bn_eval(_model(state='frozen'), estimate=True)


@pytest.mark.slow
def test_what_is_frozen_keeps_every_bit():
  """The layer normalizes by the averages that it has, also in training."""
  trained = build_dense()
  trained.get_layer('first').moving_variance.assign([4.0, 5, 6])
  model = _model(
    state={'frozen': 'first', 'averaged': 'second'}, initial_weights=trained
  )
  process = baselines.build_fed_adam(model, server_learning_rate=0.1)
  found, output = _round(process, {'a': _fields(8)})
  assert 'first/moving_variance' not in found
  held = process.get_model_weights(output.state).non_trainable
  np.testing.assert_array_equal(held['first/moving_variance'], [4, 5, 6])
  inputs = tf.constant(_fields(8)['x'])
  weights = {tiers.GLOBAL: model.initial_weights(tiers.GLOBAL, [0, 0])}
  same = [
    model.call(weights, model.frozen_weights(), inputs, training=t, seed=[0, 0])
    for t in (True, False)
  ]
  assert set(same[0][2]) == {'second/moving_mean', 'second/moving_variance'}
  assert not same[1][2]
  assert 'first/moving_mean: float32 [3] (frozen state)' in repr(model)


@pytest.mark.slow
def test_xla_is_not_tried_where_it_would_refuse(monkeypatch):
  said: list[str] = []
  monkeypatch.setattr(logging, 'warning', lambda text, *_: said.append(text))
  process = algorithms.build_fed_avg(_model())
  with runtimes.cohort(jit='auto') as context:
    cohort = planted.cohort_of(process, {'a': _fields(5)}, 1)
    planted.run(process, cohort)
  assert context.choices and not any(context.choices.values())
  assert not [text for text in said if 'XLA refuses' in text]


# ---- what is refused ---------------------------------------------------------


@pytest.mark.parametrize(
  ('state', 'message'),
  [
    (None, r"changes its variable 'first/moving_mean' .*state='averaged'"),
    ('kept', "state='kept': the treatments are averaged, local, frozen"),
    ({'local': 'hidden'}, 'matches no variable that a layer changes'),
    ({'local': 'first'}, "changes its variable 'second/moving_mean'"),
    (
      {'local': 'first', 'averaged': ['first', 'second']},
      "'first/moving_.*' is local and averaged",
    ),
  ],
)
def test_a_state_is_said_once_for_each(state, message):
  with pytest.raises(ModelError, match=message):
    _model(state=state)


class _Scales(keras.layers.Layer):
  """Divides by the root of a mean square, which has no moving mean."""

  def __init__(self, dtype_of_state: str):
    super().__init__(name='scales')
    self._dtype_of_state = dtype_of_state

  def build(self, shape: Any) -> None:
    self.square = self.add_weight(
      'moving_variance',
      shape[-1:],
      self._dtype_of_state,
      'ones',
      trainable=False,
    )

  def call(self, x: Any, training: bool = False) -> Any:
    if training:
      mean = tf.reduce_mean(tf.square(x), 0)
      self.square.assign(tf.cast(mean, self.square.dtype))
    return x / tf.sqrt(tf.cast(self.square, x.dtype))


def _scaled(dtype_of_state: str) -> Any:
  head = keras.layers.Dense(1, kernel_initializer=_drawn(2), name='head')
  return keras.Sequential([keras.Input([3]), _Scales(dtype_of_state), head])


@pytest.mark.slow
def test_a_variance_without_a_mean_is_averaged():
  process = algorithms.build_fed_avg(_model(lambda: _scaled('float32')))
  clients = {'a': _fields(4), 'b': _fields(4)}
  found, _ = _round(process, clients)
  squares = [np.square(fields['x']).mean(0) for fields in clients.values()]
  np.testing.assert_allclose(
    found['scales/moving_variance'], np.mean(squares, 0), rtol=1e-5
  )


@pytest.mark.parametrize('state', ['averaged', 'local'])
def test_a_state_of_integers_is_refused(state):
  with pytest.raises(ModelError, match="moving_variance', .* is of int64"):
    _model(lambda: _scaled('int64'), state=state)
  _model(lambda: _scaled('int64'), state='frozen')


def test_a_model_without_states_has_no_treatment():
  with pytest.raises(ModelError, match='no layer changes a variable'):
    _model(planted.build_slope, state='averaged', local='own')


def test_noise_and_averages_are_refused():
  noised = privacy.private_mean(
    clipping.FixedClip(1.0), noise_multiplier=1.0, clients_per_round=2
  )
  with pytest.raises(CompositionError, match='a variance could become'):
    algorithms.build_fed_avg(
      _model(), aggregation=Aggregation(aggregator=noised)
    )
