"""Five clients with few ratings each, and what cohorts must hold of them."""

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.data import examples

# One rating: an item, how it was rated, and when.
SPEC = collections.OrderedDict(
  x=tf.TensorSpec([], tf.int32),
  y=tf.TensorSpec([], tf.float32),
  weight=examples.WEIGHT_SPEC,
  time=tf.TensorSpec([], tf.int64),
)
COUNTS = {'ann': 3, 'bob': 1, 'cid': 8, 'dot': 2, 'eve': 5}


def fields(count: int, first: int = 0) -> dict[str, np.ndarray]:
  """Some ratings of one client, as they are packed."""
  return {
    'x': np.arange(first, first + count),
    'y': np.arange(count) / 4,
    'time': np.arange(count)[::-1],
  }


def clients() -> dict[str, dict[str, np.ndarray]]:
  """All clients, as they are packed."""
  return {
    client: fields(count, 100 * place)
    for place, (client, count) in enumerate(COUNTS.items())
  }


def seeds(count: int) -> np.ndarray:
  """Seeds of as many clients."""
  return np.arange(2 * count, dtype=np.int32).reshape(count, 2)


def check(value: Any, client: str, seed: np.ndarray) -> None:
  """A cohort's value holds what was packed, and zeros after it."""
  given, count = clients()[client], COUNTS[client]
  assert list(value) == ['examples', 'count', 'seed']
  assert list(value['examples']) == list(SPEC)
  assert value['count'] == count
  np.testing.assert_array_equal(value['seed'], seed)
  for name, spec in SPEC.items():
    array = value['examples'][name]
    assert array.dtype == spec.dtype.as_numpy_dtype
    wanted = given.get(name, np.ones(count))
    np.testing.assert_array_equal(array[:count], wanted)
    assert not array[count:].any()


def check_cohort(source: Any, members: Sequence[str]) -> None:
  """The cohort of some clients holds what was packed of each of them."""
  cohort = source.cohort(members, seeds(len(members)))
  for value, client, seed in zip(
    cohort, members, seeds(len(members)), strict=True
  ):
    check(value, client, seed)


def real_examples(source: Any, client: str) -> dict[str, Any]:
  """The examples of one client, without padding."""
  (value,) = source.cohort([client], seeds(1))
  count = int(value['count'])
  return tf.nest.map_structure(lambda held: held[:count], value['examples'])


# ---- a computation -----------------------------------------------------------


_CLIENT = tff.types.tensorflow_to_type(examples.client_spec(SPEC))


@tff.tensorflow.computation(_CLIENT)
def _sum_of_labels(client):
  return tf.reduce_sum(client['examples']['y'] * client['examples']['weight'])


@tff.federated_computation(tff.FederatedType(_CLIENT, tff.CLIENTS))
def total_of_labels(clients):
  """The sum of the labels of a cohort."""
  return tff.federated_sum(tff.federated_map(_sum_of_labels, clients))
