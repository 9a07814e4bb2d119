"""Rows of a table that a client chooses, and how they go back."""

import numpy as np
import pytest
import tensorflow as tf

from tff_partial.sparse import rows

_IDS = tf.TensorSpec([None], tf.int32)


# Each row has a slot of its own, none has, or the larger ones of the cases.
@pytest.mark.slow
@pytest.mark.parametrize('num_rows', [1, 100, 10**6])
@pytest.mark.parametrize('jit', [False, True])
def test_first_of_equals_is_where_an_id_stands_first(jit, num_rows):
  first_of_equals = tf.function(
    lambda ids: rows.first_of_equals(ids, num_rows),
    jit_compile=jit,
    input_signature=[_IDS],
  )
  generator = np.random.default_rng(0)
  for ids in (
    [],
    [7],
    [5, 5, 5],
    [3, 1, 3, -2, 1],
    generator.integers(-50, 300, 1000),
    # Far more than fall into different slots at the first turn.
    generator.choice(2**31, 2000).astype(np.int64) - 2**30,
  ):
    ids = np.asarray(ids, np.int32)
    _, places, which = np.unique(ids, return_index=True, return_inverse=True)
    np.testing.assert_array_equal(first_of_equals(ids), places[which])


def test_each_lookup_finds_its_rows():
  # Two real examples, which read two ids each, and one more of their own.
  pairs = tf.constant([[4, 2], [4, 7], [9, 9]])
  single = tf.constant([2, 4, 9], tf.int64)
  chosen = rows.choose([pairs, single], tf.constant(2), num_rows=10)
  # Padding reads row 0, which any table has.
  np.testing.assert_array_equal(chosen.ids, [4, 2, 4, 7, 0, 0, 2, 4, 0])
  np.testing.assert_array_equal(chosen.first, [0, 1, 0, 3, 4, 4, 1, 0, 4])
  in_pairs, in_single = chosen.places
  np.testing.assert_array_equal(in_pairs, [[0, 1], [0, 3], [4, 4]])
  np.testing.assert_array_equal(in_single, [1, 0, 4])


@pytest.mark.parametrize('jit', [False, True])
def test_no_more_rows_are_chosen_than_there_are(jit):
  @tf.function(jit_compile=jit)
  def choose(ids):
    return rows.choose([ids], tf.size(ids), num_rows=3)

  chosen = choose(tf.constant([2, 0, 2, 2]))
  np.testing.assert_array_equal(chosen.ids, [0, 1, 2])
  np.testing.assert_array_equal(chosen.first, [0, 1, 2])
  np.testing.assert_array_equal(chosen.places[0], [2, 0, 2, 2])


def test_ids_outside_of_a_table_stay_outside():
  # As 32-bit integers they would be 5 and 6.
  ids = tf.constant([2**32 + 5, -(2**32) + 6])
  chosen = rows.choose([ids], tf.constant(2), num_rows=10)
  np.testing.assert_array_equal(chosen.ids, [10, -1])
  with pytest.raises(tf.errors.InvalidArgumentError, match='not in \\[0, 10'):
    chosen.of(tf.zeros([10, 2]))


def test_chosen_rows_go_back_to_where_they_were():
  table = tf.reshape(tf.range(8.0), [4, 2])
  chosen = rows.choose([tf.constant([3, 1, 3])], tf.constant(3), num_rows=4)
  values = chosen.of(table)
  np.testing.assert_array_equal(values, [[6, 7], [2, 3], [6, 7]])
  # Only the first of two that are the same row is in use.
  trained = values + [[10.0], [20.0], [0.0]]
  np.testing.assert_array_equal(
    chosen.within(table, trained), [[0, 1], [22, 23], [4, 5], [16, 17]]
  )
  change = rows.Change(chosen.ids, values - trained)
  np.testing.assert_array_equal(
    change.added_to(tf.ones([4, 2])), [[1, 1], [-19, -19], [1, 1], [-9, -9]]
  )


def test_rows_stand_for_a_table_that_is_only_looked_up():
  # Places of one lookup after the other.
  places = (tf.constant([1, 0]), tf.constant([[1]]))
  table = rows.Rows('table', 100, tf.constant([[5.0], [6.0]]), places)
  assert table.shape == [100, 1]
  with rows.reading() as lookups:
    first = tf.nn.embedding_lookup(table, tf.constant([70, 30]))
    second = tf.gather(table, tf.constant([[70]]))
  np.testing.assert_array_equal(first, [[6.0], [5.0]])
  np.testing.assert_array_equal(second, [[[6.0]]])
  one, other = lookups['table']
  np.testing.assert_array_equal(one, [70, 30])
  np.testing.assert_array_equal(other, [[70]])
