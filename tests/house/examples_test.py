"""Which client data are taken, and which are refused."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from tests.support import small_clients
from tff_partial.data import examples
from tff_partial.data import packing


def test_the_value_of_a_client_has_this_type():
  assert examples.client_spec(small_clients.SPEC) == collections.OrderedDict(
    examples=collections.OrderedDict(
      x=tf.TensorSpec([None], tf.int32),
      y=tf.TensorSpec([None], tf.float32),
      weight=tf.TensorSpec([None], tf.float32),
      time=tf.TensorSpec([None], tf.int64),
    ),
    count=tf.TensorSpec([], tf.int32),
    seed=tf.TensorSpec([2], tf.int32),
  )


@pytest.mark.parametrize(
  ('given', 'spec', 'result'),
  [
    ([1, 2], tf.float32, [1.0, 2.0]),
    ([0.5, 0.1], tf.float32, np.float32([0.5, 0.1])),
    ([True, False], tf.int32, [1, 0]),
    ([1, 0], tf.bool, [True, False]),
    (np.uint8([255]), tf.int64, [255]),
    (np.int64([2**31 - 1]), tf.int32, [2**31 - 1]),
    (['a'], tf.string, ['a']),
    ([b'a'], tf.string, [b'a']),
  ],
)
def test_types_are_converted_where_nothing_is_lost(given, spec, result):
  array = examples.check_array(given, tf.TensorSpec([], spec), 'here')
  assert array.dtype == spec.as_numpy_dtype
  np.testing.assert_array_equal(array, result)


def test_numbers_are_arrays_of_one_number_where_these_are_asked_for():
  array = examples.check_array([3, 4], tf.TensorSpec([1], tf.float32), 'here')
  np.testing.assert_array_equal(array, np.float32([[3], [4]]))


def _with(**fields) -> dict[str, dict]:
  bad = {**small_clients.fields(2), **fields}
  return {**small_clients.clients(), 'bad': bad}


@pytest.mark.parametrize(
  ('clients', 'message'),
  [
    (
      {'bad': {'x': [1], 'y': [1.0]}},
      r"Client 'bad' lacks the fields \['time'\]: an example consists of "
      r"\['x', 'y', 'weight', 'time'\]",
    ),
    (
      _with(y=[0.5, np.nan]),
      "Client 'bad', y: example 1 is nan, which is not finite. Drop or repair",
    ),
    (
      _with(x=[1.0, 2.0]),
      "Client 'bad', x: expected int32, found float64, whose fractions would "
      'be lost. Round the values or change the spec',
    ),
    (
      _with(x=[1, 2**31]),
      "Client 'bad', x: the value 2147483648 does not fit into int32. Change",
    ),
    (_with(y=[2**24 + 1, 0]), 'the value 16777217 does not fit into float32'),
    (
      _with(y=['3', '4']),
      "Client 'bad', y: expected values of type float32, found <U1 "
      r"\(first value '3'\). Convert them before packing",
    ),
    (
      _with(time=np.array(['2001-01-01', '2002-01-01'], 'datetime64[s]')),
      r"Client 'bad', time: expected values of type int64, found datetime64",
    ),
    (
      _with(x=[[1, 2], [3, 4]]),
      r"Client 'bad', x: expected one example to have shape \(\), found \(2,\)",
    ),
    (
      _with(y=[[1.0], [1.0, 2.0]]),
      r"Client 'bad', y: the examples differ in shape. Pad or cut them",
    ),
    (
      _with(y=[1.0]),
      "Client 'bad': fields have different numbers of examples: .1, 2.",
    ),
  ],
)
def test_bad_examples_are_refused(clients, message):
  with pytest.raises(examples.ClientDataError, match=message):
    packing.pack(clients, small_clients.SPEC)


@pytest.mark.parametrize(
  ('value', 'message'),
  [
    ([1, 2], r"x must be a mapping with the keys \['pair'\]"),
    ({'other': [1]}, r"x must be a mapping with the keys \['pair'\]"),
    ({'pair': [1, 2]}, 'x.pair must be a tuple of 1 arrays'),
    ({'pair': ([0.5, 0.5],)}, r'x.pair\[0\]: expected int32, found float64'),
  ],
)
def test_bad_structures_are_refused(value, message):
  spec = collections.OrderedDict(
    x={'pair': (tf.TensorSpec([], tf.int32),)},
    y=tf.TensorSpec([], tf.float32),
    weight=examples.WEIGHT_SPEC,
  )
  said = f"Client 'bad'.*{message}"
  with pytest.raises(examples.ClientDataError, match=said):
    packing.pack({'bad': {'x': value, 'y': [0.0, 1.0]}}, spec)


def test_numbers_are_no_strings():
  with pytest.raises(examples.ClientDataError, match='type string, found int'):
    examples.check_array([1], tf.TensorSpec([], tf.string), 'here')
