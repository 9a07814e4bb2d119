"""Class weights count in the loss as Keras's `fit(class_weight=)` has them."""

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.stacks import dense
from tests.support.stacks import stack
import tff_partial
from tff_partial.data import examples
from tff_partial.model import losses
from tff_partial.model.keras_variables import ModelError

_WEIGHTS = {0: 1.0, 1: 5.0, 2: 0.5}
_CLASSES = np.array([2, 0, 1, 1], np.int32)
_LOGITS = np.array(
  [[0.1, 0.2, 0.3], [1.0, 0.0, -1.0], [0.0, 0.5, 0.0], [2.0, 0.0, 0.0]],
  np.float32,
)


_build = stack(2, dense(3, name='head'))


def _model(loss: Any, **options: Any) -> tff_partial.PartialModel:
  options = {'class_weight': _WEIGHTS, **options}
  return tff_partial.from_keras(_build, loss=loss, **options)


def _cross_entropies() -> np.ndarray:
  """The cross-entropies by hand: minus the log of the share of the class."""
  shares = np.exp(_LOGITS) / np.exp(_LOGITS).sum(axis=-1, keepdims=True)
  return -np.log(shares[np.arange(4), _CLASSES])


@pytest.mark.parametrize(
  ('loss', 'labels'),
  [
    (tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), _CLASSES),
    (
      tf.keras.losses.CategoricalCrossentropy(from_logits=True),
      np.eye(3, dtype=np.float32)[_CLASSES],
    ),
  ],
)
def test_the_loss_is_weighted_by_class(loss, labels):
  model = _model(loss)
  own = tf.constant([1.0, 2.0, 1.0, 1.0])
  is_real = tf.constant([True, True, True, False])
  found = model.loss(labels, tf.constant(_LOGITS), own, is_real)
  # The classes 2, 0 and 1; the second example counts twice; the last is none.
  by_hand = _cross_entropies()[:3] @ [0.5, 1.0 * 2.0, 5.0]
  np.testing.assert_allclose(found.total, by_hand, rtol=1e-6)
  np.testing.assert_allclose(found.objective, by_hand / 3, rtol=1e-6)
  assert found.num_elements == 3


@pytest.mark.parametrize('shape', [[], [1]])
@pytest.mark.parametrize('outputs', [[], [1]])
def test_one_number_stands_for_two_classes(shape, outputs):
  weights = losses.ClassWeights(
    {0: 1.0, 1: 5.0},
    tf.TensorSpec(shape, tf.float32),
    tf.TensorSpec(outputs, tf.float32),
  )
  # The last is a share, as of smoothed labels.
  labels = tf.reshape(tf.constant([0.0, 1.0, 0.9]), [3, *shape])
  assert weights.of(labels, 1).numpy().tolist() == [1.0, 5.0, 5.0]


def test_steps_of_a_sequence_count_by_their_own_class():
  weights = losses.ClassWeights(
    _WEIGHTS, tf.TensorSpec([2], tf.int32), tf.TensorSpec([2, 3], tf.float32)
  )
  found = weights.of(tf.constant([[0, 1], [2, -1]]), 2)
  # What the loss ignores, here -1, has any weight.
  assert found.numpy().tolist() == [[1.0, 5.0], [0.5, 1.0]]


def test_metrics_do_not_know_of_it_and_the_model_says_it():
  loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  model = _model(loss, metrics=['sparse_categorical_accuracy'])
  state = model.metrics.update(
    model.metrics.initial_state(), _CLASSES, tf.constant(_LOGITS), tf.ones([4])
  )
  ((right, measured),) = state.values()
  assert (right, measured) == (3.0, 4.0)  # All but the last.
  assert 'class weights [1.0, 5.0, 0.5]' in repr(model).splitlines()[0]


def test_labels_without_a_weight_are_refused_when_packed():
  model = tff_partial.from_keras(
    stack(2, dense(1, 'sigmoid')), loss='mse', class_weight={0: 1.0, 1: 5.0}
  )
  fields = {'x': np.zeros([2, 2]), 'y': np.array([1.0, 2.0])}
  with pytest.raises(
    examples.ClientDataError, match='is .*2.*there are 2 class weights'
  ):
    tff_partial.pack({'ann': fields}, model.example_spec)


@pytest.mark.parametrize(
  ('given', 'expected'),
  [
    ({0: 1.0, 1: 5.0}, r'classes \[0, 1\], but the model predicts 3'),
    ({0: 1, 1: 5, 2: 1, 7: 1}, r'classes \[0, 1, 2, 7\]'),
    ({0: 1, 1: 5, 2: -1}, 'class 2: expected .* 0 or more, found -1'),
    ({0: 1, 1: math.nan, 2: 1}, 'class 1: .* found nan'),
    ({0: 1, 1: '5', 2: 1}, "class 1: .* found '5'"),
    ([1.0, 5.0, 0.5], 'expected a mapping from class to weight'),
  ],
)
def test_impossible_weights_are_refused(given, expected):
  with pytest.raises(ModelError, match=expected):
    _model('sparse_categorical_crossentropy', class_weight=given)


def test_labels_that_name_no_class_are_refused():
  spec = tf.TensorSpec([3], tf.float32)
  with pytest.raises(ModelError, match=r'a label has the shape \[2\]'):
    losses.ClassWeights(_WEIGHTS, tf.TensorSpec([2], tf.int32), spec)
  with pytest.raises(ModelError, match='several outputs'):
    losses.ClassWeights(_WEIGHTS, spec, [spec, spec])
