"""Keras models of each kind, which several tests build."""

import numpy as np
import tensorflow as tf

layers = tf.keras.layers


def functional() -> tf.keras.Model:
  inputs = tf.keras.Input([4])
  hidden = layers.Dense(3, 'tanh', kernel_regularizer='l2')(inputs)
  outputs = layers.Dense(2, name='head', bias_regularizer='l1')(hidden)
  return tf.keras.Model(inputs, outputs)


def sequential() -> tf.keras.Model:
  return tf.keras.Sequential(
    [
      tf.keras.Input([4]),
      layers.Dense(3, 'relu'),
      layers.Dropout(0.5),
      layers.Dense(2, name='head'),
    ]
  )


def without_inputs() -> tf.keras.Model:
  """Has variables only once it was called, and an optimizer before that."""
  model = tf.keras.Sequential(
    [layers.Dense(3, 'relu'), layers.Dense(2, name='head')]
  )
  model.compile('adam', 'mse', metrics=['mae'])
  return model


class Subclassed(tf.keras.Model):
  """Creates variables in three ways, and not in the order of their use."""

  def __init__(self):
    super().__init__()
    self.scale = tf.Variable([1.0, 2.0, 3.0], name='scale')
    self.head = layers.Dense(2, name='head')
    self.body = layers.Dense(3, 'tanh')

  def build(self, _):
    self.shift = self.add_weight('shift', [3], initializer='random_normal')
    self.built = True

  def call(self, inputs):
    self.add_loss(0.1 * tf.reduce_sum(self.scale**2))
    return self.head(self.body(inputs) * self.scale + self.shift)


def nested() -> tf.keras.Model:
  inner = tf.keras.Sequential(
    [layers.Dense(3, 'tanh', kernel_regularizer='l2'), layers.Dense(3)],
    name='inner',
  )
  inputs = tf.keras.Input([4])
  return tf.keras.Model(inputs, layers.Dense(2, name='head')(inner(inputs)))


def two_inputs(as_dict: bool) -> tf.keras.Model:
  word = tf.keras.Input([2], name='word', dtype=tf.int32)
  traits = tf.keras.Input([4], name='traits')
  embedded = layers.Flatten()(layers.Embedding(7, 3, name='words')(word))
  outputs = layers.Dense(2, name='head')(
    layers.Concatenate()([embedded, traits])
  )
  # Not in alphabetical order.
  inputs = {'word': word, 'traits': traits} if as_dict else [word, traits]
  return tf.keras.Model(inputs, outputs)


def sequences() -> tf.keras.Model:
  """Predicts the next word at each place, and nothing where there is none."""
  return tf.keras.Sequential(
    [
      tf.keras.Input([5], dtype=tf.int32),
      layers.Embedding(11, 4, mask_zero=True, name='words'),
      layers.LSTM(3, return_sequences=True, dropout=0.2),
      layers.Dense(11, name='head'),
    ]
  )


def frozen() -> tf.keras.Model:
  """Some of its layers are never trained, a batch normalization among them."""
  model = tf.keras.Sequential(
    [
      tf.keras.Input([4]),
      layers.Dense(3, 'tanh', name='body'),
      layers.BatchNormalization(trainable=False, name='norm'),
      layers.Dense(3, name='middle'),
      layers.Dense(2, name='head'),
    ]
  )
  model.get_layer('body').trainable = False
  return model


class _Transposed(layers.Layer):
  """Reads the table of an embedding backward: scores of all words."""

  def __init__(self, table, **options):
    super().__init__(**options)
    self.table = table

  def call(self, inputs):
    return tf.matmul(inputs, self.table, transpose_b=True)


def tied() -> tf.keras.Model:
  """One layer is called twice, and one variable is used by two layers."""
  word = tf.keras.Input([], dtype=tf.int32)
  embedding = layers.Embedding(7, 3, name='words')
  twice = layers.Dense(3, 'tanh', name='twice')
  hidden = twice(twice(embedding(word)))
  scores = _Transposed(embedding.embeddings, name='scores')(hidden)
  return tf.keras.Model(word, scores)


def mixed() -> tf.keras.Model:
  """Weights of two types."""
  return tf.keras.Sequential(
    [
      tf.keras.Input([4]),
      layers.Dense(3, 'tanh', dtype='float64', kernel_regularizer='l2'),
      layers.Dense(2, name='head'),
    ]
  )


class _Scale(layers.Layer):
  """A layer with a variable that is a single number."""

  def build(self, _):
    self.factor = self.add_weight('factor', [], initializer='ones')

  def call(self, inputs):
    return self.factor * tf.reduce_sum(inputs, -1)


def scalar() -> tf.keras.Model:
  """A prediction is a number, without an axis for itself."""
  inputs = tf.keras.Input([4])
  return tf.keras.Model(inputs, _Scale(name='head')(layers.Dense(3)(inputs)))


TABLE = np.random.default_rng(7).normal(size=[7, 3]).astype('f')


_ADAPTED = layers.Normalization()
_ADAPTED.adapt(np.random.default_rng(8).normal(2.0, 3.0, [9, 3]))


_SCALES = tf.constant(np.linspace(0.5, 2.0, 3), tf.float32)


class _Bare(layers.Layer):
  """Makes variables without `add_weight`, and reads a constant."""

  def __init__(self, **options):
    super().__init__(**options)
    self.factor = tf.Variable(tf.ones([3]) * 0.5, name='factor')
    # Not the types that these variables have.
    self.scale = tf.Variable(np.array([0.1]), dtype=tf.float32, name='scale')
    self.set = self.add_weight('set', [], initializer='zeros')
    with tf.init_scope():
      self.set.assign(3.0)
    self.shifts = {'one': [tf.Variable(0.25)]}

  def call(self, inputs):
    shift = self.shifts['one'][0]
    inputs = inputs * self.factor * _SCALES + self.scale * self.set
    return inputs + shift.read_value() + shift.value()


def given_values() -> tf.keras.Model:
  """Has values of its own: of normalization, of tables, of variables."""
  word = tf.keras.Input([], dtype=tf.int32, name='word')
  traits = tf.keras.Input([3], name='traits')
  table = layers.Embedding(7, 3, weights=[TABLE], name='words')
  fixed = layers.Embedding(
    7, 3, weights=[2 * TABLE], trainable=False, name='fixed'
  )
  normalized = layers.Normalization(
    mean=_ADAPTED.mean, variance=_ADAPTED.variance
  )(traits)
  hidden = _Bare(name='bare')(table(word) + fixed(word) + normalized)
  return tf.keras.Model([word, traits], layers.Dense(2, name='head')(hidden))


def two_outputs() -> tf.keras.Model:
  inputs = tf.keras.Input([4])
  head, b = layers.Dense(2, name='head'), layers.Dense(1)
  return tf.keras.Model(inputs, {'head': head(inputs), 'b': b(inputs)})


def loss_of_two(labels, predictions):
  one = tf.reduce_sum((labels - predictions['head']) ** 2, -1)
  return one + tf.abs(predictions['b'][:, 0])


def one() -> tf.keras.Model:
  return tf.keras.Sequential(
    [tf.keras.Input([1]), layers.Dense(1, name='a'), layers.Dense(1, name='b')]
  )
