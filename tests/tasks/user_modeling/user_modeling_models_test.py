"""User models: their predictions by hand, that they learn, and their tiers."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tasks.errors import OptionError
from tasks.user_modeling import models
import tff_partial
from tff_partial import tiers

_SIZES = models.InputSizes(users=4, items=5, attributes=3, attributes_width=2)
# The last item has no attribute; the one before it has the same one twice.
_INPUTS = {
  models.USER: np.array([0, 3, 1, 2], np.int32),
  models.ITEM: np.array([1, 2, 4, 0], np.int32),
  models.ATTRIBUTES: np.array([[0, 2], [1, -1], [1, 1], [-1, -1]], np.int32),
}
_MULTI_HOT = np.array([[1, 0, 1], [0, 1, 0], [0, 1, 0], [0, 0, 0]], np.float32)
_BUILDERS = {
  'gum': models.build_gum,
  'gum with biases': lambda *args: models.build_gum(*args, biases=True),
  'ncd': lambda *args: models.build_ncd(*args, hidden=(6, 4)),
  'ncf': lambda *args: models.build_ncf(*args, factors=2),
  'bias': models.build_bias,
}


def _filled(
  model: tf.keras.Model, deviation: float = 1.0
) -> dict[str, np.ndarray]:
  """Draws all weights anew, and returns them by their names."""
  random = np.random.default_rng(0)
  weights = {}
  for variable in model.trainable_variables:
    value = random.normal(0.0, deviation, variable.shape).astype(np.float32)
    variable.assign(value)
    weights[variable.name.removesuffix(':0')] = value
  return weights


def _set(model: tf.keras.Model, **values: Any) -> None:
  """Gives layers their values, by the layers' names."""
  for name, value in values.items():
    model.get_layer(name).set_weights([np.asarray(value, np.float32)])


# Of each example: user, item, multi-hot attributes.
_EXAMPLES = list(
  zip(_INPUTS[models.USER], _INPUTS[models.ITEM], _MULTI_HOT, strict=True)
)


def _sigmoid(x: Any) -> Any:
  return 1 / (1 + np.exp(-x))


# ---- GUM ---------------------------------------------------------------------


def test_gum_as_in_a_loop():
  model = models.build_gum(_SIZES, biases=True, biases_in_attributes=True)
  weights = _filled(model)
  found = model(_INPUTS).numpy()
  assert found.shape == (4, 1)
  for place, (user, item, attributes) in enumerate(_EXAMPLES):
    emb_c = attributes @ weights['relation/kernel']
    of_user, of_item = (
      (weights[f'{whose}/embeddings'][row] * emb_c)
      @ weights[f'knowledge_{whose}/kernel']
      for whose, row in (('user', user), ('item', item))
    )
    score = (of_user - of_item) @ weights['hidden/kernel']
    score += weights['user_bias/embeddings'][user]
    score += weights['item_bias/embeddings'][item]
    score += attributes @ weights['attribute_bias/kernel']
    score += attributes @ weights['user_attribute_bias/embeddings'][user]
    score += weights['common_bias/bias']
    np.testing.assert_allclose(found[place], _sigmoid(score), rtol=1e-5)


def test_gum_begins_by_xavier():
  tf.keras.utils.set_random_seed(0)  # Five values may all be small by chance.
  model = models.build_gum(models.InputSizes(300, 200, 40, 3))
  for variable in model.trainable_variables:
    limit = np.sqrt(6 / sum(variable.shape))
    values = variable.numpy()
    assert 0.5 * limit < np.abs(values).max() <= limit, variable.name
  assert model.get_layer('knowledge_user').kernel.shape == (40, 5)
  model = models.build('gum', _SIZES, identity_relation=True)
  np.testing.assert_array_equal(model.get_layer('relation').kernel, np.eye(3))


@pytest.mark.parametrize(
  ('given', 'expected'),
  [
    ({'biases': True}, '--biases: the model ncd'),
    ({'identity_relation': True}, 'identity_relation=true: .* ncd has no RM'),
  ],
)
def test_what_only_gum_has_is_refused(given, expected):
  with pytest.raises(OptionError, match=expected):
    models.build('ncd', _SIZES, **given)


def test_what_models_say_of_users_and_attributes():
  gum = models.build_gum(_SIZES)
  weights = _filled(gum)
  found = models.hidden_characteristics(gum)
  assert found.shape == (4, 3)
  strengths = weights['knowledge_user/kernel'] @ weights['hidden/kernel']
  expected = weights['user/embeddings'] * strengths[:, 0]
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  shapes = {name: x.shape for name, x in models.knowledge(gum).items()}
  assert shapes == {
    'knowledge_user/kernel': (3, 5),
    'knowledge_item/kernel': (3, 5),
    'relation/kernel': (3, 3),
  }
  assert models.biases_in_attributes(gum) == 0.0
  biased = models.build_gum(_SIZES, biases=True, biases_in_attributes=True)
  weights = _filled(biased)
  found = models.biases_in_attributes(biased)
  expected = weights['user_attribute_bias/embeddings']
  np.testing.assert_allclose(found, expected, rtol=1e-6)
  ncd = models.build_ncd(_SIZES)
  weights = _filled(ncd)
  found = models.hidden_characteristics(ncd)
  expected = _sigmoid(weights['user/embeddings'])
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  assert not models.knowledge(ncd)
  assert models.hidden_characteristics(models.build_ncf(_SIZES)) is None
  assert models.hidden_characteristics(models.build_bias(_SIZES)) is None


# ---- the other models --------------------------------------------------------


def test_ncd_as_in_a_loop():
  model = models.build_ncd(_SIZES, hidden=(6, 4))
  weights = _filled(model)
  found = model(_INPUTS)
  for place, (user, item, attributes) in enumerate(_EXAMPLES):
    rows = {'user': user, 'item': item, 'item_discrimination': item}
    mastery, difficulty, discrimination = (
      _sigmoid(weights[f'{name}/embeddings'][row]) for name, row in rows.items()
    )
    x = attributes * (mastery - difficulty) * discrimination
    layers = {'interaction_1': np.tanh, 'interaction_2': np.tanh}
    for layer, activation in {**layers, 'score': _sigmoid}.items():
      kernel = np.abs(weights[f'{layer}/kernel'])
      x = activation(x @ kernel + weights[f'{layer}/bias'])
    np.testing.assert_allclose(found[place], x, rtol=1e-5)


def test_in_ncd_mastery_never_harms():
  model = models.build_ncd(_SIZES, hidden=(6, 4))
  weights = _filled(model)
  before = model(_INPUTS).numpy()
  _set(model, user=weights['user/embeddings'] + 1.0)
  after = model(_INPUTS).numpy()
  # What an item without attributes asks for is known to all.
  assert (after[:3] > before[:3]).all()
  assert after[3] == before[3]


def test_ncf_as_in_a_loop():
  model = models.build_ncf(_SIZES, models.RATINGS, factors=2)
  weights = _filled(model)
  found = model(_INPUTS)
  for place, (user, item, _) in enumerate(_EXAMPLES):
    rows = {'user': user, 'item': item, 'user_tower': user, 'item_tower': item}
    vectors = {
      name: weights[f'{name}/embeddings'][row] for name, row in rows.items()
    }
    x = np.concatenate([vectors['user_tower'], vectors['item_tower']])
    for layer, size in (('tower_1', 8), ('tower_2', 4), ('tower_3', 2)):
      x = x @ weights[f'{layer}/kernel'] + weights[f'{layer}/bias']
      x = np.maximum(x, 0)
      assert x.shape == (size,)
    x = np.concatenate([vectors['user'] * vectors['item'], x])
    score = x @ weights['score/kernel'] + weights['score/bias']
    np.testing.assert_allclose(found[place], 1 + 4 * _sigmoid(score), rtol=1e-5)


def test_biases_are_added():
  scale = models.AnswerScale(1.0, 5.0, is_linear=True)
  model = models.build_bias(_SIZES, scale)
  _set(
    model,
    user_bias=[[0.1], [0.2], [0.3], [0.4]],
    item_bias=[[1.0], [2.0], [3.0], [4.0], [5.0]],
    common_bias=-1.0,
  )
  # 3 is the middle of the scale.
  expected = [3 + 0.1 + 2 - 1, 3 + 0.4 + 3 - 1, 3 + 0.2 + 5 - 1, 3 + 0.3]
  np.testing.assert_allclose(model(_INPUTS)[:, 0], expected, rtol=1e-6)


# ---- all models --------------------------------------------------------------


def test_attributes_become_multi_hot():
  found = models.multi_hot(tf.constant(_INPUTS[models.ATTRIBUTES]), 3)
  np.testing.assert_array_equal(found, _MULTI_HOT)


@pytest.mark.slow
@pytest.mark.parametrize('name', _BUILDERS)
def test_models_learn(name):
  model = _BUILDERS[name](_SIZES, models.RATINGS)
  _filled(model, 0.3)
  random = np.random.default_rng(2)
  users, items = random.integers(4, size=60), random.integers(5, size=60)
  inputs = {
    models.USER: users.astype(np.int32),
    models.ITEM: items.astype(np.int32),
    models.ATTRIBUTES: np.stack([items % 3, np.full(60, -1)], -1),
  }
  # Users differ, and so do items.
  ratings = np.clip(1.0 + users + 0.5 * items, 1.0, 5.0)[:, None]
  model.compile(tf.keras.optimizers.Adam(0.1), 'mse')
  history = model.fit(
    inputs, ratings, batch_size=20, epochs=15, shuffle=False, verbose=0
  )
  losses = history.history['loss']
  assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize('name', _BUILDERS)
def test_tables_stay_with_clients(name):
  own = [*models.USER_LAYERS, *models.ITEM_LAYERS]
  partial = tff_partial.from_keras(
    lambda: _BUILDERS[name](_SIZES),
    local=own,
    client_sized=own,
    loss=tf.keras.losses.MeanSquaredError(),
  )
  local = partial.specs(tiers.LOCAL)
  assert all(variable.endswith('/embeddings') for variable in local)
  keras_names = {v.name for v in _BUILDERS[name](_SIZES).variables}
  tables = {v.removesuffix(':0') for v in keras_names if 'embeddings' in v}
  assert set(local) == tables
  assert all(spec.shape[0] is None for spec in local.values())
  assert partial.specs(tiers.GLOBAL)
  assert set(partial.example_spec['x']) == set(_INPUTS)


@pytest.mark.parametrize('name', _BUILDERS)
def test_models_can_be_saved(name, tmp_path):
  model = _BUILDERS[name](_SIZES, models.RATINGS)
  _filled(model)
  model.save(tmp_path / 'model.keras')
  again = tf.keras.models.load_model(tmp_path / 'model.keras')
  np.testing.assert_allclose(again(_INPUTS), model(_INPUTS), rtol=1e-6)


@pytest.mark.slow
def test_models_by_their_names():
  expected = {
    models.GUM: models.build_gum(_SIZES),
    models.NCD: models.build_ncd(_SIZES),
    models.NCF: models.build_ncf(_SIZES),
    models.BIAS: models.build_bias(_SIZES),
  }
  assert tuple(expected) == models.MODELS
  for name, model in expected.items():
    built = models.build(name, _SIZES)
    shapes = {v.name: v.shape for v in model.variables}
    assert {v.name: v.shape for v in built.variables} == shapes
  with_biases = models.build(models.GUM, _SIZES, models.RATINGS, biases=True)
  _set(with_biases, user=np.zeros([4, 3]), item=np.zeros([5, 3]))
  np.testing.assert_allclose(with_biases(_INPUTS), np.full([4, 1], 3.0))
  linear = models.build(models.BIAS, _SIZES, models.AnswerScale(is_linear=True))
  _set(linear, common_bias=2.0)
  np.testing.assert_allclose(linear(_INPUTS), np.full([4, 1], 2.5))
