"""Models of Keras 3: as those of Keras 2, number for number.

There is no Keras 3 beside TensorFlow 2.14, and so nothing here for Python 3.11.
"""

import numpy as np
import pytest
import tensorflow as tf

import tff_partial
from tff_partial import random_bits
from tff_partial import tiers
from tff_partial.model.keras_variables import ModelError

keras = pytest.importorskip('keras', minversion='3')

_SEED = random_bits.derive('keras 3')


def ratings(of, dropout: float = 0.0):
  """The same model of either Keras: `of` is `keras` or `tf.keras`."""
  item = of.Input([], dtype='int32')
  vector = of.layers.Embedding(9, 4, 'normal', name='items')(item)
  vector = of.layers.Dropout(dropout)(vector)
  hidden = of.layers.Dense(5, 'relu', kernel_regularizer='l2')(vector)
  return of.Model(item, of.layers.Dense(1, name='likes')(hidden))


def words(of):
  """Masked steps, recurrent dropout, and several names that count up."""
  sentence = of.Input([6], dtype='int32')
  steps = of.layers.Embedding(9, 4, mask_zero=True)(sentence)
  steps = of.layers.LSTM(3, return_sequences=True)(steps)
  steps = of.layers.LayerNormalization()(steps)
  return of.Model(sentence, of.layers.Dense(9, name='own')(steps))


def partial(build, of, **options):
  options = {'local': 'likes', 'loss': 'mse', 'metrics': ['mae'], **options}
  return tff_partial.from_keras(lambda: build(of), **options)


def clients(model):
  random = np.random.default_rng(0)
  owners = random.integers(0, 12, 200)
  return tff_partial.from_arrays(
    {
      'x': random.integers(0, 9, 200),
      'y': random.normal(size=[200, 1]).astype(np.float32),
    },
    {f'u_{user}': np.flatnonzero(owners == user) for user in range(12)},
    model.example_spec,
  )


def named(model, seed=_SEED):
  return {
    name: value.numpy()
    for tier in model.tiers
    for name, value in model.initial_weights(tier, seed).items()
  }


# ---- what it consists of -----------------------------------------------------


@pytest.mark.parametrize(
  ('build', 'options'),
  [
    (ratings, {}),
    (
      words,
      {
        'local': 'own',
        'loss': 'sparse_categorical_crossentropy',
        'metrics': (),
      },
    ),
  ],
)
def test_the_same_model_of_both_kerases_has_the_same_first_values(
  build, options
):
  one, other = (partial(build, of, **options) for of in (keras, tf.keras))
  assert one.tier_of == other.tier_of
  assert one.example_spec == other.example_spec
  assert one.prediction_spec == other.prediction_spec
  assert one.only_looked_up == other.only_looked_up != ()
  assert one.example_spec.ids['x'] == other.example_spec.ids['x']
  for mine, theirs in zip(
    named(one).values(), named(other).values(), strict=True
  ):
    np.testing.assert_array_equal(mine, theirs)


def test_models_of_all_forms_are_taken_apart():
  class Own(keras.Model):
    def __init__(self):
      super().__init__()
      self.shared = keras.layers.Dense(2, name='shared')
      self.own = keras.layers.Dense(1, name='own')

    def call(self, inputs):
      return self.own(self.shared(inputs['a'] + inputs['b']))

  spec = tf.TensorSpec([3], tf.float32)
  model = tff_partial.from_keras(
    Own, local='own', loss='mse', inputs={'a': spec, 'b': spec}
  )
  assert {v.name for v in model.trainable(tiers.LOCAL)} == {
    'own/kernel',
    'own/bias',
  }
  sequential = tff_partial.from_keras(
    lambda: keras.Sequential(
      [keras.Input([3]), keras.layers.Dense(2), keras.layers.Dense(1)]
    ),
    local='dense_1',
    loss='mse',
  )
  assert [v.name for v in sequential.variables] == [
    *('dense/kernel', 'dense/bias'),
    *('dense_1/kernel', 'dense_1/bias'),
  ]


def test_given_and_assigned_values_are_first_values():
  table = np.arange(6, dtype=np.float32).reshape([3, 2])

  def build():
    item = keras.Input([], dtype='int32')
    vectors = keras.layers.Embedding(3, 2, weights=[table], name='given')(item)
    own = keras.layers.Dense(1, kernel_initializer='ones', name='own')
    return keras.Model(item, own(vectors))

  model = tff_partial.from_keras(build, local='own', loss='mse')
  first = named(model)
  np.testing.assert_array_equal(first['given/embeddings'], table)
  np.testing.assert_array_equal(first['own/kernel'], [[1], [1]])


# ---- what it computes --------------------------------------------------------


def test_predictions_are_those_of_the_model():
  model = partial(ratings, keras)
  weights = {t: model.initial_weights(t, _SEED) for t in model.tiers}
  x = tf.constant([0, 8, 3])
  found, losses = model.predict(weights, {}, x, training=False, seed=_SEED)
  made = model.to_keras(*weights.values())
  assert isinstance(made, keras.Model)
  np.testing.assert_allclose(found, made(x), rtol=1e-6)
  kernel = weights[tiers.GLOBAL]['dense/kernel'].numpy()
  (penalty,) = losses  # Keras's l2 is .01 times the sum of squares.
  np.testing.assert_allclose(penalty, 0.01 * (kernel**2).sum(), rtol=1e-6)


@pytest.mark.parametrize('half', ['bfloat16', 'float16'])
def test_layers_of_mixed_precision_compute_in_it(half: str):
  model = tff_partial.from_keras(
    _around(_dense(dtype=f'mixed_{half}')), loss='mse'
  )
  weights = {tier: model.initial_weights(tier, _SEED) for tier in model.tiers}
  x = np.random.default_rng(0).normal(size=[5, 4]).astype(np.float32)
  predictions, _ = model.predict(weights, {}, x, training=False, seed=_SEED)
  made = model.to_keras(*weights.values())
  assert made.layers[0].compute_dtype == half
  wanted = tf.cast(made(x), tf.float32)
  np.testing.assert_allclose(predictions, wanted, rtol=0.01, atol=0.005)
  full = tf.matmul(x, made.layers[0].kernel.value)
  assert np.any(np.abs(predictions - full) > 1e-4)


@pytest.fixture(scope='module', name='trained')
def fixture_trained():
  """Some rounds with dropout, of Keras 3 in every runtime, and of Keras 2."""
  cohort, native = tff_partial.runtimes.cohort, tff_partial.runtimes.native
  results = {}
  for name, of, runtime in (
    ('cohort', keras, cohort(strict=True, jit=False)),
    ('XLA', keras, cohort(strict=True, jit=True)),
    ('native', keras, native()),
    ('Keras 2', tf.keras, cohort(strict=True, jit=False)),
  ):
    model = partial(ratings, of, seed=3)
    process = tff_partial.algorithms.build_fed_recon(
      model, reconstruct=tff_partial.Phase(epochs=2, batch_size=4)
    )
    data = clients(model)
    with runtime:
      result = tff_partial.train(
        process, data, rounds=3, clients_per_round=5, seed=1
      )
    results[name] = model, data, result
  return results


@pytest.mark.parametrize('other', ['XLA', 'native', 'Keras 2'])
def test_training_is_the_same_in_every_runtime_and_with_keras_2(trained, other):
  (_, _, one), (_, _, another) = trained['cohort'], trained[other]
  assert one.train['loss'] == pytest.approx(another.train['loss'], rel=1e-6)
  shared = (r.best_weights.trainable[tiers.GLOBAL] for r in (one, another))
  for mine, theirs in zip(*(w.values() for w in shared), strict=True):
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


def test_a_user_gets_a_model_of_keras_3(trained):
  _, data, result = trained['cohort']
  made = tff_partial.personalise(result, data, 'u_3')
  assert isinstance(made, keras.Model)
  _, other_data, other = trained['Keras 2']
  same = tff_partial.personalise(other, other_data, 'u_3')
  x = np.arange(9)
  np.testing.assert_allclose(
    made.predict(x, verbose=0), same.predict(x, verbose=0), atol=1e-6
  )


def test_exact_solves_are_those_of_keras_2():
  found = []
  for of in (keras, tf.keras):
    model = partial(ratings, of, seed=3)
    process = tff_partial.algorithms.build_fed_recon(
      model,
      reconstruct=tff_partial.Phase(optimizer=tff_partial.Exact()),
      through_solution=True,
    )
    result = tff_partial.train(
      process, clients(model), rounds=2, clients_per_round=5, seed=1
    )
    found.append(result.weights.trainable[tiers.GLOBAL])
  for mine, theirs in zip(*(w.values() for w in found), strict=True):
    np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('state', ['averaged', 'frozen'])
def test_moving_averages_are_those_of_keras_2(state):
  def build(of):
    x = of.Input([3])
    hidden = of.layers.BatchNormalization(momentum=0.5, name='norm')(x)
    return of.Model(x, of.layers.Dense(1, name='head')(hidden))

  found = []
  fields = {
    'x': np.arange(30, dtype=np.float32).reshape([10, 3]),
    'y': np.ones([10, 1], np.float32),
  }
  for of in (keras, tf.keras):
    model = partial(build, of, local=None, metrics=(), state=state)
    process = tff_partial.algorithms.build_fed_avg(
      model, training=tff_partial.Phase(batch_size=4)
    )
    result = tff_partial.train(
      process,
      tff_partial.pack({'ann': fields}, process.example_spec),
      rounds=2,
      clients_per_round=1,
    )
    found.append(result.weights.trainable[tiers.GLOBAL])
  assert ('norm/moving_mean' in found[0]) == (state == 'averaged')
  for mine, theirs in zip(*(w.values() for w in found), strict=True):
    np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def sentences(of, length):
  """The next word at each step, where `length` may be open."""
  said = of.Input([length], dtype='int32')
  steps = of.layers.Embedding(9, 4, mask_zero=True)(said)
  steps = of.layers.GRU(3, return_sequences=True)(steps)
  return of.Model(said, of.layers.Dense(9, name='own')(steps))


@pytest.mark.slow
def test_open_lengths_have_the_numbers_of_full_ones_and_of_keras_2():
  random = np.random.default_rng(0)
  said = {
    f'u_{user}': [random.integers(1, 9, 1 + (user + n) % 6) for n in range(4)]
    for user in range(5)
  }
  results = []
  for of, length in ((keras, None), (keras, 7), (tf.keras, None)):
    model = partial(
      lambda of, length=length: sentences(of, length),
      of,
      local='own',
      loss=of.losses.SparseCategoricalCrossentropy(from_logits=True),
      metrics=['accuracy'],
      seed=3,
    )
    process = tff_partial.algorithms.build_fed_recon(
      model, reconstruct=tff_partial.Phase(batch_size=2)
    )
    rows = {
      user: [np.pad(row, [0, (length or len(row)) - len(row)]) for row in found]
      for user, found in said.items()
    }
    data = tff_partial.pack(
      {user: {'x': x, 'y': x} for user, x in rows.items()},
      process.example_spec,
      lengths=None if length else [4, 16],
    )
    with tff_partial.runtimes.cohort(strict=True, jit=False):
      result = tff_partial.train(
        process, data, rounds=2, clients_per_round=4, seed=1
      )
      own = tff_partial.personalise(result, data, 'u_3')
    x = np.array([[3, 1, 4, *[0] * ((length or 3) - 3)]])
    shared = result.weights.trainable[tiers.GLOBAL].values()
    measured = [result.train['loss'], result.train['accuracy']]
    predicted = own.predict(x, verbose=0)[:, :3]
    results.append([*shared, *measured, predicted])
  for other in results[1:]:
    for mine, theirs in zip(results[0], other, strict=True):
      np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)


def test_a_trained_model_gives_the_first_values():
  whole = ratings(keras, dropout=0.5)  # With a counter of draws.
  model = partial(
    lambda of: ratings(of, dropout=0.5), keras, initial_weights=whole
  )
  first = named(model)
  np.testing.assert_array_equal(
    first['items/embeddings'], whole.get_layer('items').get_weights()[0]
  )


def test_losses_and_metrics_of_keras_3_are_taken():
  model = partial(
    ratings,
    keras,
    loss=keras.losses.Huber(delta=0.5, reduction='sum'),
    metrics=[keras.metrics.RootMeanSquaredError(name='rmse')],
  )
  assert model.metrics.names == ('rmse',)
  y, predicted = tf.constant([[0.0], [0.0]]), tf.constant([[0.25], [2.0]])
  value = model.loss(y, predicted, tf.ones([2]), tf.constant([True, True]))
  # .25² / 2, and .5 (2 - .25): summed.
  assert float(value.objective) == pytest.approx(0.03125 + 0.875)


def test_lookups_and_statistics_that_stand_first_are_lifted():
  scaled = keras.layers.Normalization(name='scaled')
  scaled.adapt(np.array([[1.0], [3.0]]))  # Mean 2, variance 1.

  def build():
    film = keras.Input([], dtype='string', name='film')
    year = keras.Input([1], name='year')
    films = keras.layers.StringLookup(vocabulary=['Alien', 'Heat'])
    vectors = keras.layers.Embedding(films.vocabulary_size(), 2)
    joined = keras.layers.Concatenate()([vectors(films(film)), scaled(year)])
    return keras.Model([film, year], keras.layers.Dense(1)(joined))

  model = tff_partial.from_keras(build, loss='mse')
  inputs = {'film': np.array(['Heat', 'Up']), 'year': np.array([[1.0], [4.0]])}
  clients = tff_partial.pack(
    {'ann': {**inputs, 'y': [[1.0], [2.0]]}}, model.example_spec
  )
  (ann,) = clients.cohort(['ann'], np.zeros([1, 2], np.int32))
  packed = ann['examples']['x']
  assert packed['film'].tolist() == [2, 0]
  assert packed['year'].tolist() == [[-1.0], [2.0]]
  weights = {'global': model.initial_weights('global', _SEED)}
  predicted, _ = model.predict(
    weights, model.frozen_weights(), packed, training=False, seed=_SEED
  )
  whole = model.to_keras(*weights.values())
  np.testing.assert_array_equal(
    predicted, whole([tf.constant(value) for value in inputs.values()])
  )


# ---- what is refused ---------------------------------------------------------


class Shuffling(keras.layers.Layer):
  def __init__(self):
    super().__init__()
    self.seed_generator = keras.random.SeedGenerator(0)

  def call(self, inputs):
    return keras.random.shuffle(inputs, seed=self.seed_generator)


class OwnMetric(keras.metrics.Mean):
  pass


def _around(*layers):
  return lambda: keras.Sequential([keras.Input([4]), *(x() for x in layers)])


def _dense(**options):
  return lambda: keras.layers.Dense(4, **options)


def _said(*layers):
  def build():
    words = keras.Input([None], dtype='int32')
    steps = keras.layers.Embedding(9, 4, mask_zero=True)(words)
    for layer in layers:
      steps = layer()(steps)
    return keras.Model(words, keras.layers.Dense(1)(steps))

  return build


def _residual():
  """Keras 3's attention takes the mask from what it reads."""
  words = keras.Input([None], dtype='int32')
  steps = keras.layers.Embedding(9, 4, mask_zero=True)(words)
  read = keras.layers.MultiHeadAttention(2, 2)(steps, steps)
  return keras.Model(words, keras.layers.Add(name='residual')([steps, read]))


@pytest.mark.parametrize(
  ('build', 'options', 'message'),
  [
    (
      _said(
        lambda: keras.layers.Conv1D(3, 3, padding='same', name='mixing'),
        keras.layers.GlobalAveragePooling1D,
      ),
      {},
      r"'mixing' \(Conv1D\) computes something else if more padding",
    ),
    (_residual, {}, r"'residual' \(Add\) gives steps of padding no mask"),
    (
      _said(
        lambda: keras.layers.BatchNormalization(name='norm'),
        keras.layers.GlobalAveragePooling1D,
      ),
      {'state': 'averaged'},
      r"'norm' \(BatchNormalization\) computes statistics over steps",
    ),
    (
      _said(
        lambda: keras.layers.Conv1D(3, 9), keras.layers.GlobalAveragePooling1D
      ),
      {},
      'sequences of 8 or 13 steps: (?!Exception)',
    ),
    (
      _around(_dense(), keras.layers.BatchNormalization),
      {},
      "changes its variable 'batch_normalization/moving_mean' while it trains",
    ),
    (_around(_dense(kernel_constraint='non_neg')), {}, 'has a constraint'),
    (_around(_dense(), Shuffling), {}, 'draws by `keras.random.shuffle`'),
    (_around(_dense(dtype='float16')), {}, 'has weights of float16'),
    (_around(_dense()), {'client_sized': 'dense'}, 'this one is of Keras 3'),
    (
      _around(_dense()),
      {'metrics': [OwnMetric()]},
      'is one of Keras 3, and cannot',
    ),
    (
      lambda: keras.Sequential([keras.layers.Dense(4)]),
      {},
      'does not say what its inputs are',
    ),
    # An error of the builder is its own: this is no activation.
    (_around(_dense(activation='ones')), {}, 'ones'),
  ],
)
def test_what_cannot_be_had_is_refused_by_name(build, options, message):
  with pytest.raises((ModelError, ValueError), match=message):
    tff_partial.from_keras(build, **{'loss': 'mse', **options})


def test_a_model_in_place_of_its_builder_is_refused():
  with pytest.raises(ModelError, match='Pass a callable that makes'):
    tff_partial.from_keras(ratings(keras), loss='mse')


def test_layers_from_outside_the_builder_are_refused():
  outside = keras.layers.Dense(1)
  outside.build([None, 4])
  with pytest.raises(ModelError, match='exist before the model is built'):
    tff_partial.from_keras(
      lambda: keras.Sequential([keras.Input([4]), outside]), loss='mse'
    )


def test_another_backend_is_refused(monkeypatch):
  monkeypatch.setattr(keras.backend, 'backend', lambda: 'jax')
  with pytest.raises(ModelError, match='KERAS_BACKEND=tensorflow'):
    partial(ratings, keras)


# ---- adapters ----------------------------------------------------------------


def lora_of_keras(of):
  """Keras 3's own adapters, of which its names say what is local."""
  model = ratings(of)
  for layer in model.layers:
    if layer.name in ('items', 'dense'):
      layer.enable_lora(2)
  return model


def test_keras_enables_adapters_of_its_own():
  model = partial(lora_of_keras, keras, local='.*/lora_[a-z]+_b')
  assert set(model.specs(tiers.LOCAL)) == {
    'items/lora_embeddings_b',
    'dense/lora_kernel_b',
  }
  assert set(model.frozen_weights()) == {'items/embeddings', 'dense/kernel'}
  assert {'items/lora_embeddings_a', 'dense/lora_kernel_a'} < set(
    model.specs(tiers.GLOBAL)
  )
  # It begins as the model without.
  whole = partial(ratings, keras, local=None, initial_weights=None)
  base = model.frozen_weights()
  own = {n: v for n, v in named(model).items() if 'lora' not in n}
  given = {**own, **base}
  x = np.arange(9)
  np.testing.assert_allclose(
    model.to_keras(named(model))(x), whole.to_keras(given)(x), atol=1e-6
  )
  process = tff_partial.algorithms.build_fed_per(model)
  with tff_partial.runtimes.cohort(jit=False):
    trained = tff_partial.train(
      process, clients(model), rounds=2, clients_per_round=4
    )
  for name, value in base.items():
    np.testing.assert_array_equal(trained.weights.non_trainable[name], value)


def test_adapters_of_a_keras_3_model_are_merged(tmp_path):
  backbone = keras.Sequential(
    [keras.Input([], dtype='int32'), keras.layers.Embedding(9, 4, name='items')]
  )
  backbone.save(tmp_path / 'items.keras')
  whole = partial(
    ratings, keras, local=None, initial_weights=tmp_path / 'items.keras'
  )
  model = tff_partial.add_lora(whole, 2, where='items', b='local')
  base = model.frozen_weights()['items/embeddings']
  np.testing.assert_array_equal(base, backbone.weights[0])
  weights = named(model)
  weights['lora_b/items/embeddings'] += 1.0
  found = model.to_keras(weights).get_layer('items').weights[0]
  added = np.sum(weights['lora_a/items/embeddings'], 1, keepdims=True)
  np.testing.assert_allclose(found, base + added, atol=1e-5)


def test_a_backbone_of_keras_hub_gives_its_values():
  hub = pytest.importorskip('keras_hub')

  def backbone():
    return hub.models.BertBackbone(30, 1, 2, 8, 16, max_sequence_length=6)

  def build():
    ids = keras.Input([6], dtype='int32')
    inputs = {
      'token_ids': ids,
      'segment_ids': keras.ops.zeros_like(ids),
      'padding_mask': keras.ops.ones_like(ids),
    }
    read = backbone()(inputs)['pooled_output']
    return keras.Model(ids, keras.layers.Dense(2, name='head')(read))

  trained = backbone()
  whole = tff_partial.from_keras(build, loss='mse', initial_weights=trained)
  assert len(whole.given_values) == len(trained.weights)
  model = tff_partial.add_lora(
    whole, 2, where='.*(query|value)/kernel', b='local', train='head'
  )
  assert len(model.specs(tiers.LOCAL)) == 2
