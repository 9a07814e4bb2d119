"""Server tiers that are trained alone, and how far a group's copy moves.

The model is `w x` for one input, or `head (body x)`; steps are by hand, and in
NumPy for clients that join the group whose model fits them best.
"""

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import baselines
from tests.support import planted
from tests.support.stacks import dense
from tests.support.stacks import linear
from tests.support.stacks import stack
import tff_partial
from tff_partial import algorithms
from tff_partial import groups
from tff_partial import phases
from tff_partial import runtimes
from tff_partial.client import client_work
from tff_partial.composition import Aggregation
from tff_partial.contexts import ClientContext
from tff_partial.dp import local_noise
from tff_partial.errors import SettingError
from tff_partial.model import keras_variables
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.tiers import CLIENT_VALUES
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import GROUP
from tff_partial.tiers import PERSONAL
from tff_partial.training import personal_models
from tff_partial.training.errors import ProgramError

# A client knows its group: the sign of its inputs.
_BY_SIGN = groups.by_attribute(
  lambda held: tf.cast(held['x'][:, 0] > 0, tf.int32)
)
_OF_MEMBERS = [_BY_SIGN, Phase((GROUP,), optimizer=sgd(0.1), measured=True)]


def _build(*layers: str, value: float = 1.0) -> tf.keras.Model:
  first = tf.keras.initializers.Constant(value)
  return stack(1, *(linear(first, name=name) for name in layers))()


def _model(*layers: str, group: Any, **options: Any) -> models.PartialModel:
  return tff_partial.from_keras(
    lambda: _build(*layers), loss='mse', group=group, num_groups=2, **options
  )


def _of_two(*values: float) -> models.PartialModel:
  """`w x`, where the copies of w begin with two values."""
  initial = [_build('w', value=value) for value in values]
  return _model('w', group='w', initial_weights=initial)


def _client(*xs: float, slope: float) -> planted.Fields:
  x = np.array(xs, np.float32)[:, None]
  return {'x': x, 'y': slope * x}


# One example each, twice as much for cid: 'ann' is of group 0, others of 1.
_CLIENTS = {
  'ann': _client(-1.0, slope=2.0),
  'bob': _client(1.0, slope=3.0),
  'cid': _client(2.0, 2.0, slope=2.0),
}


def _weights(process: Any, clients: Any, rounds: int = 1) -> Any:
  state, _ = planted.trained(process, clients, [list(clients)] * rounds)
  found = process.get_model_weights(state).trainable
  return {
    tier: {n: np.ravel(t).tolist() for n, t in named.items()}
    for tier, named in found.items()
  }


def test_copies_begin_apart_also_by_an_initializer_with_a_seed():
  """Or clients could not tell them apart, and all would take the first."""
  draw = tf.keras.initializers.GlorotUniform(seed=3)
  build = stack(1, dense(1, kernel_initializer=draw, name='head'))
  model = tff_partial.from_keras(build, loss='mse', group='head', num_groups=2)
  seed = tf.constant([0, 0])
  first, other = model.initial_weights_at_server(GROUP, seed)['head/kernel']
  assert first == model.initial_weights(GROUP, seed)['head/kernel'] != other


def _padded(model: models.PartialModel, capacity: int, weights: Any):
  """A client with y = 2 x of two examples, and its padding."""
  rest = [[0.0]] * (capacity - 2)
  fields = {'x': [[1.0], [2.0], *rest], 'y': [[2.0], [4.0], *rest]}
  fields['weight'] = [1.0, 1.0, *np.ravel(rest)]
  examples = {n: tf.constant(array) for n, array in fields.items()}
  count, seed = tf.constant(2), tf.constant([0, 0])
  return ClientContext(model, weights, weights, {}, examples, count, seed)


@pytest.mark.parametrize('capacity', [2, 4])
def test_labels_of_padding_make_no_loss_infinite(capacity):
  relative = lambda y, p: tf.reduce_mean(abs(y - p) / y, -1)  # noqa: E731
  model = tff_partial.from_keras(
    lambda: _build('head'), loss=relative, group='head', num_groups=2
  )
  held = {'head/kernel': tf.constant([[[3.0]], [[2.0]]])}
  client = _padded(model, capacity, {GROUP: held})
  assert groups.least_loss().choose(client) == 1
  model = tff_partial.from_keras(lambda: _build('head'), loss=relative)
  held = {'head/kernel': tf.constant([[3.0]])}
  client = _padded(model, capacity, {GLOBAL: held})
  assert client.gradients()['head/kernel'] == 0.5


@pytest.mark.parametrize('capacity', [2, 8])
def test_gradients_of_normalized_batches_see_no_padding(capacity):
  normal = tf.keras.layers.BatchNormalization
  build = stack(1, functools.partial(normal, epsilon=0.25, name='n'))
  model = tff_partial.from_keras(build, loss='mse', state='averaged')
  held = model.initial_weights(GLOBAL, tf.constant([0, 0]))
  found = _padded(model, capacity, {GLOBAL: held}).gradients()
  # Inputs become -+s with s = 0.5 / sqrt(0.25 + 0.25), labels are 2 and 4.
  s = 0.5**0.5
  np.testing.assert_allclose(found['n/beta'], [-6.0], rtol=1e-6)
  np.testing.assert_allclose(found['n/gamma'], [2 * s * s - 2 * s], rtol=1e-5)


@pytest.mark.parametrize(
  ('train', 'expected'),
  [
    # Slopes of (head body x - y)^2 are -2, -4 and -8: of group 0 a quarter of
    # -2, of group 1 a quarter of -4 and a half of -8, times the rate .1.
    pytest.param(
      *((GROUP,), {GLOBAL: [1.0], GROUP: [1.05, 1.5]}), marks=pytest.mark.slow
    ),
    pytest.param(
      *((GLOBAL,), {GLOBAL: [1.55], GROUP: [1.0, 1.0]}), marks=pytest.mark.slow
    ),
    ((GLOBAL, GROUP), {GLOBAL: [1.55], GROUP: [1.05, 1.5]}),
  ],
  ids=['heads under a frozen body', 'a body under frozen heads', 'both'],
)
def test_one_server_tier_is_trained_and_the_other_stays(train, expected):
  process = tff_partial.compose(
    _model('body', 'head', group='head'),
    work=[_BY_SIGN, Phase(train=train, optimizer=sgd(0.1), measured=True)],
  )
  with runtimes.native():
    found = _weights(process, _CLIENTS)
  for tier, values in expected.items():
    (value,) = found[tier].values()
    np.testing.assert_allclose(value, values, rtol=1e-6)


@pytest.mark.slow
def test_rows_of_a_table_are_sent_without_the_groups_heads():
  def build():
    item = tf.keras.Input([], dtype=tf.int32)
    vectors = tf.keras.layers.Embedding(
      3, 1, embeddings_initializer='ones', name='items'
    )(item)
    return tf.keras.Model(item, linear('ones', name='head')()(vectors))

  process = tff_partial.compose(
    tff_partial.from_keras(build, loss='mse', group='head', num_groups=2),
    work=[
      groups.by_attribute(lambda held: held['x'] % 2),
      Phase(optimizer=sgd(0.1), measured=True),
    ],
  )
  assert process.rows_of == ('items/embeddings',)
  client = {'x': np.array([2], np.int32), 'y': np.array([[3.0]], np.float32)}
  with runtimes.native():
    found = _weights(process, {'ann': client})
  np.testing.assert_allclose(
    found[GLOBAL]['items/embeddings'], [1.0, 1.0, 1.4], rtol=1e-6
  )
  assert found[GROUP]['head/kernel'] == [1.0, 1.0]


@pytest.mark.slow
def test_a_copy_without_members_rests_also_with_momentum():
  process = baselines.build_ifca(
    _of_two(-1.0, 1.0),
    training=Phase(optimizer=sgd(0.1)),
    server_optimizer=tff.learning.optimizers.build_sgdm(1.0, 0.9),
  )
  clients = {'ann': _client(1.0, slope=-2.0), 'bob': _client(1.0, slope=2.0)}
  with runtimes.native():
    once, twice = (
      planted.trained(process, clients, rounds)[0]
      for rounds in ([['ann', 'bob']], [['ann', 'bob'], ['bob']])
    )
  (once, twice) = (
    process.get_model_weights(state).trainable[GROUP]['w/kernel'].ravel()
    for state in (once, twice)
  )
  assert twice[0] == once[0] == pytest.approx(-1.2)
  # By a second step, and most of the first again.
  assert twice[1] == pytest.approx(1.2 + 0.16 + 0.9 * 0.2)


@pytest.mark.slow
def test_clients_that_clip_without_noise_keep_their_weights():
  clips, plain = (
    tff_partial.compose(
      _model('head', group='head'),
      work=_OF_MEMBERS,
      aggregation=Aggregation(
        mean_of_members=True, postprocess_update=postprocess
      ),
    )
    for postprocess in (local_noise.LocalNoise(10.0, 0.0), None)
  )
  with runtimes.native():
    planted.assert_close(_weights(clips, _CLIENTS), _weights(plain, _CLIENTS))


# ---- every variable in groups ------------------------------------------------


@pytest.mark.parametrize(
  'mean_of_members',
  [False, *(pytest.param(of, marks=pytest.mark.slow) for of in (True, None))],
)
def test_ifca_beside_numpy(mean_of_members):
  model = _of_two(-1.0, 1.0)
  assert model.tiers == (GROUP,)
  process = baselines.build_ifca(
    model,
    training=Phase(optimizer=sgd(0.1), batch_size=None),
    aggregation=Aggregation(mean_of_members=mean_of_members),
  )
  clients = {
    'ann': _client(1.0, 0.5, slope=-3.0),
    'bob': _client(1.0, slope=2.0),
    'cid': _client(0.5, 1.0, 1.0, slope=-2.0),
  }
  copies = [-1.0, 1.0]
  for _ in range(3):
    moves = [[], []]
    for fields in clients.values():
      x, y = fields['x'], fields['y']
      group = np.argmin([np.sum((w * x - y) ** 2) for w in copies])
      slope = 2 * np.mean(x * (copies[group] * x - y))
      moves[group].append((len(y), -0.1 * slope))
    for group, found in enumerate(moves):
      total = 6 if mean_of_members is False else sum(n for n, _ in found)
      copies[group] += sum(n * move for n, move in found) / total
  with runtimes.cohort(jit=False):
    found = _weights(process, clients, rounds=3)
  np.testing.assert_allclose(found[GROUP]['w/kernel'], copies, rtol=1e-5)


@pytest.mark.slow
def test_clients_join_by_their_support_set_only():
  model = _of_two(-1.0, 1.0)
  measuring = baselines.build_ifca_eval(model)
  # The second half, which is measured, has the slope 1, and much larger values.
  client = {
    'x': np.array([[1.0], [9.0]], np.float32),
    'y': np.array([[-1.0], [9.0]], np.float32),
  }
  weights = tff_partial.compose(
    model, work=[_BY_SIGN, Phase((GROUP,), measured=True)]
  )
  with runtimes.native():
    first = weights.get_model_weights(weights.initialize())
  found = planted.evaluate(measuring, first, {'ann': client})
  assert found.metrics['loss'] == pytest.approx(18.0**2)


def _likely(shares: Any, copies: Any, fields: planted.Fields) -> Any:
  """By which copy each example was made."""
  odds = shares * np.exp(-((copies * fields['x'] - fields['y']) ** 2))
  return odds / odds.sum(1, keepdims=True)


@pytest.mark.slow
def test_fed_em_beside_numpy():
  model = _of_two(-1.0, 1.0)
  training = Phase(optimizer=sgd(0.1), batch_size=2, epochs=2)
  process = baselines.build_fed_em(model, are_logits=False, training=training)
  clients = {
    'ann': _client(1.0, 0.5, 0.2, slope=-1.0),
    'bob': _client(1.0, 0.1, slope=2.0),
    'cid': {
      'x': np.array([[0.5], [1.5], [-1.0], [0.7]], np.float32),
      'y': np.array([[-0.5], [0.3], [-1.4], [0.1]], np.float32),
    },
  }
  rounds = (['ann', 'cid'], ['bob', 'cid'])
  copies = np.array([-1.0, 1.0])
  shares = {name: np.full(2, 0.5) for name in clients}
  for names in rounds:
    moves, sizes = [], []
    for name in names:
      x, y = clients[name]['x'], clients[name]['y']
      likely = _likely(shares[name], copies, clients[name])
      shares[name], own = likely.mean(0), copies
      for begin in 2 * list(range(0, len(y), 2)):
        at = slice(begin, begin + 2)
        slopes = 2 * x[at] * (x[at] * own - y[at])
        own = own - 0.1 * np.mean(likely[at] * slopes, 0)
      moves.append(own - copies)
      sizes.append(len(y))
    copies = copies + np.average(moves, axis=0, weights=sizes)
  with runtimes.cohort(jit=False):
    state, remembered = planted.trained(process, clients, rounds)
  weights = process.get_model_weights(state)
  np.testing.assert_allclose(
    weights.trainable[GROUP]['w/kernel'][:, 0, 0], copies, atol=1e-5
  )
  for name, kept in remembered.items():
    found = kept[CLIENT_VALUES]['shares']
    np.testing.assert_allclose(found, shares[name], atol=1e-5)
  # New clients compute their shares on the first half, others start from them.
  measuring = baselines.build_fed_em_eval(model, are_logits=False, steps=2)
  cohort = planted.cohort_of(measuring, {'cid': clients['cid']}, 0)
  first, second = (
    {name: array[part] for name, array in clients['cid'].items()}
    for part in (slice(2), slice(2, 4))
  )
  for held in (remembered['cid'], *planted.first_states(measuring, cohort)):
    mixture = held[CLIENT_VALUES]['shares']
    for _ in range(2):
      mixture = _likely(mixture, copies, first).mean(0)
    errors = np.sum(mixture * copies) * second['x'] - second['y']
    with runtimes.cohort(jit=False):
      output = measuring.evaluate(weights, [held], cohort)
    assert output.metrics['loss'] == pytest.approx(np.mean(errors**2), rel=1e-5)
  with pytest.raises(ProgramError, match='which are not one Keras model'):
    personal_models.model_of(measuring, weights, held, cohort[0])


@pytest.mark.slow
def test_ifcas_clients_choose_by_what_they_train_on():
  model = _of_two(-1.0, 1.0)
  held_out = tff_partial.splits.halves()
  process = baselines.build_ifca(model, training=Phase(on=held_out.support))
  # The second, which is held out, is far better explained by the other copy.
  fields = _client(1.0, 5.0, slope=1.0)
  fields['y'][0] = -1.0
  with runtimes.cohort(jit=False):
    _, remembered = planted.trained(process, {'ann': fields}, [['ann']])
  assert remembered['ann']['group'] == 0


@pytest.mark.slow
def test_examples_without_weight_have_no_share_of_a_mixture():
  copies = np.array([-1.0, 1.0])
  model = _of_two(*copies)
  process = baselines.build_fed_em(model, are_logits=False)
  fields = _client(1.0, 0.5, slope=0.7)
  expected = _likely(np.full(2, 0.5), copies, fields)[0]
  fields['weight'] = np.array([1.0, 0.0], np.float32)
  with runtimes.cohort(jit=False):
    _, remembered = planted.trained(process, {'ann': fields}, [['ann']])
  found = remembered['ann'][CLIENT_VALUES]['shares']
  np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
def test_fed_em_finds_what_clients_are_mixtures_of():
  model = _of_two(-0.5, 0.6)
  process = baselines.build_fed_em(
    model, are_logits=False, training=Phase(optimizer=sgd(0.1), epochs=2)
  )
  planted_shares = {'ann': 0.1, 'bob': 0.4, 'cid': 0.8, 'dan': 1.0}
  draw = np.random.default_rng(0)
  clients = {}
  for name, share in planted_shares.items():
    x = draw.normal(scale=2.0, size=[80, 1]).astype(np.float32)
    is_second = (np.arange(80) < 80 * share)[:, np.newaxis]
    y = x * np.where(is_second, 3.0, -2.0).astype(np.float32)
    clients[name] = {'x': x, 'y': y}
  with runtimes.cohort(jit=False):
    state, remembered = planted.trained(process, clients, [[*clients]] * 20)
  weights = process.get_model_weights(state).trainable[GROUP]
  np.testing.assert_allclose(weights['w/kernel'][:, 0, 0], [-2, 3], atol=0.05)
  for name, share in planted_shares.items():
    _, found = remembered[name][CLIENT_VALUES]['shares']
    assert found == pytest.approx(share, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize('are_two', [False, True])
def test_fed_em_mixes_probabilities_of_classes(are_two):
  """Of the logits 0 and w x, or of the second alone."""

  def build(value: float = 0.0) -> tf.keras.Model:
    one = _build('w', value=value)
    outputs = tf.concat([0.0 * one.output, one.output], -1)
    return tf.keras.Model(one.input, outputs if are_two else one.output)

  kinds = {
    True: tf.keras.losses.SparseCategoricalCrossentropy,
    False: tf.keras.losses.BinaryCrossentropy,
  }
  model = tff_partial.from_keras(
    build,
    loss=kinds[are_two](from_logits=True),
    group='w',
    num_groups=2,
    initial_weights=[build(value) for value in (2.0, -1.0)],
  )
  label = np.array([[1], [0]], np.int32 if are_two else np.float32)
  client = {
    'x': np.array([[0.5], [3.0]], np.float32),
    'y': label[:, 0] if are_two else label,
  }
  process = baselines.build_fed_em(model)
  with runtimes.native():
    weights = process.get_model_weights(process.initialize())
  # Of a half in the support set, and of the other in the query set.
  odds = 1 / (1 + np.exp(-np.outer([0.5, 3.0], [2.0, -1.0])))
  shares = odds[0] / odds[0].sum()
  measuring = baselines.build_fed_em_eval(model, steps=1)
  found = planted.evaluate(measuring, weights, {'ann': client})
  expected = -np.log(np.sum(shares * (1 - odds[1])))
  assert found.metrics['loss'] == pytest.approx(expected, rel=1e-5)


def test_copies_begin_apart_and_other_variables_with_the_first():
  trained = [_build('body', 'head', value=value) for value in (2.0, 3.0)]
  model = _model('body', 'head', group='head', initial_weights=trained)
  seed = tf.zeros([2], tf.int32)
  (body,) = model.initial_weights_at_server(GLOBAL, seed).values()
  (head,) = model.initial_weights_at_server(GROUP, seed).values()
  assert np.ravel(body).tolist() == [2.0]
  assert np.ravel(head).tolist() == [2.0, 3.0]


# ---- what does not fit -------------------------------------------------------


def test_models_of_another_number_than_groups_are_refused():
  with pytest.raises(
    keras_variables.ModelError, match='3 models, but there are num_groups=2'
  ):
    _model('w', group='w', initial_weights=[_build('w')] * 3)


_PRIVATE = tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
  1.0, 2, 1.0
)


@pytest.mark.parametrize(
  ('aggregator', 'message'),
  [
    (
      tff.aggregators.UnweightedMeanFactory(),
      "UnweightedMeanFactory, which joins 'w/kernel', does not weigh clients",
    ),
    (_PRIVATE, "DifferentiallyPrivateFactory, which joins 'w/kernel'"),
  ],
)
def test_means_of_members_that_are_not_weighed_are_refused(aggregator, message):
  with pytest.raises(client_work.CompositionError, match=message):
    tff_partial.compose(
      _model('w', 'v', group='w'),
      work=[_BY_SIGN, Phase((GLOBAL, GROUP), measured=True)],
      aggregation=Aggregation(aggregator=aggregator, mean_of_members=True),
    )


def test_means_of_members_are_refused_where_no_group_is_trained():
  with pytest.raises(groups.GroupError, match='no phase trains weights of gro'):
    algorithms.build_fed_avg(
      tff_partial.from_keras(lambda: _build('w'), loss='mse'),
      aggregation=Aggregation(mean_of_members=True),
    )
  with pytest.raises(groups.GroupError, match='no phase trains weights of gro'):
    tff_partial.compose(
      _model('w', 'v', group='w'),
      work=[_BY_SIGN, Phase((GLOBAL,), measured=True)],
      aggregation=Aggregation(mean_of_members=True),
    )


def test_what_clients_with_all_copies_cannot_do_is_refused():
  model = _model('w', group='w')
  with pytest.raises(groups.GroupError, match='of which they are all members'):
    baselines.build_fed_em(
      model, are_logits=False, aggregation=Aggregation(mean_of_members=True)
    )
  with pytest.raises(groups.GroupError, match='say which by `weights_fn`'):
    tff_partial.compose(
      model, work=[groups.ALL_COPIES, Phase((GROUP,), measured=True)]
    )
  with pytest.raises(SettingError, match='steps=0: a client computes its shar'):
    baselines.build_fed_em_eval(model, are_logits=False, steps=0)
  with pytest.raises(SettingError, match='without an axis of classes'):
    baselines.build_fed_em(
      planted.factorization(local=None, group='user', num_groups=2)
    )


@pytest.mark.parametrize(
  ('train', 'error', 'message'),
  [
    (
      (GLOBAL,),
      client_work.CompositionError,
      r"trains \['global'\] variables, but at the server the model has "
      r"\['group'\] ones alone",
    ),
    (
      (GROUP, PERSONAL),
      phases.PhaseError,
      'trains copies of the global variables, but the model has no',
    ),
  ],
)
def test_work_on_global_variables_that_there_are_not_is_refused(
  train, error, message
):
  with pytest.raises(error, match=message):
    tff_partial.compose(
      _model('w', group='w'), work=[_BY_SIGN, Phase(train, measured=True)]
    )
