"""What people have of a client: arrays, columns, data sets, files of LEAF."""

import collections
import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

import tff_partial
from tff_partial.data import cohorts
from tff_partial.data import examples
from tff_partial.data import frames
from tff_partial.data import packing
from tff_partial.data import vocabulary_checks
from tff_partial.data.examples import ClientDataError
from tff_partial.errors import UserError

_SPEC = collections.OrderedDict(
  x=tf.TensorSpec([2], tf.float32),
  y=tf.TensorSpec([1], tf.float32),
  weight=examples.WEIGHT_SPEC,
)
_TWO = collections.OrderedDict(
  x=collections.OrderedDict(
    item=tf.TensorSpec([], tf.int32), user=tf.TensorSpec([], tf.int32)
  ),
  y=tf.TensorSpec([], tf.float32),
  weight=examples.WEIGHT_SPEC,
)
_X = np.arange(6, dtype=np.float32).reshape([3, 2])
_Y = np.array([1.0, 2.0, 3.0], np.float32)
_COLUMNS = {'item': [1, 2, 3], 'user': [4, 5, 6], 'y': _Y}


def _packed(given: Any, spec: Any) -> Any:
  clients = packing.pack({'ann': given}, spec)
  (value,) = clients.cohort(['ann'], np.zeros([1, 2], np.int32))
  assert value['count'] == 3
  return value['examples']


def _slices(*arrays: Any) -> tf.data.Dataset:
  return tf.data.Dataset.from_tensor_slices(arrays)


@pytest.mark.parametrize(
  'given',
  [
    (_X, _Y),
    [_X, _Y, np.ones(3)],
    _slices(_X, _Y),
    _slices(_X, _Y[:, None]),
    _slices(_X, _Y).batch(2),
    _slices(_X, _Y).batch(1, drop_remainder=True),
    tf.data.Dataset.from_tensor_slices({'x': _X, 'y': _Y}).batch(2),
  ],
)
def test_pairs_and_data_sets_are_clients(given):
  held = _packed(given, _SPEC)
  np.testing.assert_array_equal(held['x'], _X)
  np.testing.assert_array_equal(held['y'][:, 0], _Y)
  np.testing.assert_array_equal(held['weight'], np.ones(3))


@pytest.mark.parametrize(
  'given',
  [
    _COLUMNS,
    pd.DataFrame(_COLUMNS),
    tf.data.Dataset.from_tensor_slices(_COLUMNS).batch(2),
  ],
)
def test_columns_of_several_inputs_are_a_client(given):
  held = _packed(given, _TWO)
  assert held['x']['item'].tolist() == [1, 2, 3]
  assert held['x']['user'].tolist() == [4, 5, 6]
  assert held['y'].tolist() == [1, 2, 3]


def test_a_data_set_without_examples_is_an_empty_client():
  with pytest.raises(ClientDataError, match="'ann' has no examples"):
    packing.pack({'ann': _slices(_X, _Y).take(0)}, _SPEC)


def test_a_data_set_without_end_is_refused():
  with pytest.raises(ClientDataError, match="'ann': the data set repeats"):
    packing.pack({'ann': _slices(_X, _Y).repeat().batch(2)}, _SPEC)


def test_columns_are_joined_to_one_vector():
  frame = pd.DataFrame({'user': ['ann'] * 3, 'a': _X[:, 0], 'b': _X[:, 1]})
  frame['y'] = _Y
  columns = {'client_id': 'user', 'labels': 'y'}
  clients = frames.from_pandas(frame, _SPEC, inputs=['a', 'b'], **columns)
  (value,) = clients.cohort(['ann'], np.zeros([1, 2], np.int32))
  np.testing.assert_array_equal(value['examples']['x'], _X)
  with pytest.raises(
    examples.ClientDataError, match=r"Column \['a'\]: expected"
  ):
    frames.from_pandas(frame, _SPEC, inputs=['a'], **columns)
  others = frames.from_pandas(frame, _SPEC, inputs=['b', 'a'], **columns)
  some = cohorts.SomeClients(others, others.client_ids)
  with pytest.raises(UserError, match=r"x: .*join the columns \['b', 'a'\]"):
    vocabulary_checks.check_alike(clients, some)


def test_files_of_parquet_need_what_reads_them(monkeypatch, tmp_path):
  frame = pd.DataFrame({'user': ['ann'], 'a': [1.0], 'b': [2.0], 'y': [3.0]})
  columns = {'client_id': 'user', 'inputs': ['a', 'b'], 'labels': 'y'}
  monkeypatch.setattr(pd, 'read_parquet', lambda path: frame)
  assert len(frames.from_pandas('clients.parquet', _SPEC, **columns)) == 1

  def fail(path: str) -> None:
    raise ImportError('no engine')

  monkeypatch.setattr(pd, 'read_parquet', fail)
  with pytest.raises(examples.ClientDataError, match='pip install pyarrow'):
    frames.from_pandas(tmp_path / 'clients.parquet', _SPEC, **columns)


def test_files_of_leaf_are_read(tmp_path):
  for name, user in (('b', 'bob'), ('a', 'ann')):
    held = {'users': [user], 'num_samples': [3]}
    held['user_data'] = {user: {'x': _X.tolist(), 'y': _Y.tolist()}}
    (tmp_path / f'{name}.json').write_text(json.dumps(held))
  clients = tff_partial.from_leaf(tmp_path, _SPEC)
  assert clients.client_ids == ('ann', 'bob')
  (value,) = clients.cohort(['bob'], np.zeros([1, 2], np.int32))
  np.testing.assert_array_equal(value['examples']['x'], _X)
  swapped = tff_partial.from_leaf(
    tmp_path / 'a.json', _SPEC, to_fields=lambda data: (data['x'], data['y'])
  )
  assert swapped.num_examples == 3
  (tmp_path / 'c.json').write_text('{"users": ["eve"]}')
  with pytest.raises(examples.ClientDataError, match='c.json: expected JSON'):
    tff_partial.from_leaf(tmp_path, _SPEC)
