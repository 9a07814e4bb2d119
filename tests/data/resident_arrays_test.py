"""Arrays that TensorFlow uses where they lie."""

import numpy as np
import pytest
import tensorflow as tf

from tests.support import small_clients
import tff_partial
from tff_partial.data import resident_arrays
from tff_partial.runtimes.values import client_feeds


def _is_shared(tensor: tf.Tensor, array: np.ndarray) -> bool:
  """Whether a change of an array is one of the tensor, too."""
  before = array.copy()
  array[...] = before + 1
  changed = not np.array_equal(tensor[: len(array)], before)
  array[...] = before
  return changed


@pytest.mark.parametrize('dtype', [np.uint8, np.float32, np.int64, np.float16])
@pytest.mark.parametrize('shape', [(3,), (5, 2, 3), (1100, 7)])
def test_a_tensor_shares_the_memory_of_its_array(dtype, shape):
  array = resident_arrays.zeros(shape, dtype)
  assert array.shape == shape
  assert not array.any()
  array[...] = np.arange(array.size).reshape(shape) % 100
  tensor = client_feeds.DeviceArrays().tensor(array)
  assert tensor.shape == (resident_arrays.rounded(len(array)), *shape[1:])
  np.testing.assert_array_equal(tensor[: len(array)], array)
  assert _is_shared(tensor, array)


@pytest.mark.parametrize(
  'array',
  [
    np.arange(6.0),
    resident_arrays.zeros((6, 2), np.float32)[1:],
    resident_arrays.zeros((6, 2), np.float32)[:, :1],
    resident_arrays.zeros((6, 0), np.float32),
    np.zeros([100], np.uint8)[1:7],
  ],
  ids=['of NumPy', 'not its start', 'not all of it', 'empty', 'of bytes'],
)
def test_other_arrays_are_copied(array):
  array = array if array.size == 0 else array + np.arange(1, dtype=array.dtype)
  tensor = client_feeds.DeviceArrays().tensor(array)
  assert len(tensor) >= len(array)
  np.testing.assert_array_equal(tensor[: len(array)], array)
  assert not _is_shared(tensor, array)


def test_a_population_is_in_memory_once():
  clients = tff_partial.pack(small_clients.clients(), small_clients.SPEC)
  arrays = client_feeds.DeviceArrays()
  (group,) = clients.cohort(clients.client_ids, small_clients.seeds(5)).groups
  for array in tf.nest.flatten(group.resident['examples']):
    assert _is_shared(arrays.tensor(array), array)
