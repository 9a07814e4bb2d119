"""Requests of Keras for variables are answered with tensors."""

import tensorflow as tf

from tff_partial.model import keras_variables

layers = tf.keras.layers


def test_variables_are_answered_wherever_keras_asks():
  asked = []

  def creator(next_creator, **request):
    del next_creator
    asked.append(request['name'])
    return tf.zeros(request['shape'])

  def build():
    with keras_variables.answering_variables(creator):
      layers.Dense(1).build([None, 2])
      with tf.init_scope():
        layers.Dense(1, use_bias=False).build([None, 2])

  tf.function(build, autograph=False)()
  with keras_variables.answering_variables(creator):
    layers.Dense(1, use_bias=False).build([None, 2])
  assert asked == ['kernel', 'bias', 'kernel', 'kernel']
