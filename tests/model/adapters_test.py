"""Low-rank adapters: the model at first, by hand, and what they leave alone."""

import collections

import numpy as np
import pytest
from sklearn import linear_model
import tensorflow as tf
import tensorflow_federated as tff

import baselines
from tests.support import planted
import tff_partial
from tff_partial import algorithms
from tff_partial import tiers
from tff_partial.analysis.communication import communication
from tff_partial.evaluation import build_evaluation
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.solvers.exact import Exact

_ITEMS = 'items/embeddings'
pytestmark = pytest.mark.usefixtures('in_cohorts')


def _attending() -> tf.keras.Model:
  """Each kind of layer with a kernel."""
  layers = tf.keras.layers
  tokens = tf.keras.Input([5], dtype=tf.int32)
  read = layers.Embedding(11, 6, name='items')(tokens)
  read = layers.MultiHeadAttention(2, 3, name='heads')(read, read)
  read = layers.EinsumDense('abc,cde->abde', [None, 2, 4], name='einsum')(read)
  read = layers.Flatten()(layers.Conv2D(8, [2, 2], name='conv')(read))
  return tf.keras.Model(tokens, layers.Dense(2, name='head')(read))


def _whole(build=_attending, **options) -> models.PartialModel:
  return tff_partial.from_keras(build, **{'loss': 'mse', **options})


@pytest.fixture(scope='module', name='whole')
def fixture_whole() -> models.PartialModel:
  return _whole()


def _first(model: models.PartialModel) -> dict[str, dict[str, tf.Tensor]]:
  return collections.OrderedDict(
    (tier, model.initial_weights(tier, [0, 1])) for tier in model.tiers
  )


def _predicted(model: models.PartialModel, weights, x) -> np.ndarray:
  return model.predict(
    weights, model.frozen_weights(), x, training=False, seed=[0, 1]
  )[0].numpy()


@pytest.mark.slow
def test_the_first_model_is_the_trained_one_and_its_sums_are_exported():
  tf.keras.utils.set_random_seed(0)
  trained = _attending()
  whole = _whole(initial_weights=trained)
  model = tff_partial.add_lora(
    whole,
    2,
    where=['items', 'heads', 'einsum', 'conv'],
    alpha=3.0,
    b='local',
    train='head',
  )
  assert {v.name: v.shape for v in model.trainable(tiers.LOCAL)} == {
    'lora_b/items/embeddings': (2, 6),
    **{f'lora_b/heads/{n}/kernel': (2, 6) for n in ('query', 'key', 'value')},
    'lora_b/heads/attention_output/kernel': (2, 6),
    'lora_b/einsum/kernel': (2, 8),
    'lora_b/conv/kernel': (2, 8),
  }
  assert model.specs(tiers.GLOBAL)['lora_a/conv/kernel'].shape == [16, 2]
  assert {'head/kernel', 'head/bias'} < set(model.specs(tiers.GLOBAL))
  x = np.random.default_rng(0).integers(0, 11, [4, 5])
  weights = _first(model)
  np.testing.assert_array_equal(
    _predicted(model, weights, x), _predicted(whole, _first(whole), x)
  )
  # With other factors the model has the sums, and layers as before.
  random = np.random.default_rng(1)
  own = weights[tiers.LOCAL]
  for name, value in own.items():
    own[name] = tf.constant(random.normal(size=value.shape), tf.float32)
  merged = model.to_keras(*weights.values())
  np.testing.assert_allclose(
    merged(x), _predicted(model, weights, x), rtol=0, atol=1e-5
  )
  product = np.matmul(
    weights[tiers.GLOBAL][f'lora_a/{_ITEMS}'], own[f'lora_b/{_ITEMS}']
  )
  np.testing.assert_allclose(
    merged.get_layer('items').get_weights()[0],
    trained.get_layer('items').get_weights()[0] + 1.5 * product,
    rtol=1e-5,
  )
  assert [w.shape for w in merged.weights] == [w.shape for w in trained.weights]


_RATED = {'a': 8, 'b': 12, 'c': 5}


def _rating(**tiers_of_factors) -> models.PartialModel:
  """The factorization for all, with adapters of its table of items."""
  model = planted.factorization(local=None)
  return tff_partial.add_lora(model, 2, where='items', **tiers_of_factors)


@pytest.mark.slow
def test_fed_sa_sends_a_alone_and_keeps_b_and_the_base():
  # FedAdam at the server, which moves all that it gets.
  model = _rating(b='local')
  process = algorithms.build_fed_per(
    model,
    training=Phase(optimizer=sgd(0.1)),
    server_optimizer=tff.learning.optimizers.build_adam(0.1),
  )
  bytes_of_a = 4 * planted.NUM_ITEMS * 2
  counted = communication(process, ())
  assert counted['upload_bytes'] == counted['download_bytes'] == bytes_of_a
  clients = planted.pack(planted.rate(_RATED), process.example_spec)
  trained = tff_partial.train(process, clients, rounds=2, clients_per_round=3)
  for name, value in model.frozen_weights().items():
    np.testing.assert_array_equal(trained.weights.non_trainable[name], value)
  kept = trained.client_store.client('a')
  assert set(kept) == {f'lora_b/{_ITEMS}'}
  moved = trained.weights.trainable[tiers.GLOBAL][f'lora_a/{_ITEMS}']
  first = planted.global_weights(process, process.initialize())
  assert np.any(moved != first[f'lora_a/{_ITEMS}'])
  assert np.any(kept[f'lora_b/{_ITEMS}'])


@pytest.mark.slow
def test_ffa_trains_b_alone():
  model = _rating(a='frozen')
  assert set(model.specs(tiers.GLOBAL)) == {f'lora_b/{_ITEMS}'}
  a = model.frozen_weights()[f'lora_a/{_ITEMS}']
  assert np.std(a) == pytest.approx(1.0, abs=0.3)  # Of a table.
  process = baselines.build_fed_adam(model, training=Phase(optimizer=sgd(0.1)))
  cohort = planted.cohort_of(process, planted.rate(_RATED), 1)
  weights = process.get_model_weights(planted.run(process, cohort).state)
  np.testing.assert_array_equal(weights.non_trainable[f'lora_a/{_ITEMS}'], a)
  assert np.any(weights.trainable[tiers.GLOBAL][f'lora_b/{_ITEMS}'])


def test_two_adapters_are_added():
  model = tff_partial.add_lora(
    _rating(), np.int64(1), where='items', a='local', b='local', name='own'
  )
  assert set(model.specs(tiers.GLOBAL)) == {
    f'lora_a/{_ITEMS}',
    f'lora_b/{_ITEMS}',
  }
  assert set(model.specs(tiers.LOCAL)) == {f'own_a/{_ITEMS}', f'own_b/{_ITEMS}'}
  weights = {
    name: np.full(spec.shape, 0.5, np.float32)
    for tier in model.tiers
    for name, spec in model.specs(tier).items()
  }
  base = model.frozen_weights()[_ITEMS]
  merged = model.to_keras(weights).get_layer('items').get_weights()[0]
  np.testing.assert_allclose(merged, base + 2 * 0.25 + 0.25, rtol=1e-6)


@pytest.mark.slow
def test_b_is_rebuilt_exactly():
  """As ridge regression, on A's outputs, of what the base leaves over."""

  def build() -> tf.keras.Model:
    x = tf.keras.Input([4])
    return tf.keras.Model(x, tf.keras.layers.Dense(1, name='head')(x))

  model = tff_partial.add_lora(
    _whole(build), 1, where='head', a='frozen', b='local', train='head/bias'
  )
  random = np.random.default_rng(0)
  x, y = random.normal(size=[9, 4]), random.normal(size=[9, 1])
  measuring = build_evaluation(
    model,
    client_state=tff_partial.client_state.stateless,
    work=[
      Phase(train=(tiers.LOCAL,), optimizer=Exact(ridge=0.5)),
      Phase(train=(), measured=True),
    ],
  )
  fields = {'x': x.astype(np.float32), 'y': y.astype(np.float32)}
  (client,) = planted.cohort_of(measuring, {'a': fields}, 1)
  frozen = model.frozen_weights()
  shared = planted.as_model_weights(_first(model)[tiers.GLOBAL])
  found = measuring.personalise(
    type(shared)(shared.trainable, frozen), collections.OrderedDict(), client
  )
  features = x @ frozen['lora_a/head/kernel'].numpy()
  left = y - x @ frozen['head/kernel'].numpy()
  ridge = linear_model.Ridge(alpha=0.5, fit_intercept=False)
  expected = ridge.fit(features, left).coef_
  np.testing.assert_allclose(
    found['lora_b/head/kernel'][:, 0], expected, rtol=1e-4
  )


def test_biases_alone_are_trained(whole):
  model = tff_partial.freeze(whole, but='.*bias')
  assert all(v.name.endswith('bias') for v in model.trainable(tiers.GLOBAL))
  assert len(model.trainable(tiers.GLOBAL)) == 6
  with pytest.raises(models.ModelError, match='Every variable would be frozen'):
    tff_partial.freeze(whole)


@pytest.mark.parametrize(
  ('rank', 'options', 'message'),
  [
    (2.0, {}, 'rank=2.0: give a whole number'),
    (0, {}, 'rank=0: give a whole number of at least 1'),
    (5, {'where': 'head'}, r"rank=5: 'head/kernel' .* has rank 2 at most"),
    (2, {'where': 'boy'}, "where='boy' matches no variable"),
    (2, {'where': 'head/bias'}, 'matches no kernel and no embeddings'),
    (2, {'alpha': 0.0}, 'alpha=0.0: give a number above 0'),
    (2, {'a': 'group'}, "a='group': its holder is one of global, local"),
    (2, {'b': 'frozen'}, "b='frozen': B is zero at first"),
    (2, {'train': 'items'}, 'would be trained and have adapters'),
  ],
)
def test_what_is_no_adapter_is_refused(whole, rank, options, message):
  with pytest.raises(models.ModelError, match=message):
    tff_partial.add_lora(whole, rank, **options)


def test_two_adapters_of_one_name_are_refused(whole):
  once = tff_partial.add_lora(whole, 1, where='head')
  with pytest.raises(
    models.ModelError, match="has adapters of the name 'lora'"
  ):
    tff_partial.add_lora(once, 1)
