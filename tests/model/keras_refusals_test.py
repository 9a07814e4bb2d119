"""Keras models that are no pure functions are refused, with advice."""

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from tests.support import kinds
from tests.support.stacks import dense
from tests.support.stacks import stack
from tff_partial.model import keras_models
from tff_partial.model import models

layers = tf.keras.layers
_MSE = tf.keras.losses.MeanSquaredError()
_OUTSIDE, _SHARED = tf.Variable(2.0), layers.Dense(1, name='shared')


def _stack(*inner: layers.Layer, inputs: tuple[int, ...] = (4,)):
  """A callable that builds a model of which the layers are made anew."""
  configs = [(type(layer), layer.get_config()) for layer in inner]

  def build() -> tf.keras.Model:
    made = [cls.from_config(config) for cls, config in configs]
    return tf.keras.Sequential(
      [tf.keras.Input(inputs), *made, layers.Dense(1, name='last')]
    )

  return build


def _norm_inside() -> tf.keras.Model:
  inner = tf.keras.Sequential(
    [layers.Dense(3), layers.BatchNormalization(name='norm')], name='inner'
  )
  inputs = tf.keras.Input([4])
  return tf.keras.Model(inputs, layers.Dense(1)(inner(inputs)))


class _AddsLoss(layers.Layer):
  def call(self, inputs):
    self.add_loss(tf.reduce_mean(inputs))
    return inputs


class _Draws(layers.Layer):
  """Draws with a function of TensorFlow, in the open or inside another."""

  def __init__(self, inside: bool = False, **options):
    super().__init__(**options)
    self.inside = inside

  def get_config(self):
    return {**super().get_config(), 'inside': self.inside}

  def call(self, inputs):
    draw = lambda: inputs + tf.random.uniform(tf.shape(inputs))  # noqa: E731
    return tf.function(draw)() if self.inside else draw()


class _Counts(layers.Layer):
  def build(self, _):
    self.calls = self.add_weight('calls', [], trainable=False)

  def call(self, inputs):
    self.calls.assign_add(1.0)
    return inputs


class _HiddenInitializer(tf.keras.initializers.Initializer):
  def __call__(self, shape, dtype=None, **_):
    return tf.random.normal(shape, dtype=dtype)


def _loads_weights() -> tf.keras.Model:
  model = kinds.one()
  model.get_layer('a').kernel.assign([[3.0]])
  return model


def _initialized_by(initializer) -> Callable[[], tf.keras.Model]:
  return stack(4, dense(1, kernel_initializer=initializer))


def _adapts() -> tf.keras.Model:
  layer = layers.Normalization()
  layer.adapt(np.ones([6, 4], np.float32))
  return tf.keras.Sequential([tf.keras.Input([4]), layer, layers.Dense(1)])


def _scales_at_random() -> tf.keras.Model:
  scales = np.random.default_rng().normal(size=[4]).astype(np.float32)
  inputs = tf.keras.Input([4])
  return tf.keras.Model(inputs, layers.Dense(1)(inputs * scales))


class _ReadsOutside(layers.Layer):
  def call(self, inputs):
    return inputs * _OUTSIDE


class _Calls(layers.Layer):
  """Has a weight, and does anything."""

  def __init__(self, function, **options):
    super().__init__(**options)
    self.function = function

  def get_config(self):
    return {**super().get_config(), 'function': self.function}

  def build(self, _):
    self.number = self.add_weight('number', [4])

  def call(self, inputs):
    return self.function(self, inputs)


@tf.autograph.experimental.do_not_convert
def _decides(layer, inputs):
  return inputs * layer.number if tf.reduce_all(inputs > 0) else inputs


@tf.autograph.experimental.do_not_convert
def _reads_sparsely(layer, inputs):
  return inputs * layer.number.sparse_read([0])


def _places(layer, inputs):
  """How far whole numbers are below the largest of the batch."""
  numbers = tf.cast(inputs, tf.int32)
  return tf.cast(numbers - tf.reduce_max(numbers), tf.float32)


def _within_lengths(layer, inputs):
  """Softmax over steps, of which a batch has as many as its longest example."""
  lengths = tf.cast(inputs, tf.int32)
  steps = tf.cast(tf.sequence_mask(lengths, tf.reduce_max(lengths)), tf.float32)
  return tf.reduce_sum(tf.nn.softmax(steps), -1)


class _Drawn(layers.Layer):
  """Draws a value eagerly, where nobody sees it."""

  def build(self, _):
    self.number = tf.Variable(tf.random.normal([4]), name='number')

  def call(self, inputs):
    return inputs * self.number


class _OwnTable(layers.Layer):
  """Looks words up in a table that the user made."""

  def __init__(self):
    super().__init__(name='own')
    words = tf.lookup.KeyValueTensorInitializer(['a', 'b'], [1, 2])
    self._table = tf.lookup.StaticHashTable(words, 0)

  def call(self, inputs):
    return self._table.lookup(inputs)


def _embedding(layer: Callable) -> Callable[[], tf.keras.Model]:
  """A model that numbers its inputs with a layer and embeds the numbers."""
  return lambda: tf.keras.Sequential(
    [tf.keras.Input([1], dtype=tf.string), layer(), layers.Embedding(9, 1)]
  )


def _lookup_inside() -> tf.keras.Model:
  words = layers.StringLookup(vocabulary=['a'], name='words')
  return tf.keras.Sequential([words])


def _changing(*sizes: tuple[int, ...]) -> Callable[[], tf.keras.Model]:
  """Builds another model with every call."""
  waiting = list(sizes)

  def build() -> tf.keras.Model:
    units = waiting.pop(0) if len(waiting) > 1 else waiting[0]
    return stack(4, *map(dense, units))()

  return build


@pytest.mark.parametrize(
  ('build', 'message'),
  [
    (
      _norm_inside,
      "A layer changes its variable 'norm/moving_mean' while it trains. .*"
      'Or use .*GroupNormalization',
    ),
    (
      _stack(_Counts(name='counts')),
      "A layer changes its variable 'counts/calls'",
    ),
    (
      _stack(layers.Dense(2, activity_regularizer='l2', name='active')),
      "Layer 'active' has an activity regularizer, whose value would depend on "
      'padded examples. Regularize its weights instead',
    ),
    (
      _stack(_AddsLoss()),
      'A loss that a layer adds with `add_loss` depends on its inputs, .* Add '
      'losses of weights only, or compute the term in the loss function',
    ),
    (
      _stack(_Draws(name='noise')),
      r"The operation '.*noise/.*' \(RandomUniform\) draws random numbers from "
      "hidden state, .* Use Keras's own initializers and random layers",
    ),
    (
      _stack(_Calls(lambda _, x: tf.math.l2_normalize(x), name='unit')),
      r"The model: the operation '.*unit/.*' \(Sum\) computes with all "
      'examples of a batch, and so with padded ones. Leave the first axis as '
      'it is',
    ),
    (
      _stack(_Calls(lambda _, x: tf.nn.softmax(x, 0), name='shares')),
      r"operation '.*shares/.*' \(Softmax\) computes with all examples",
    ),
    (
      _stack(_Calls(_places, name='place')),
      r"operation '.*place/.*' \(Max\) computes with all examples",
    ),
    (
      _stack(_Calls(lambda _, x: tf.where(tf.reduce_any(x > 1), x, 0))),
      r' \(Any\) computes with all examples',
    ),
    (_stack(_Draws(inside=True)), r'\(RandomUniform\) draws random numbers'),
    (
      _initialized_by(_HiddenInitializer()),
      r'\(RandomStandardNormal\) draws random numbers',
    ),
    (
      _stack(layers.Dense(2, kernel_constraint='non_neg', name='positive')),
      "'positive/kernel' has a constraint, which would not be applied.*"
      'Use a regularizer',
    ),
    (
      _stack(layers.RandomFlip(name='flip'), inputs=(4, 4, 1)),
      r"Layer 'flip' \(RandomFlip\) keeps a random generator, .* augment "
      'examples before you pack them',
    ),
    (
      _stack(layers.Dense(3, dtype='bfloat16', name='half')),
      "Layer 'half' has weights of bfloat16, .* Use the dtype policy mixed_",
    ),
    (
      _loads_weights,
      'changes a variable while the model is built. Give trained values with '
      '`initial_weights` instead of loading them in the builder',
    ),
    (lambda: kinds.one().get_weights(), 'have no values .*Give trained'),
    (
      stack(4, lambda: _SHARED),
      r"The variables \['kernel:0', 'bias:0'\] exist before the "
      'model is built. Create every layer inside the callable',
    ),
    (
      lambda: tf.keras.Sequential([layers.Dense(1)]),
      "Model 'sequential.*' does not say what its inputs are. Pass "
      '`inputs=tf.TensorSpec',
    ),
    (lambda: 'model', 'must return a `tf.keras.Model`, it returned str'),
    (
      kinds.one(),
      'Pass a callable that makes the Keras model, not the model.*pass it as '
      '`initial_weights` besides.*clone_model',
    ),
    (
      _stack(layers.SpectralNormalization(layers.Dense(3), name='spectral')),
      r"Layer 'spectral' \(SpectralNormalization\) changes its weights while "
      'it trains.*orthogonal_regularizer',
    ),
    (
      _stack(layers.ReLU(), layers.Normalization(name='norm')),
      r"Layer 'norm' waits for `adapt`, .*Normalization\(mean=adapted.mean,",
    ),
    (_adapts, r'A layer waits for `adapt`, which cannot be called while a'),
    (
      lambda: tf.keras.Sequential(
        [tf.keras.Input([4, None, 3]), layers.Dense(2)]
      ),
      r'An input has the shape \[4, None, 3\], but examples are packed in '
      r'arrays of one shape, except for the first axis\. Say how long they are',
    ),
    (
      _stack(_ReadsOutside()),
      'reads a variable or a table that is none of its own. Make it inside',
    ),
    (
      _stack(_Calls(_decides)),
      'The model cannot be traced: .*Decide with `tf.where`',
    ),
    (
      _stack(_Calls(_reads_sparsely)),
      'can be called with its variables, but not with tensors in their place: '
      '.*sparse_read.* Make weights with `self.add_weight`, and do no more in',
    ),
    (
      _stack(_Drawn()),
      "Variable '.*number' begins with another value each time that the model "
      'is built. Make it with `self.add_weight',
    ),
    (
      _scales_at_random,
      'has an array of other numbers each time that it is built. Draw it outs',
    ),
    (stack(4, layers.Flatten), 'The model has no trainable variable'),
    *(
      (
        _embedding(layer),
        f'Layer {name} looks its inputs up in a table, which a pure function '
        'cannot hold. Let it stand first, .*; or map strings to integers '
        'before you pack .*Vocabulary.*, or use `tf.keras.layers.Hashing`',
      )
      for layer, name in (
        (_lookup_inside, r"'words' \(StringLookup\)"),
        (_OwnTable, r"'own' \(_OwnTable\)"),
      )
    ),
    (
      _changing((3, 2), (4, 2)),
      r"asks for a variable .* of shape \(4, 4\) where it had 'dense/kernel' "
      r'of shape \(4, 3\) before. The callable given to `from_keras` must '
      'build the same model every time',
    ),
    (
      _changing((3, 2), (3,)),
      r"no longer asks for the variables \['dense_1/kernel', 'dense_1/bias'\]",
    ),
    (
      _changing((3, 2), (3, 2, 2)),
      r'asks for the variables .*which it had not before',
    ),
  ],
)
def test_models_that_are_no_pure_functions_are_refused(build, message):
  if build is not _SHARED and not _SHARED.built:
    _SHARED.build([None, 4])
  with pytest.raises(models.ModelError, match=message):
    keras_models.from_keras(build, loss=_MSE)


def test_the_length_of_the_longest_example_is_no_value_of_it():
  keras_models.from_keras(_stack(_Calls(_within_lengths)), loss=_MSE)


@pytest.mark.parametrize(
  'given', [{'weights': True}, {'labels': tf.int32}, {'inputs': [4]}]
)
def test_a_spec_that_is_none_is_refused(given):
  (name,) = given
  with pytest.raises(models.ModelError, match=f'{name}=.*such as `{name}=tf'):
    keras_models.from_keras(kinds.functional, loss=_MSE, **given)


def test_a_seed_that_is_no_whole_number_is_refused():
  with pytest.raises(models.ModelError, match='seed: expected a whole .* None'):
    keras_models.from_keras(kinds.functional, loss=_MSE, seed=None)


def test_hashing_needs_no_table():
  model = keras_models.from_keras(
    _embedding(lambda: layers.Hashing(9)), loss=_MSE
  )
  assert model.example_spec['x'] == tf.TensorSpec([1], tf.string)
