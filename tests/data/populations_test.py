"""Cohorts, indexed in memory or loaded for a round."""

import collections
import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tests.support import small_clients
from tests.support import small_runs
from tff_partial.data import client_readers
from tff_partial.data import cohorts
from tff_partial.data import packing
from tff_partial.data.examples import ClientDataError


def test_a_cohort_is_a_sequence_of_slices_of_its_source():
  population = packing.pack(
    small_clients.clients(), small_clients.SPEC, capacities=[2, 8]
  )
  members = ['eve', 'bob', 'cid', 'ann', 'bob']  # A client may come twice.
  cohort = population.cohort(members, small_clients.seeds(5))
  assert isinstance(cohort, collections.abc.Sequence)
  assert cohort.client_ids == tuple(members)
  assert len(cohort) == len(list(cohort)) == 5
  for place, (client, seed) in enumerate(
    zip(members, small_clients.seeds(5), strict=True)
  ):
    small_clients.check(cohort[place], client, seed)
    small_clients.check(cohort[place - 5], client, seed)
    small_clients.check(cohort[np.int64(place)], client, seed)
  for value, place in zip(cohort[3:0:-2], [3, 1], strict=True):
    small_clients.check(value, members[place], small_clients.seeds(5)[place])
  for place in (5, -6):
    with pytest.raises(IndexError, match='The cohort has 5 clients'):
      cohort[place]
  with pytest.raises(TypeError):
    cohort['eve']


def test_a_cohort_tells_which_rows_it_consists_of():
  population = packing.pack(
    small_clients.clients(), small_clients.SPEC, capacities=[2, 8]
  )
  cohort = population.cohort(['eve', 'bob', 'cid'], small_clients.seeds(3))
  large = max(cohort.groups, key=lambda group: len(group.positions))
  assert large.positions.tolist() == [0, 2]
  np.testing.assert_array_equal(
    large.resident['count'][large.rows],
    [small_clients.COUNTS['eve'], small_clients.COUNTS['cid']],
  )
  np.testing.assert_array_equal(
    large.given['seed'], small_clients.seeds(3)[[0, 2]]
  )
  # The same objects round after round, so that a runtime may keep a copy.
  again = population.cohort(['cid'], small_clients.seeds(1))
  assert again.groups[0].resident is large.resident


def test_a_cohort_may_be_empty():
  for source in (
    packing.pack(small_clients.clients(), small_clients.SPEC),
    _reader(),
  ):
    cohort = source.cohort([], np.zeros([0, 2], np.int32))
    assert len(cohort) == 0
    assert not list(cohort)
    assert not cohort.groups


def test_an_unknown_client_is_refused():
  population = packing.pack(small_clients.clients(), small_clients.SPEC)
  with pytest.raises(
    ClientDataError, match="no client 'zoe' among the 5 clients"
  ):
    population.cohort(['ann', 'zoe'], small_clients.seeds(2))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'y': tf.TensorSpec([1])},
      r"'y' is float32 \[\] instead of float32 \[1\]",
    ),
    ({'is_query': tf.TensorSpec([], tf.int32)}, "they lack 'is_query'"),
    ({'time': None}, "they have 'time', which is not read"),
    (
      {'x': {'item': tf.TensorSpec([], tf.int32)}},
      "they lack 'x.item'; they have 'x', which is not read",
    ),
  ],
)
@pytest.mark.parametrize('kind', ['population', 'reader', 'own'])
def test_clients_of_another_process_are_refused(kind, changes, message):
  source = {
    'population': lambda: packing.pack(
      small_clients.clients(), small_clients.SPEC
    ),
    'reader': _reader,
    'own': lambda: small_runs.Spy(_reader()),
  }[kind]()
  cohorts.check(source, small_clients.SPEC)
  wanted = collections.OrderedDict(small_clients.SPEC, **changes)
  wanted = collections.OrderedDict((n, s) for n, s in wanted.items() if s)
  with pytest.raises(
    ClientDataError,
    match=f'were packed for another process: {message}. Pack them with the',
  ):
    cohorts.check(source, wanted)


def test_the_order_of_fields_counts():
  population = packing.pack(small_clients.clients(), small_clients.SPEC)
  turned = collections.OrderedDict(reversed(small_clients.SPEC.items()))
  with pytest.raises(ClientDataError, match='their fields are'):
    population.check(turned)


def test_sources_say_what_they_hold():
  population = packing.pack(
    small_clients.clients(), small_clients.SPEC, min_examples=2
  )
  fields = (
    '  ExampleSpec:\n    x: int32 []\n    y: float32 []\n'
    '    weight: float32 []\n    time: int64 []'
  )
  assert repr(population) == (
    'Population of 4 clients with 18 examples (2 to 8 a client, median 4), '
    f'padded to [8]\n{fields}\n  1 left out for too few examples'
  )
  assert (
    repr(_reader()) == f'Reader of 5 clients, padded to powers of two\n{fields}'
  )
  assert repr(_reader(capacities=[4, 8])).startswith(
    'Reader of 5 clients, padded to [4, 8]'
  )


# ---- readers -----------------------------------------------------------------


def _read(client: str) -> dict[str, np.ndarray]:
  return small_clients.clients()[client]


def _reader(**options) -> client_readers.Reader:
  return client_readers.Reader(
    list(small_clients.COUNTS), _read, small_clients.SPEC, **options
  )


def test_a_reader_makes_the_cohorts_of_a_population():
  population = packing.pack(
    small_clients.clients(), small_clients.SPEC, capacities=[4, 8]
  )
  reader = _reader(capacities=[4, 8])
  assert reader.client_ids == population.client_ids
  assert len(reader) == len(population)
  members = ['dot', 'cid', 'bob', 'cid']
  for one, other in zip(
    reader.cohort(members, small_clients.seeds(4)),
    population.cohort(members, small_clients.seeds(4)),
    strict=True,
  ):
    tf.nest.map_structure(np.testing.assert_array_equal, one, other)


def test_a_reader_names_whose_data_are_bad():
  reader = dataclasses.replace(_reader(), read=lambda client: {'x': [1]})
  with pytest.raises(ClientDataError, match="'eve' lacks the fields"):
    reader.cohort(['eve'], small_clients.seeds(1))
  reader = dataclasses.replace(
    _reader(), read=lambda client: small_clients.fields(0)
  )
  of_none = dataclasses.replace(reader, num_examples={'eve': 0})
  for one in (reader, of_none):
    with pytest.raises(
      ClientDataError, match="'eve' has no examples. .* the reader's `ids`"
    ) as refused:
      one.cohort(['eve'], small_clients.seeds(1))
    assert 'min_examples' not in str(refused.value)
  with pytest.raises(
    ClientDataError, match="'cid' has 8 examples but the largest"
  ):
    _reader(capacities=[5]).cohort(['ann', 'cid'], small_clients.seeds(2))
