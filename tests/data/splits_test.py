"""Which examples a phase sees, checked by hand."""

import collections
from collections.abc import Sequence

import numpy as np
import pytest
import tensorflow as tf

from tff_partial.data import splits
from tff_partial.data.examples import ClientDataError

_SEED = np.array([3, 4], np.int32)
_CAPACITIES = (23, 24, 40)


def _choose(
  part: splits.Part,
  count: int,
  capacity: int = 23,
  seed: np.ndarray = _SEED,
  **fields: Sequence[int],
) -> list[int]:
  """The places that a part chooses of a client's first `count` examples."""

  def padded(values: Sequence[int], dtype: np.dtype) -> np.ndarray:
    return np.pad(np.asarray(values, dtype), [0, capacity - count])

  examples = collections.OrderedDict(weight=padded([1] * count, np.float32))
  for name, spec in part.fields.items():
    values = fields[name][:count]
    examples[name] = padded(values, spec.dtype.as_numpy_dtype)

  order, chosen = part.choose(
    tf.nest.map_structure(tf.constant, examples), tf.constant(count), seed
  )
  assert order.shape == [capacity]
  assert order.dtype == chosen.dtype == tf.int32
  return order.numpy()[: chosen.numpy()].tolist()


def _both(split: splits.Split, count: int, **options) -> tuple[list, list]:
  support, query = (_choose(part, count, **options) for part in split)
  return support, query


def _range(*stretches: tuple[int, int]) -> list[int]:
  """All numbers of some stretches, first and last included."""
  return [i for first, last in stretches for i in range(first, last + 1)]


# Split, number of examples, support set, query set.
_BY_PLACE = [
  (splits.same(), 0, [], []),
  (splits.same(), 1, [0], [0]),
  (splits.same(), 23, _range((0, 22)), _range((0, 22))),
  # What is halfway between two numbers is rounded to the even one.
  (splits.halves(), 0, [], []),
  (splits.halves(), 1, [0], []),
  (splits.halves(), 2, [0], [1]),
  (splits.halves(), 5, [0, 1], [2, 3, 4]),
  (splits.halves(), 6, [0, 1, 2], [3, 4, 5]),
  (splits.halves(), 23, _range((0, 11)), _range((12, 22))),
  # Neither part is empty where there are two examples.
  (splits.fraction(0.8), 0, [], []),
  (splits.fraction(0.8), 1, [0], []),
  (splits.fraction(0.8), 2, [0], [1]),
  (splits.fraction(0.8), 6, [0, 1, 2, 3, 4], [5]),
  (splits.fraction(0.8), 23, _range((0, 17)), _range((18, 22))),
  (splits.fraction(0.01), 5, [0], [1, 2, 3, 4]),
  (splits.fraction(0.99), 5, [0, 1, 2, 3], [4]),
  (splits.first(0), 0, [], []),
  (splits.first(0), 2, [], [0, 1]),
  (splits.first(3), 2, [0, 1], []),
  (splits.first(3), 3, [0, 1, 2], []),
  (splits.first(3), 5, [0, 1, 2], [3, 4]),
  (splits.first(3, query_from=20), 5, [0, 1, 2], []),
  (splits.first(3, query_from=20), 23, [0, 1, 2], [20, 21, 22]),
  # Batches alternate; the last, partial one is on either side.
  (splits.alternating(5), 0, [], []),
  (splits.alternating(5), 1, [0], []),
  (splits.alternating(5), 6, [0, 1, 2, 3, 4], [5]),
  (
    splits.alternating(5),
    23,
    _range((0, 4), (10, 14), (20, 22)),
    _range((5, 9), (15, 19)),
  ),
  (splits.alternating(1), 5, [0, 2, 4], [1, 3]),
  (splits.alternating(100), 23, _range((0, 22)), []),
]


@pytest.mark.parametrize('capacity', _CAPACITIES)
@pytest.mark.parametrize(
  ('split', 'count', 'support', 'query'),
  _BY_PLACE,
  ids=[f'{split.support.name}-{n}' for split, n, _, _ in _BY_PLACE],
)
def test_parts_by_place(split, count, support, query, capacity):
  assert _both(split, count, capacity=capacity) == (support, query)


# Share of the support set, times, support set, query set. Equal times keep the
# order of the examples; padding, whose time is 0, comes after all others.
_BY_TIME = [
  (0.5, [], [], []),
  (0.5, [7], [0], []),
  (0.5, [9, 1], [1], [0]),
  (0.5, [3, 1, 2, 1, 3], [1, 3], [2, 0, 4]),
  (0.5, [5] * 6, [0, 1, 2], [3, 4, 5]),
  (0.5, [2**40, -(2**40), 2**40, 0, -1, 1], [1, 4, 3], [5, 0, 2]),
  (
    0.5,
    list(range(23, 0, -1)),
    list(range(22, 10, -1)),
    list(range(10, -1, -1)),
  ),
  (0.8, [3, 1, 2, 1, 3], [1, 3, 2, 0], [4]),
  (0.8, [1, 0], [1], [0]),
]


@pytest.mark.parametrize('capacity', _CAPACITIES)
@pytest.mark.parametrize(('share', 'times', 'support', 'query'), _BY_TIME)
def test_parts_by_time(share, times, support, query, capacity):
  split = splits.by_time('when', share)
  found = _both(split, len(times), capacity=capacity, when=times)
  assert found == (support, query)


# Marks, support set, query set. Padding has mark 0 and yet is in neither.
_BY_MARK = [
  ([], [], []),
  ([0], [0], []),
  ([1], [], [0]),
  ([1, 0], [1], [0]),
  ([0, 1, 0, 2, -1], [0, 2], [1, 3, 4]),
  ([1] * 6, [], [0, 1, 2, 3, 4, 5]),
  ([0] * 6, [0, 1, 2, 3, 4, 5], []),
  ([0] * 20 + [1] * 3, _range((0, 19)), [20, 21, 22]),
]


@pytest.mark.parametrize('capacity', _CAPACITIES)
@pytest.mark.parametrize(('marks', 'support', 'query'), _BY_MARK)
def test_parts_by_mark(marks, support, query, capacity):
  found = _both(splits.by_mark(), len(marks), capacity=capacity, is_query=marks)
  assert found == (support, query)


# ---- drawn splits ------------------------------------------------------------


@pytest.mark.parametrize('capacity', _CAPACITIES)
@pytest.mark.parametrize('count', [0, 1, 2, 5, 6, 23])
def test_a_shuffled_split_divides_the_examples(count, capacity):
  for split in (splits.halves(), splits.alternating(4), splits.fraction(0.8)):
    support, query = _both(split, count)
    found = _both(splits.shuffled(split), count, capacity=capacity)
    assert [len(part) for part in found] == [len(support), len(query)]
    assert sorted([*found[0], *found[1]]) == list(range(count))


def test_a_shuffled_split_follows_from_the_seed_alone():
  split = splits.shuffled(splits.halves())
  found = _both(split, 23)
  for capacity in _CAPACITIES:
    assert _both(split, 23, capacity=capacity) == found
  others = [_both(split, 23, seed=_SEED + i)[0] for i in range(1, 5)]
  assert len({tuple(each) for each in [found[0], *others]}) == 5
  assert found[0] != sorted(found[0])


# ---- fields and refusals -----------------------------------------------------


def test_splits_say_what_they_read():
  by_time, by_mark = splits.by_time('when'), splits.by_mark('late')
  fields = splits.example_fields(
    splits.everything(), *by_time, *splits.shuffled(by_mark), *splits.halves()
  )
  assert fields == {
    'when': tf.TensorSpec([], tf.int64),
    'late': tf.TensorSpec([], tf.int32),
  }


def test_a_field_of_two_types_is_refused():
  with pytest.raises(
    ClientDataError, match="read the field 'a': as .*int64.*int32.* different"
  ):
    splits.example_fields(*splits.by_time('a'), *splits.by_mark('a'))


@pytest.mark.parametrize('share', [0.0, 1.0, -0.5, 2, float('nan'), '0.5'])
@pytest.mark.parametrize('build', [splits.fraction, splits.by_time])
def test_a_share_that_is_none_is_refused(build, share):
  with pytest.raises(
    ClientDataError, match=f'between 0 and 1, found {share!r}'
  ):
    build(share=share)


def test_a_share_alone_is_no_split():
  with pytest.raises(ClientDataError, match='expected a `Split`, .* a float'):
    splits.given_or(0.5, splits.halves())


@pytest.mark.parametrize('places', [(-1, None), (-1, 3), (4, 3)])
def test_first_examples_that_make_no_sense_are_refused(places):
  with pytest.raises(
    ClientDataError, match=r'first\(.*, query_from=.*\): the support set'
  ):
    splits.first(*places)


def test_sizes_are_whole_numbers_of_python_or_numpy():
  for number in (2, np.int64(2)):
    support, query = splits.first(number, number + 1)
    assert _choose(support, 5) == [0, 1] and _choose(query, 5) == [3, 4]
  for build in (splits.first, splits.alternating):
    with pytest.raises(ClientDataError, match='a whole number, found 2.5'):
      build(2.5)


def test_a_batch_of_nothing_is_refused():
  with pytest.raises(ClientDataError, match='batch_size: .* found 0'):
    splits.alternating(0)
