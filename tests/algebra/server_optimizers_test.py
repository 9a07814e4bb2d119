"""Optimizers side by side are as each by itself."""

import collections

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.phases import sgd
from tff_partial.templates import server_optimizers

_WEIGHTS = collections.OrderedDict(
  shared=collections.OrderedDict(
    [('nodes/vectors', tf.constant([1.0, 2.0])), ('head', tf.constant([3.0]))]
  ),
  group=collections.OrderedDict([('a_head', tf.constant([4.0]))]),
)
_SLOPES = tf.nest.map_structure(lambda w: 10.0 * w, _WEIGHTS)


def _step(optimizer, state=None):
  specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, _WEIGHTS)
  state = optimizer.initialize(specs) if state is None else state
  return optimizer.next(state, _WEIGHTS, _SLOPES)


def test_each_variable_has_its_optimizer():
  adam = tff.learning.optimizers.build_adam(0.5)
  _, found = _step(server_optimizers.by_name({'nodes/.*': sgd(0.1)}, adam))
  _, of_adam = _step(adam)
  np.testing.assert_allclose(found['shared']['nodes/vectors'], [0.0, 0.0])
  np.testing.assert_allclose(found['shared']['head'], of_adam['shared']['head'])
  np.testing.assert_allclose(
    found['group']['a_head'], of_adam['group']['a_head']
  )
  # In the order of the weights, by which TFF knows them.
  assert [list(named) for named in found.values()] == [
    list(named) for named in _WEIGHTS.values()
  ]


def test_the_first_rule_counts():
  rules = {'nodes/.*': sgd(0.1), '.*': sgd(0.0)}
  _, found = _step(server_optimizers.by_name(rules, sgd(1.0)))
  np.testing.assert_allclose(found['shared']['nodes/vectors'], [0.0, 0.0])
  np.testing.assert_allclose(found['shared']['head'], [3.0])


def test_without_rules_it_is_the_rest():
  rest = sgd(1.0)
  assert server_optimizers.by_name({}, rest) is rest


def test_a_schedule_of_the_rest_changes_it_alone():
  rising = tff.learning.optimizers.schedule_learning_rate(
    sgd(1.0), lambda number: 0.05 * tf.cast(number + 1, tf.float32)
  )
  both = server_optimizers.by_name({'nodes/.*': sgd(0.1)}, rising)
  state, first = _step(both)
  _, second = _step(both, state)
  for number, found in ((1, first), (2, second)):
    np.testing.assert_allclose(found['shared']['nodes/vectors'], [0.0, 0.0])
    np.testing.assert_allclose(
      found['shared']['head'], [3.0 - 0.05 * number * 30.0], rtol=1e-6
    )
