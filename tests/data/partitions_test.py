"""Laws of partitions: nothing is lost, nothing is shared, the seed decides."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

import tff_partial
from tff_partial.data import examples
from tff_partial.data import partitions
from tff_partial.data.examples import ClientDataError

_LABELS = np.repeat(np.arange(10), 300)

# Every way to divide all of some examples.
_WAYS: dict[str, Callable[..., partitions.Partition]] = {
  'iid': lambda labels, number, **o: partitions.iid(len(labels), number, **o),
  'dirichlet': lambda *a, **o: partitions.dirichlet(*a, alpha=0.3, **o),
  'dirichlet of few labels': (
    lambda *a, **o: partitions.dirichlet(*a, alpha=1e-3, **o)
  ),
  'shards': partitions.shards,
  'by_label': partitions.by_label,
}


def _sets(partition: partitions.Partition) -> list[set[int]]:
  return [set(places.tolist()) for places in partition.values()]


def _entropy(partition: partitions.Partition, labels: np.ndarray) -> float:
  """The mean entropy of the clients' labels, in nats."""
  entropies = []
  for places in partition.values():
    _, counts = np.unique(labels[places], return_counts=True)
    shares = counts / counts.sum()
    entropies.append(-np.sum(shares * np.log(shares)))
  return float(np.mean(entropies))


@pytest.mark.parametrize('number', [1, 7, 20])
@pytest.mark.parametrize('way', _WAYS)
def test_each_example_goes_to_one_client(way, number):
  labels = np.random.default_rng(0).permutation(_LABELS)
  if (way, number) == ('by_label', 1):
    number = 10  # One client holds two of ten labels.
  divided = _WAYS[way](labels, number, seed=3)
  assert list(divided) == [f'{client:04d}' for client in range(number)]
  assert all(len(places) for places in divided.values())
  joined = np.concatenate(list(divided.values()))
  wanted = set(range(len(labels)))
  if (way, number) == ('by_label', 7):
    wanted = set(np.flatnonzero(labels < 8))  # Nobody holds 8 or 9.
  assert sorted(joined.tolist()) == sorted(wanted)


@pytest.mark.parametrize('way', _WAYS)
def test_the_seed_decides(way):
  one, again, other = (_WAYS[way](_LABELS, 20, seed=s) for s in (3, 3, 4))
  np.testing.assert_equal(one, again)
  assert _sets(one) != _sets(other)


def test_labels_may_be_texts():
  for way in ('dirichlet', 'shards', 'by_label'):
    for kind in (str, object):
      names = np.array([f'kind {label}' for label in _LABELS]).astype(kind)
      divided = _WAYS[way](names, 20)
      assert sum(map(len, divided.values())) == len(names)


def test_alpha_says_how_alike_clients_are():
  entropies = [
    _entropy(partitions.dirichlet(_LABELS, 20, alpha), _LABELS)
    for alpha in (0.01, 0.1, 1.0, 1000.0)
  ]
  assert entropies == sorted(entropies)
  assert entropies[0] < 0.3
  assert entropies[-1] > 0.99 * np.log(10)
  assert _entropy(partitions.iid(3000, 20), _LABELS) > 0.98 * np.log(10)


def test_nobody_is_empty_unless_asked_for():
  def sizes(least: int) -> list[int]:
    divided = partitions.dirichlet(_LABELS, 50, 0.01, min_examples=least)
    assert sum(map(len, divided.values())) == 3000
    return sorted(map(len, divided.values()))

  assert sizes(0)[0] == 0
  assert sizes(1)[0] == 1
  assert sizes(60) == [60] * 50
  # Who has enough keeps what it drew.
  drawn = partitions.dirichlet(_LABELS, 50, 0.01, min_examples=0)
  least = partitions.dirichlet(_LABELS, 50, 0.01, min_examples=1)
  for mine, more in zip(_sets(drawn), _sets(least), strict=True):
    assert mine >= more or not mine


def test_shards_hold_few_labels():
  divided = partitions.shards(_LABELS, 30, 2)
  # 60 shards of 50 examples, each of one label.
  assert {len(places) for places in divided.values()} == {100}
  assert max(len(set(_LABELS[p])) for p in divided.values()) == 2
  uneven = partitions.shards(np.array([0, 0, 1, 1, 1, 2, 2]), 2, 2)
  assert sorted(map(len, uneven.values())) in ([3, 4], [4, 3])


# ---- clients of a few labels -------------------------------------------------


def test_clients_hold_two_labels_each():
  held = partitions.by_label(_LABELS, 20)
  labels = [set(_LABELS[places]) for places in held.values()]
  assert labels == [{i % 10, (i + 1) % 10} for i in range(20)]


def test_sizes_differ_and_each_label_has_the_least_examples():
  sizes = [
    [len(x) for x in partitions.by_label(_LABELS, 20, **options).values()]
    for options in ({}, {'min_examples': 70})
  ]
  assert 0 < np.std(sizes[1]) < np.std(sizes[0])
  assert min(sizes[1]) >= 140  # Of two labels.


# ---- owners, and parts -------------------------------------------------------


def test_owners_hold_what_is_theirs():
  held = partitions.by_owner([7, 3, 7, 7, 3])
  assert list(held) == ['3', '7']
  assert _sets(held) == [{1, 4}, {0, 2, 3}]


def test_examples_are_divided_by_shares():
  held = {'a': np.arange(20), 'b': np.arange(20, 23)}
  parts = partitions.split_examples(held, (0.65, 0.1, 0.25))
  assert [len(p['a']) for p in parts] == [13, 2, 5]
  # 65 % of 3 is 1, and 75 % is 2.
  assert [p['b'].tolist() for p in parts] == [[20], [21], [22]]
  (first, *rest) = partitions.split_examples(
    {'c': np.array([5])}, (0.5, 0.25, 0.25)
  )
  assert first['c'].tolist() == [5]
  assert not any(len(part['c']) for part in rest)
  assert partitions.limit(held, 2)['a'].tolist() == [0, 1]
  assert partitions.limit(held, None)['a'].tolist() == list(range(20))


def test_the_publishers_test_examples_stay_so():
  is_test = np.arange(10) >= 6
  (train, validation, test) = partitions.split_examples(
    {'a': np.arange(10)}, (0.6, 0.3, 0.1), is_test
  )
  # Of the six others, two thirds and one third.
  assert [len(train['a']), len(validation['a'])] == [4, 2]
  assert test['a'].tolist() == [6, 7, 8, 9]


def test_clients_are_divided():
  for name in (str, int):
    held = {name(i): np.array([i]) for i in range(20)}
    parts = partitions.split_clients(held, (0.8, 0.1, 0.1))
    assert [len(part) for part in parts] == [16, 2, 2]
    assert set().union(*parts) == set(held)


# ---- what is refused ---------------------------------------------------------


def test_by_label_no_part_has_a_label_that_the_first_has_not():
  # Of label 1 the last two examples, of label 2 the last one.
  labels = np.array([0] * 7 + [1, 1, 2])
  held = {'ann': np.arange(10)}
  plain = partitions.split_examples(held, (0.5, 0.5))
  assert set(labels[plain[1]['ann']]) - set(labels[plain[0]['ann']]) == {1, 2}
  train, test = partitions.split_examples(held, (0.5, 0.5), labels=labels)
  # The first of each, and of the others the earlier ones, in their order.
  assert train['ann'].tolist() == [0, 1, 2, 7, 9]
  assert test['ann'].tolist() == [3, 4, 5, 6, 8]
  # Where a share is less than one of each label, it becomes that.
  few, rest = partitions.split_examples(held, (0.1, 0.9), labels=labels)
  assert few['ann'].tolist() == [0, 7, 9] and len(rest['ann']) == 7


@pytest.mark.parametrize('fractions', [(0.8, 0.2), (0.5, 0.3, 0.2)])
def test_parts_by_label_are_as_large_as_others(fractions):
  held = partitions.dirichlet(_LABELS, 20, alpha=0.3)
  parts = partitions.split_examples(held, fractions, labels=_LABELS)
  plain = partitions.split_examples(held, fractions)
  for client, places in held.items():
    mine = [part[client] for part in parts]
    assert sorted(np.concatenate(mine)) == sorted(places)
    first = set(_LABELS[mine[0]])
    assert first == set(_LABELS[places])
    if len(plain[0][client]) >= len(first):
      assert [len(m) for m in mine] == [len(part[client]) for part in plain]


@pytest.mark.parametrize(
  ('divide', 'expected'),
  [
    (lambda: partitions.iid(3, 4), '4 clients with at least 1 .* there are 3'),
    (lambda: partitions.dirichlet(_LABELS, 2, 0.0), 'alpha=0.0'),
    (lambda: partitions.dirichlet(_LABELS, 2, 1e308), r'alpha=1e\+308'),
    (lambda: partitions.dirichlet(_LABELS, 2, 1e-100), 'at least 1e-6'),
    (
      lambda: partitions.by_label(_LABELS, 5, min_examples=-1),
      'min_examples: expected at least 0, found -1',
    ),
    (
      lambda: partitions.dirichlet(_LABELS, 300, 1.0, min_examples=11),
      'at least 11 examples each need 3,300, and there are 3,000',
    ),
    (
      lambda: partitions.shards(np.eye(3), 2),
      r'an array of shape \(3, 3\). One-hot labels',
    ),
    (lambda: partitions.shards([0.5, 1.5], 2, 1), 'of type float64'),
    (lambda: partitions.by_owner([None, 'a']), 'owners: expected integers'),
    (lambda: partitions.by_owner(['1', 1]), 'found 1 for example 1.*one type'),
    *(
      (
        lambda owners=owners: partitions.by_owner(owners),
        'owners: .* found (nan|<NA>) for example 1. Leave out',
      )
      for owners in (
        ['a', np.nan],
        [3, np.nan],
        pd.Series(['a', pd.NA], dtype='string'),
      )
    ),
    (lambda: partitions.by_label(_LABELS, 5, 11), '1 to 10 labels'),
    (lambda: partitions.limit({'a': _LABELS}, -1), 'limit: most.* found -1'),
    (lambda: partitions.limit({'a': _LABELS}, 2.0), 'limit: most.* found 2.0'),
    (
      lambda: partitions.by_label(_LABELS, 200, min_examples=10),
      '40 clients would share 300 examples of label 0',
    ),
    *(
      (
        lambda split=split, fractions=fractions: split(
          {'a': np.arange(9), 'b': np.arange(9)}, fractions
        ),
        rf'fractions=.*together 1, found {found}',
      )
      for split in (partitions.split_examples, partitions.split_clients)
      for fractions, found in (
        ([0.7, 0.7], '1.4'),
        ([1.5, -0.5], '1'),
        ([np.nan, 1.0], 'nan'),
      )
    ),
    (
      lambda: partitions.split_examples(
        {'a': np.arange(9)}, (0.5, 0.5), np.arange(9) > 4, labels=np.ones(9)
      ),
      '`is_test` says already which',
    ),
    (
      lambda: partitions.split_examples(
        {'a': np.arange(9)}, (0.5, 0.5), np.arange(9) % 2
      ),
      'expected True or False in `is_test`, found values of type int64',
    ),
    *(
      (
        lambda fractions=fractions: partitions.split_examples(
          {'a': np.arange(9)}, fractions, np.arange(9) > 4
        ),
        'fractions=.* no part before it has a share',
      )
      for fractions in ((1.0,), (0.0, 0.0, 1.0))
    ),
    (
      lambda: partitions.split_clients(
        dict.fromkeys('abc', _LABELS), (0.9, 0.1)
      ),
      '3 clients cannot be divided',
    ),
  ],
)
def test_impossible_partitions_are_refused(divide, expected):
  with pytest.raises(ClientDataError, match=expected):
    divide()


# ---- clients of a partition --------------------------------------------------

_SPEC = examples.ExampleSpec(
  [
    ('x', tf.TensorSpec([2], tf.float32)),
    ('y', tf.TensorSpec([], tf.int32)),
    ('weight', examples.WEIGHT_SPEC),
  ]
)
_FIELDS: dict[str, Any] = {
  'x': np.arange(12.0).reshape(6, 2),
  'y': np.arange(6),
}


def test_clients_have_the_examples_of_their_places():
  partition = {'ann': [4, 0], 'bob': np.array([5, 1, 2], np.uint8)}
  clients = tff_partial.from_arrays(_FIELDS, partition, _SPEC)
  assert clients.client_ids == ('ann', 'bob')
  assert clients.num_examples == 5
  seeds = np.zeros([2, 2], np.int32)
  for value, places in zip(
    clients.cohort(['ann', 'bob'], seeds), partition.values(), strict=True
  ):
    count = len(places)
    assert value['count'] == count
    assert value['examples']['y'][:count].tolist() == list(places)
    np.testing.assert_array_equal(
      value['examples']['x'][:count], _FIELDS['x'][np.asarray(places)]
    )


@pytest.mark.parametrize(
  ('fields', 'partition', 'expected'),
  [
    ({}, {'ann': [6]}, 'no example 6 in a data set of 6, .* 0 to 5'),
    ({}, {'ann': [-1]}, 'no example -1'),
    ({}, {'ann': [0.5]}, 'float64 of shape'),
    ({}, {'ann': 3}, 'int64 of shape'),
    ({'y': np.arange(5)}, {'ann': [0]}, r'different numbers .* \[5, 6\]'),
    ({'y': np.zeros(6)}, {'ann': [0]}, 'The data set, y: expected int32'),
  ],
)
def test_impossible_clients_are_refused(fields, partition, expected):
  with pytest.raises(examples.ClientDataError, match=expected):
    tff_partial.from_arrays({**_FIELDS, **fields}, partition, _SPEC)
