"""What travels between the server and a client, counted by hand."""

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

import baselines
import tff_partial
from tff_partial import algorithms
from tff_partial.analysis.communication import communication
from tff_partial.composition import Aggregation
from tff_partial.phases import Phase
from tff_partial.phases import sgd


def _build() -> tf.keras.Model:
  """A table of ten rows of three numbers, and a matrix of three numbers."""
  item = tf.keras.Input([2], dtype=tf.int32)
  vectors = tf.keras.layers.Embedding(10, 3, name='items')(item)
  mean = tf.keras.layers.GlobalAveragePooling1D()(vectors)
  rating = tf.keras.layers.Dense(1, use_bias=False, name='rating')(mean)
  return tf.keras.Model(item, rating)


_MODEL = tff_partial.from_keras(_build, loss='mse')
_TRAINING = Phase(optimizer=sgd(0.1))


def _count(aggregator=None):
  process = algorithms.build_fed_avg(
    _MODEL, training=_TRAINING, aggregation=Aggregation(aggregator)
  )
  items = {
    'three rows': [[1, 2], [2, 3]],
    'one row': [[7, 7]],
    'all rows': [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [9, 0]],
  }
  clients = {
    name: {'x': np.array(of, np.int32), 'y': np.zeros([len(of), 1], np.float32)}
    for name, of in items.items()
  }
  return communication(process, tff_partial.pack(clients, process.example_spec))


def test_rows_are_counted_as_they_are_sent():
  # 33 numbers of four bytes; a row is three numbers and which row it is. The
  # clients send 3, 1 and 10 rows and the matrix.
  assert _count() == {
    'download_parameters': 33,
    'download_bytes': 132,
    'upload_parameters': 33,
    'upload_bytes': 132,
    'upload_bytes_by_rows': round((3 + 1 + 10) / 3 * 16 + 12, 1),
  }


def test_what_is_sent_and_loaded_beside_is_counted():
  process = baselines.build_scaffold(_MODEL, training=_TRAINING, num_clients=10)
  found = communication(process, ())
  # The server's control variates are as large as the model, and so is what a
  # client sends of its own.
  assert found == {
    'download_parameters': 2 * 33,
    'download_bytes': 2 * 132,
    'upload_parameters': 2 * 33,
    'upload_bytes': 2 * 132,
  }


def test_what_differs_in_size_is_named():
  table = tff.StructType([('rows', tff.TensorType(np.float32, (None, 3)))])
  number = tff.TensorType(np.int64, (2,))
  process = algorithms.build_fed_avg(_MODEL, training=_TRAINING)
  process.sent_beside = {'drafts/user': table, 'counts': number}
  found = communication(process, ())
  assert found['upload_not_counted'] == ['drafts/user']
  assert found['upload_parameters'] == 33 + 2
  assert found['upload_bytes'] == 132 + 16
  # Without clients nothing of them is counted.
  assert 'upload_bytes_by_rows' not in found


def test_tables_are_sent_whole_where_an_aggregator_takes_no_rows():
  whole = _count(aggregator=tff.aggregators.MeanFactory())
  assert 'upload_bytes_by_rows' not in whole
  assert whole['upload_bytes'] == 132
