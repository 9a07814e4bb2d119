"""Which variables are local, and which are those of sub-populations."""

import re
import types

import pytest
import tensorflow as tf

from tests.support import kinds
from tff_partial import tiers
from tff_partial.model import keras_3
from tff_partial.model import keras_models
from tff_partial.model import selectors
from tff_partial.model.keras_variables import ModelError

layers = tf.keras.layers
_MSE = tf.keras.losses.MeanSquaredError()
_SPARSE = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _three() -> tf.keras.Model:
  """Layers `a`, `b` and `b2`, the last two inside `both`."""
  both = tf.keras.Sequential(
    [layers.Dense(3, name='b'), layers.Dense(3, name='b2')], name='both'
  )
  inputs = tf.keras.Input([4])
  hidden = both(layers.Dense(3, name='a')(inputs))
  return tf.keras.Model(inputs, layers.Dense(2, name='c')(hidden))


_OF_B = {'b/kernel', 'b/bias'}


_OF_BOTH = {'b/kernel', 'b/bias', 'b2/kernel', 'b2/bias'}


@pytest.mark.parametrize(
  ('selector', 'names'),
  [
    (None, set()),
    ('b', _OF_B),  # A layer's whole name, though others begin with it.
    ('both', _OF_BOTH),
    (['b', 'b2'], _OF_BOTH),
    (('b', 'a/bias'), {*_OF_B, 'a/bias'}),
    ('b.*', _OF_BOTH),
    (re.compile('b2?'), _OF_BOTH),
    ('.*/bias', {'a/bias', 'b/bias', 'b2/bias', 'c/bias'}),
    ('b/kernel', {'b/kernel'}),
    (layers.Dense(1, name='b'), _OF_B),
    (lambda variable: variable.shape == (3,), {'a/bias', 'b/bias', 'b2/bias'}),
    (lambda variable: 'both' in variable.layers, _OF_BOTH),
  ],
)
def test_the_local_part_is_named_in_many_ways(selector, names):
  model = keras_models.from_keras(_three, loss=_MSE, local=selector)
  assert {v.name for v in model.trainable(tiers.LOCAL)} == names
  assert {v.name for v in model.trainable(tiers.GLOBAL)} == {
    v.name for v in model.variables
  } - names


def test_a_layer_of_keras_3_stands_for_its_name(monkeypatch):
  class Layer:
    name = 'b'

    def __call__(self, variable):
      raise ValueError('Only input tensors may be passed.')

  keras = types.SimpleNamespace(layers=types.SimpleNamespace(Layer=Layer))
  spec = keras_models.from_keras(_three, loss=_MSE).spec
  monkeypatch.setattr(keras_3, 'module', lambda: keras)
  tier_of = selectors.assign_tiers(spec, {tiers.LOCAL: Layer()})
  assert {n for n, t in tier_of.items() if t == tiers.LOCAL} == _OF_B


@pytest.mark.slow
def test_groups_are_named_like_the_local_part():
  model = keras_models.from_keras(
    _three, loss=_MSE, local='a', group='both', num_groups=3
  )
  assert model.tiers == (tiers.GLOBAL, tiers.GROUP, tiers.LOCAL)
  assert {v.name for v in model.trainable(tiers.GROUP)} == _OF_BOTH
  # The server has three copies, each drawn by itself.
  for name, spec in model.specs(tiers.GROUP).items():
    at_server = model.specs_at_server(tiers.GROUP)[name]
    assert at_server.shape == [3, *spec.shape]
  drawn = model.initial_weights_at_server(tiers.GROUP, [1, 2])
  kernel = drawn[next(name for name in _OF_BOTH if 'kernel' in name)].numpy()
  assert len({copy.tobytes() for copy in kernel}) == 3


@pytest.mark.parametrize(
  'options', [{'group': 'both'}, {'num_groups': 3}], ids=['which', 'how many']
)
def test_groups_need_variables_and_a_number(options):
  with pytest.raises(
    ModelError, match='need both variables of their own and a number'
  ):
    keras_models.from_keras(_three, loss=_MSE, **options)


@pytest.mark.parametrize(
  ('build', 'selectors', 'message'),
  [
    (
      _three,
      {'local': 'user'},
      r"local='user' matches no variable. The model has the layers .*'both'.* "
      r"with the variables .*'a/kernel'",
    ),
    (
      _three,
      {'local': 'bot'},
      r"Whole names are matched: where 'bot' is a part of one, write '\.\*bot",
    ),
    (_three, {'local': ['a', 'x.*']}, r"local='x\.\*' matches no variable"),
    (_three, {'local': lambda variable: False}, 'matches no variable'),
    (
      _three,
      {'local': '.*'},
      r"local='\.\*' matches every trainable variable, so that nothing would "
      'be learned together. Name fewer layers',
    ),
    (
      _three,
      {'local': 'both', 'group': ['a', 'b']},
      "Variable 'b/kernel' is selected for two tiers: group and local",
    ),
    (
      _three,
      {'local': 'a('},
      r"local='a\(' is not a regular expression: missing \), .*position 1",
    ),
    (_three, {'num_groups': '2'}, "num_groups: expected a whole .* found '2'"),
    (_three, {'initial_weights': {'a': 1}}, 'a Keras model or .* found a dict'),
    (
      _three,
      {'local': layers.Dense},
      'local=Dense is a class. Name the layers, or pass a predicate',
    ),
    (
      _three,
      {'local': layers.Dense(3, name='dense_7')},
      "got its name 'dense_7' by counting all layers of this program, .*Name "
      'it there',
    ),
    (
      kinds.frozen,
      {'local': 'body'},
      r"local='body' matches only variables that are not trainable: "
      r"\['body/kernel', 'body/bias'\]. Make them trainable, or leave",
    ),
    (
      kinds.tied,
      {'local': 'words'},
      r"local=\['words'\]: variable 'words/embeddings' is also used by "
      r"\['scores'\]. A variable belongs to one tier: select all of its "
      'layers, or give each a variable of its own',
    ),
  ],
)
def test_selectors_that_cannot_be_meant_are_refused(build, selectors, message):
  loss = _SPARSE if build is kinds.tied else _MSE
  with pytest.raises(ModelError, match=message):
    keras_models.from_keras(build, loss=loss, **selectors)


def test_a_tied_variable_is_local_if_all_of_its_layers_are():
  for selector in (['words', 'scores'], 'words/embeddings'):
    model = keras_models.from_keras(kinds.tied, loss=_SPARSE, local=selector)
    assert {v.name for v in model.trainable(tiers.LOCAL)} == {
      'words/embeddings'
    }
