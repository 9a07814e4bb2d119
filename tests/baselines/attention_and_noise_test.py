"""FedAtt and Fednoise beside NumPy loops, and Laplace noise by itself.

The model is `b (A x)`: two layers, so that attention differs by layer. The loss
is the squared error, and clients take one step on all of their examples an
epoch. Rounds of FedAtt are compared with its authors' in `references_test.py`.
"""

import collections
from collections.abc import Callable
import math
import secrets
from typing import Any

import numpy as np
import pytest
from scipy import stats
import tensorflow as tf
import tensorflow_federated as tff

from baselines import fed_att
from baselines import fed_noise
from tests.support import planted
from tests.support.stacks import linear
from tests.support.stacks import stack
from tff_partial import aggregators
from tff_partial import tiers
from tff_partial.client import client_work
from tff_partial.composition import Aggregation
from tff_partial.dp import clipping as clipping_lib
from tff_partial.dp import local_noise
from tff_partial.dp import privacy
from tff_partial.dp import privacy_plans
from tff_partial.dp import samplings
from tff_partial.errors import PrivacyError
from tff_partial.errors import SettingError
from tff_partial.exchange import messages
from tff_partial.exchange.messages import ClientWeighting
from tff_partial.model import keras_models
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.phases import sgd

_SIZES = {'ann': 5, 'bob': 3, 'cid': 4, 'dan': 2}
_RATE, _EPOCHS = 0.05, 3
_TRAINING = Phase(optimizer=sgd(_RATE), batch_size=None, epochs=_EPOCHS)
_ROUNDS = (['ann', 'bob', 'cid'], ['dan', 'ann'], ['cid', 'bob', 'dan'])
_FIRST, _SECOND = 'first/kernel', 'second/kernel'
# Chance fails a statistical test once in 10**9 times.
_CHANCE = 1e-9
pytestmark = pytest.mark.usefixtures('in_cohorts')


_build = stack(
  2, linear('identity', 2, name='first'), linear('ones', name='second')
)


@pytest.fixture(scope='module', name='model')
def fixture_model() -> models.PartialModel:
  return keras_models.from_keras(_build, loss='mse')


@pytest.fixture(scope='module', name='clients')
def fixture_clients() -> dict[str, planted.Fields]:
  return planted.drawn(_SIZES, around=2.0)


def _moves(
  a: np.ndarray, b: np.ndarray, fields: planted.Fields
) -> tuple[np.ndarray, np.ndarray]:
  """What training takes away from A and b."""
  x, y = (fields[name].astype(np.float64) for name in ('x', 'y'))
  first, second = a, b
  for _ in range(_EPOCHS):
    slope = 2 * (x @ first @ second - y) / len(y)
    to_first, to_second = x.T @ slope @ second.T, (x @ first).T @ slope
    first, second = first - _RATE * to_first, second - _RATE * to_second
  return a - first, b - second


def _assert_weights(
  process: Any, state: Any, a: np.ndarray, b: np.ndarray
) -> None:
  found = planted.global_weights(process, state)
  np.testing.assert_allclose(found[_FIRST], a, atol=2e-6)
  np.testing.assert_allclose(found[_SECOND], b, atol=2e-6)


def _assert_moved(
  process: Any, state: Any, join: Callable[[list[np.ndarray]], Any], sent: Any
) -> None:
  """The weights after a first round in which clients sent some updates."""
  a = np.eye(2) - join([one[_FIRST] for one in sent])
  b = np.ones([2, 1]) - join([one[_SECOND] for one in sent])
  _assert_weights(process, state, a, b)


def _attended(moves: list[np.ndarray], weights: Any = 1.0) -> np.ndarray:
  """The mean of moves by the softmax of their norms."""
  shares = weights * np.exp([np.linalg.norm(move) for move in moves])
  return np.tensordot(shares / np.sum(shares), np.array(moves), 1)


# ---- FedAtt ------------------------------------------------------------------


@pytest.mark.slow
def test_weights_of_clients_multiply_their_attention(model, clients):
  process = fed_att.build_fed_att(
    model,
    training=_TRAINING,
    aggregation=Aggregation(client_weighting=ClientWeighting.NUM_EXAMPLES),
  )
  state, _ = planted.trained(process, clients, _ROUNDS[:1])
  a, b = np.eye(2), np.ones([2, 1])
  moves = [_moves(a, b, clients[name]) for name in _ROUNDS[0]]
  sizes = [_SIZES[name] for name in _ROUNDS[0]]
  to_a, to_b = zip(*moves, strict=True)
  a, b = a - _attended(to_a, sizes), b - _attended(to_b, sizes)
  _assert_weights(process, state, a, b)


def _attend(
  rounds: list[tuple[list[list[float]], list[float]]],
  mean: aggregators.Factory | None = None,
) -> list[np.ndarray]:
  """By how much the server would move a layer, of clients' moves by round."""
  of_layer = collections.OrderedDict({_FIRST: (np.float32, [2])})
  value_type = tff.to_type(collections.OrderedDict({tiers.GLOBAL: of_layer}))
  factory = fed_att.AttentiveFactory(mean or aggregators.MeanFactory())
  process = factory.create(value_type, tff.TensorType(np.float32))
  state, results = process.initialize(), []
  for moves, weights in rounds:
    sent = [
      {tiers.GLOBAL: {_FIRST: np.array(move, np.float32)}} for move in moves
    ]
    output = process.next(state, sent, np.array(weights, np.float32).tolist())
    state = output.state
    results.append(np.asarray(output.result[tiers.GLOBAL][_FIRST]))
  return results


def test_attention_is_a_softmax_however_far_clients_move():
  # exp(300) is no float32. In the first round, that both are farther than 60
  # is all that counts; from the second one on, that one is farther by log(3).
  near, far = [300.0, 0.0], [0.0, 300.0 + math.log(3.0)]
  first, second, third = _attend([([near, far], [1.0, 1.0])] * 3)
  np.testing.assert_allclose(first, [150.0, far[1] / 2], rtol=1e-5)
  for found in (second, third):
    np.testing.assert_allclose(found, [300.0 / 4, far[1] * 3 / 4], rtol=1e-4)


def test_distances_that_shrink_are_followed():
  far, near = [[200.0, 0.0]], [[3.0, 0.0], [0.0, 3.0 + math.log(3.0)]]
  found = _attend([(far, [1.0])] * 2 + [(near, [1.0, 1.0])] * 2)
  np.testing.assert_allclose(found[1], [200.0, 0.0])
  # In one round both are nearer by more than 60.
  np.testing.assert_allclose(found[2], [1.5, near[1][1] / 2], rtol=1e-5)
  np.testing.assert_allclose(found[3], [0.75, near[1][1] * 0.75], rtol=1e-5)


def test_a_client_that_does_not_count_has_no_attention():
  moves = [[1.0, 0.0], [0.0, 0.0]]
  (alone,) = _attend([(moves, [2.0, 0.0])])
  np.testing.assert_allclose(alone, [1.0, 0.0])
  # Nor has it where the weights are not asked for.
  (alone,) = _attend([(moves, [2.0, 0.0])], tff.aggregators.SumFactory())
  np.testing.assert_allclose(alone, [1.0, 0.0])


def test_where_no_client_counts_nothing_moves_and_nothing_is_forgotten():
  near, far = [300.0, 0.0], [0.0, 300.0 + math.log(3.0)]
  both = ([near, far], [1.0, 1.0])
  found = _attend([both, both, ([near, far], [0.0, 0.0]), both])
  np.testing.assert_array_equal(found[2], [0.0, 0.0])
  np.testing.assert_allclose(found[3], found[1], rtol=1e-6)


def test_clients_that_are_clipped_keep_their_attention():
  # The factor of a clip is in both sums of a quotient.
  clipped = aggregators.MeanFactory(
    lambda mean: tff.aggregators.clipping_factory(0.1, mean)
  )
  found = _attend([([[3.0, 4.0]], [1.0])] * 40, clipped)
  np.testing.assert_allclose(found, [[3.0, 4.0]] * 40, rtol=1e-4)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (
      {'server_learning_rate': 0.0},
      'server_learning_rate=0.0: the server follows by a positive',
    ),
    ({'server_learning_rate': math.inf}, 'server_learning_rate=inf'),
    (
      {
        'aggregation': Aggregation(
          aggregator=privacy.private_mean(
            clipping_lib.FixedClip(1.0),
            noise_multiplier=1.0,
            clients_per_round=2.0,
          )
        )
      },
      'a private aggregator would noise, .* Let clients add noise',
    ),
  ],
)
def test_what_fed_att_cannot_do_is_refused(options, message, model):
  with pytest.raises(SettingError, match=message):
    fed_att.build_fed_att(model, **options)


@pytest.mark.slow
def test_fed_att_of_local_noise_attends_to_what_is_sent(model, clients):
  noise = local_noise.LaplaceNoise(0.5, 0.1, noise_seed=3)
  process = fed_att.build_fed_att(
    model, training=_TRAINING, aggregation=Aggregation(postprocess_update=noise)
  )
  assert process.mechanism == noise.mechanism
  state, _ = planted.trained(process, clients, _ROUNDS[:1])
  _assert_moved(process, state, _attended, _sent(process, clients, noise))


# ---- Fednoise ----------------------------------------------------------------


def _sent(
  process: Any, clients: dict[str, planted.Fields], noise: Any
) -> list[dict[str, np.ndarray]]:
  """What each client of the first round sends."""
  cohort = planted.cohort_of(
    process, {name: clients[name] for name in _ROUNDS[0]}, 0
  )
  found = []
  for name, value in zip(_ROUNDS[0], cohort, strict=True):
    to_a, to_b = _moves(np.eye(2), np.ones([2, 1]), clients[name])
    moved = {tiers.GLOBAL: {_FIRST: to_a, _SECOND: to_b}}
    update = tf.nest.map_structure(lambda t: tf.constant(t, tf.float32), moved)
    with tf.init_scope():
      seed = messages.sending_seed(tf.constant(value['seed']))
      sent = noise(update, seed)[tiers.GLOBAL]
    found.append({name: tensor.numpy() for name, tensor in sent.items()})
  return found


@pytest.mark.slow
@pytest.mark.parametrize(
  'noise',
  [
    local_noise.LaplaceNoise(0.5, 0.1),
    local_noise.LaplaceNoise(0.5, 0.1, noise_seed=3),
    local_noise.LocalNoise(0.5, 0.1),
  ],
  ids=['laplace', 'laplace of a seed', 'gaussian'],
)
def test_fed_noise(noise, model, clients):
  process = fed_noise.build_fed_noise(model, noise=noise, training=_TRAINING)
  assert process.mechanism == noise.mechanism
  state, _ = planted.trained(process, clients, _ROUNDS[:1])
  sent = _sent(process, clients, noise)
  # All clients count alike.
  _assert_moved(process, state, lambda moves: np.mean(moves, 0), sent)


def test_two_kinds_of_noise_are_refused(model):
  noise = local_noise.LaplaceNoise(1.0, 1.0)
  with pytest.raises(SettingError, match='Pass one of the two'):
    fed_noise.build_fed_noise(
      model,
      noise=noise,
      aggregation=Aggregation(
        postprocess_update=local_noise.LocalNoise(1.0, 1.0)
      ),
    )
  # As may be said, there is none beside.
  fed_noise.build_fed_noise(
    model, noise=noise, aggregation=Aggregation(postprocess_update=None)
  )


def test_noise_beside_weights_that_are_not_noised_is_refused(model):
  with pytest.raises(
    client_work.CompositionError, match='client_weighting: clients would send'
  ):
    fed_noise.build_fed_noise(
      model,
      noise=local_noise.LaplaceNoise(1.0, 1.0),
      aggregation=Aggregation(client_weighting=ClientWeighting.NUM_EXAMPLES),
    )


# ---- Laplace noise -----------------------------------------------------------


def _fresh() -> tf.Tensor:
  return tf.constant(
    np.frombuffer(secrets.token_bytes(8), np.int32).astype(np.int32)
  )


def test_noise_is_of_laplace():
  one, other = local_noise.standard_laplace(_fresh(), [2, 200_000]).numpy()
  assert stats.kstest(one, 'laplace').pvalue > _CHANCE
  # The variance is 2.
  assert abs(np.mean(one * other)) < 7.0 * 2.0 / np.sqrt(len(one))
  far = np.abs(local_noise.standard_laplace(_fresh(), [2**22]).numpy())
  beyond = math.exp(-10.0) * len(far)
  assert abs(np.sum(far > 10.0) - beyond) < 7.0 * np.sqrt(beyond)


@pytest.mark.parametrize(
  'update',
  [
    [3e38, -3e38, 3e38],
    [np.nan, 1.0, 1.0],
    [0.0, -np.inf, 0.0],
    [1e-45, 0.0, 0.0],
    [0.0, 0.0, 0.0],
    [2.0000002, 0.0, 0.0],
    [1.0, -0.5, 0.25],
  ],
)
def test_no_update_is_longer_than_the_clip(update):
  noise = local_noise.LaplaceNoise(2.0, 0.0)
  sent = noise({'a': tf.constant(update), 'b': tf.zeros([2, 1])}, _fresh())
  found = sent['a'].numpy().astype(np.float64)
  assert np.abs(found).sum() <= 2.0
  if not np.isfinite(update).all():
    np.testing.assert_array_equal(found, np.zeros(3))
  elif np.abs(update).sum() <= 2.0:
    np.testing.assert_allclose(found, update, rtol=2e-6, atol=1e-40)
  else:
    assert np.abs(found).sum() == pytest.approx(2.0, rel=2e-6)


def test_noise_follows_from_the_seeds():
  update = collections.OrderedDict(
    a=tf.zeros([5000]), b=tf.constant([3e38]), c=tf.zeros([2], tf.double)
  )
  noise = local_noise.LaplaceNoise(2.0, 1.5)
  one, again, other = (
    noise(update, tf.constant([1, last])) for last in (2, 2, 3)
  )
  planted.assert_same(one, again)
  assert [leaf.dtype for leaf in one.values()] == [
    leaf.dtype for leaf in update.values()
  ]
  assert stats.kstest(one['a'] / 3.0, 'laplace').pvalue > _CHANCE
  correlation = np.corrcoef(one['a'], other['a'])[0, 1]
  assert abs(correlation) < 7.0 / np.sqrt(5000)
  # The huge number was clipped to 2 before.
  assert abs(one['b'] - 2.0) < 25.0 * 3.0
  simulated = local_noise.LaplaceNoise(2.0, 1.5, noise_seed=1)
  assert np.any(simulated(update, tf.constant([1, 2]))['a'] != one['a'])


def test_epsilon_is_two_clips_over_the_scale_and_adds_up():
  noise = local_noise.LaplaceNoise(3.0, 4.0)
  # The scale is 12.
  assert noise.epsilon() == 2 * 3.0 / 12.0
  assert noise.epsilon(participations=10) == 5.0
  assert noise.epsilon(participations=0) == 0.0
  assert local_noise.LaplaceNoise(3.0, 0.0).epsilon() == math.inf


@pytest.mark.slow
def test_what_is_sent_is_as_likely_as_epsilon_says():
  # Of the two updates that are farthest apart, how often more than a threshold
  # is sent, by many clients.
  noise, number = local_noise.LaplaceNoise(1.0, 2.0), 20_000
  seeds = tf.bitcast(
    tf.random.stateless_uniform([number, 2], _fresh(), None, None, tf.uint32),
    tf.int32,
  )
  send = tf.function(
    lambda update: tf.map_fn(
      lambda seed: noise(update, seed), seeds, fn_output_signature=tf.float32
    )
  )
  low, high = (send(tf.constant(update)).numpy() for update in (-1.0, 1.0))
  factor, slack = math.exp(noise.epsilon()), 7.0 / np.sqrt(number)
  for threshold in (-1.0, 0.0, 1.0, 2.0):
    less, more = np.mean(low > threshold), np.mean(high > threshold)
    assert more <= factor * (less + slack)
    # At the larger update and above it, the bound is reached.
    if threshold >= 1.0:
      assert more >= factor * (less - slack)


def test_no_ledger_of_gaussian_noise_counts_it(model):
  plan = privacy_plans.plan(
    clipping_lib.FixedClip(0.5),
    noise_multiplier=0.1 * math.sqrt(2.0),
    delta=1e-5,
    population=4,
    clients_per_round=2,
    rounds=3,
    sampling=samplings.EveryUpdate.name,
  )
  process = fed_noise.build_fed_noise(
    model, noise=local_noise.LaplaceNoise(0.5, 0.1), training=_TRAINING
  )
  with pytest.raises(PrivacyError, match=r'clipping=FixedClip.* has L1Clip'):
    privacy_plans.PrivacyLedger(plan).check(process.mechanism)


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (lambda: local_noise.LaplaceNoise(0.0, 1.0), '`clip`'),
    (lambda: local_noise.LaplaceNoise(1.0, -1.0), '`noise_multiplier`'),
    (
      lambda: local_noise.L1Clip(1.0).query(
        clipping_lib.Noise(1.0, _fresh, tf.TensorSpec([]), 1.0)
      ),
      'L1Clip is for LaplaceNoise',
    ),
  ],
)
def test_impossible_noise_is_refused(call, message):
  with pytest.raises(PrivacyError, match=message):
    call()


def test_noised_numbers_are_on_a_grid_of_the_noise():
  # 2**-20 of the largest power of two that is not above the scale, in clips.
  noise = local_noise.LaplaceNoise(1.0, 3.0)
  sent = noise(tf.constant([0.1, 0.2], tf.double), _fresh())
  steps = sent.numpy() * 2.0**19
  np.testing.assert_array_equal(steps, np.round(steps))
