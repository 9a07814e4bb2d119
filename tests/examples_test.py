"""Tests of client data as dense tensors: packing, buckets, cohorts, readers."""

import collections
import dataclasses
import logging
import pickle

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial import examples

# One rating: an item, how it was rated, and when.
_SPEC = collections.OrderedDict(
  x=tf.TensorSpec([], tf.int32),
  y=tf.TensorSpec([], tf.float32),
  weight=examples.WEIGHT_SPEC,
  time=tf.TensorSpec([], tf.int64),
)
_COUNTS = {'ann': 3, 'bob': 1, 'cid': 8, 'dot': 2, 'eve': 5}


def _fields(count: int, first: int = 0) -> dict[str, np.ndarray]:
  return {
    'x': np.arange(first, first + count),
    'y': np.arange(count) / 4,
    'time': np.arange(count)[::-1],
  }


def _clients() -> dict[str, dict[str, np.ndarray]]:
  return {
    client: _fields(count, 100 * place)
    for place, (client, count) in enumerate(_COUNTS.items())
  }


def _seeds(count: int) -> np.ndarray:
  return np.arange(2 * count, dtype=np.int32).reshape(count, 2)


def _check_client(value, client: str, seed: np.ndarray) -> None:
  """A cohort's value holds what was packed, and zeros after it."""
  fields, count = _clients()[client], _COUNTS[client]
  assert list(value) == ['examples', 'count', 'seed']
  assert list(value['examples']) == list(_SPEC)
  assert value['count'] == count
  np.testing.assert_array_equal(value['seed'], seed)
  for name, spec in _SPEC.items():
    array = value['examples'][name]
    assert array.dtype == spec.dtype.as_numpy_dtype
    wanted = fields.get(name, np.ones(count))
    np.testing.assert_array_equal(array[:count], wanted)
    assert not array[count:].any()


# ---- packing -----------------------------------------------------------------


def test_clients_are_padded_to_the_largest():
  population = examples.pack(_clients(), _SPEC)
  assert population.client_ids == tuple(_COUNTS)
  assert len(population) == 5
  assert population.num_examples == 19
  assert population.num_filtered == 0

  cohort = population.cohort(list(_COUNTS), _seeds(5))
  for value, client, seed in zip(cohort, _COUNTS, _seeds(5), strict=True):
    _check_client(value, client, seed)
    assert len(value['examples']['y']) == 8


def test_capacities_may_be_given():
  population = examples.pack(_clients(), _SPEC, capacities=[20, 2, 4])
  cohort = population.cohort(list(_COUNTS), _seeds(5))
  assert [len(v['examples']['y']) for v in cohort] == [4, 2, 20, 2, 20]
  for value, client, seed in zip(cohort, _COUNTS, _seeds(5), strict=True):
    _check_client(value, client, seed)


@pytest.mark.parametrize(
  ('counts', 'capacities'),
  [
    ([7], {7}),
    ([1, 1], {1}),
    ([100, 99], {100}),
    ([100, 25, 24, 7, 1], {100, 25, 7}),
    ([2314] + [20] * 9, {2314, 145}),
  ],
)
def test_where_padding_is_dear_there_are_capacities_of_a_quarter(
  counts, capacities, monkeypatch
):
  monkeypatch.setattr(examples, '_WASTED_BYTES', 0)
  population = examples.pack(
    {str(i): _fields(count) for i, count in enumerate(counts)}, _SPEC
  )
  cohort = population.cohort(population.client_ids, _seeds(len(counts)))
  assert {len(value['examples']['y']) for value in cohort} == capacities


def test_structures_and_strings_keep_their_form():
  spec = collections.OrderedDict(
    x=collections.OrderedDict(
      words=tf.TensorSpec([2], tf.string),
      # Not in alphabetical order, which computations must not mind.
      a=(tf.TensorSpec([], tf.bool), tf.TensorSpec([3], tf.float32)),
    ),
    y=tf.TensorSpec([], tf.int64),
    weight=tf.TensorSpec([2], tf.float32),
  )
  fields = {
    'x': {
      'a': ([True, False], np.arange(6).reshape(2, 3)),
      'words': [['aha', 'b'], ['c', 'd']],
      'unread': [1, 2],
    },
    'y': [4, 5],
  }
  population = examples.pack({'ann': fields}, spec, capacities=[3])
  (value,) = population.cohort(['ann'], _seeds(1))
  held = value['examples']
  assert list(held['x']) == ['words', 'a']
  assert held['x']['words'].tolist() == [['aha', 'b'], ['c', 'd'], [b'', b'']]
  assert held['x']['a'][0].tolist() == [True, False, False]
  assert held['x']['a'][1].dtype == np.float32
  assert held['y'].tolist() == [4, 5, 0]
  # Weights are one for each part of an example.
  assert held['weight'].tolist() == [[1, 1], [1, 1], [0, 0]]


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


# ---- refusals ----------------------------------------------------------------


def _with(**fields) -> dict[str, dict]:
  return {**_clients(), 'bad': {**_fields(2), **fields}}


@pytest.mark.parametrize(
  ('clients', 'message'),
  [
    (
      {'bad': {'x': [1], 'y': [1.0]}},
      r"Client 'bad' lacks the fields \['time'\]; an example consists of "
      r"\['x', 'y', 'weight', 'time'\]",
    ),
    ({'bad': {}}, r"Client 'bad' lacks the fields \['x', 'y', 'time'\]"),
    (
      _with(y=[0.5, np.nan]),
      "Client 'bad', y: example 1 is nan, which is not finite. Drop or repair",
    ),
    (_with(y=[-np.inf, 1.0]), "Client 'bad', y: example 0 is -inf"),
    # Missing whole numbers are nan too, and that is what should be said.
    (_with(x=[1.0, np.nan]), "Client 'bad', x: example 1 is nan"),
    (
      _with(x=[1.0, 2.0]),
      "Client 'bad', x: expected int32, found float64, whose fractions would "
      'be lost. Round the values or change the spec',
    ),
    (
      _with(x=[1, 2**31]),
      "Client 'bad', x: the value 2147483648 does not fit into int32. Change",
    ),
    (_with(y=[1.0, 1e39]), "Client 'bad', y: the value 1e.39 does not fit"),
    (_with(y=[2**24 + 1, 0]), 'the value 16777217 does not fit into float32'),
    (
      _with(y=['3', '4']),
      "Client 'bad', y: expected values of type float32, found <U1 "
      r"\(first value '3'\). Convert them before packing",
    ),
    (_with(y=[None, 4]), r'found object \(first value None\)'),
    (
      _with(time=np.array(['2001-01-01', '2002-01-01'], 'datetime64[s]')),
      r"Client 'bad', time: expected values of type int64, found datetime64",
    ),
    (
      _with(x=[[1, 2], [3, 4]]),
      r"Client 'bad', x: expected one example to have shape \(\), found \(2,\)",
    ),
    (_with(y=3.0), r'y: expected one example to have shape \(\), found \(\)'),
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
    examples.pack(clients, _SPEC)


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
  with pytest.raises(
    examples.ClientDataError, match=f"Client 'bad'.*{message}"
  ):
    examples.pack({'bad': {'x': value, 'y': [0.0, 1.0]}}, spec)


def test_numbers_are_no_strings():
  with pytest.raises(examples.ClientDataError, match='type string, found int'):
    examples.check_array([1], tf.TensorSpec([], tf.string), 'here')


def test_an_empty_client_is_refused():
  with pytest.raises(
    examples.EmptyClientError,
    match="Client 'nobody' has no examples. Leave it out, or pass "
    '`min_examples`',
  ):
    examples.pack({**_clients(), 'nobody': _fields(0)}, _SPEC)


def test_a_client_that_no_bucket_holds_is_refused():
  with pytest.raises(
    examples.ClientDataError,
    match="Client 'cid' has 8 examples but the largest bucket holds 7. Add a "
    'larger one to `capacities`',
  ):
    examples.pack(_clients(), _SPEC, capacities=[2, 7])


def test_an_unknown_client_is_refused():
  population = examples.pack(_clients(), _SPEC)
  with pytest.raises(
    examples.ClientDataError, match="no client 'zoe' among the 5 clients"
  ):
    population.cohort(['ann', 'zoe'], _seeds(2))


# ---- small clients -----------------------------------------------------------


def test_small_clients_are_filtered_and_counted(caplog):
  clients = {**_clients(), 'nobody': _fields(0)}
  with caplog.at_level(logging.INFO):
    population = examples.pack(clients, _SPEC, min_examples=3)
  assert population.client_ids == ('ann', 'cid', 'eve')
  assert population.num_filtered == 3
  assert population.num_examples == 16
  assert (
    'Left out 3 of 6 clients, which have fewer than 3 examples.' in caplog.text
  )


def test_nothing_is_logged_where_nobody_is_filtered(caplog):
  with caplog.at_level(logging.INFO):
    examples.pack(_clients(), _SPEC, min_examples=1)
  assert not caplog.text


@pytest.mark.parametrize('clients', [_clients(), {}], ids=['small', 'none'])
def test_no_eligible_client_is_refused(clients):
  with pytest.raises(
    examples.NoEligibleClientError,
    match=f'None of {len(clients)} clients has the 9 examples that it takes. '
    'Lower `min_examples` or give more data',
  ):
    examples.pack(clients, _SPEC, min_examples=9)


# ---- cohorts -----------------------------------------------------------------


def test_a_cohort_is_a_sequence_of_slices_of_its_source():
  population = examples.pack(_clients(), _SPEC, capacities=[2, 8])
  members = ['eve', 'bob', 'cid', 'ann', 'bob']  # A client may come twice.
  cohort = population.cohort(members, _seeds(5))
  assert isinstance(cohort, collections.abc.Sequence)
  assert cohort.client_ids == tuple(members)
  assert len(cohort) == len(list(cohort)) == 5
  for place, (client, seed) in enumerate(zip(members, _seeds(5), strict=True)):
    _check_client(cohort[place], client, seed)
    _check_client(cohort[place - 5], client, seed)
    _check_client(cohort[np.int64(place)], client, seed)
  for value, place in zip(cohort[3:0:-2], [3, 1], strict=True):
    _check_client(value, members[place], _seeds(5)[place])
  for place in (5, -6):
    with pytest.raises(IndexError, match='The cohort has 5 clients'):
      cohort[place]
  with pytest.raises(TypeError):
    cohort['eve']


def test_a_cohort_tells_which_rows_it_consists_of():
  population = examples.pack(_clients(), _SPEC, capacities=[2, 8])
  cohort = population.cohort(['eve', 'bob', 'cid'], _seeds(3))
  large = max(cohort.groups, key=lambda group: len(group.positions))
  assert large.positions.tolist() == [0, 2]
  np.testing.assert_array_equal(
    large.resident['count'][large.rows], [_COUNTS['eve'], _COUNTS['cid']]
  )
  np.testing.assert_array_equal(large.given['seed'], _seeds(3)[[0, 2]])
  # The same objects round after round, so that a runtime may keep a copy.
  again = population.cohort(['cid'], _seeds(1))
  assert again.groups[0].resident is large.resident


def test_a_cohort_may_be_empty():
  for source in (examples.pack(_clients(), _SPEC), _reader()):
    cohort = source.cohort([], np.zeros([0, 2], np.int32))
    assert len(cohort) == 0
    assert not list(cohort)
    assert not cohort.groups


# ---- readers -----------------------------------------------------------------


def _read(client: str) -> dict[str, np.ndarray]:
  return _clients()[client]


def _reader(**options) -> examples.Reader:
  return examples.Reader(list(_COUNTS), _read, _SPEC, **options)


def test_a_reader_makes_the_cohorts_of_a_population():
  population = examples.pack(_clients(), _SPEC, capacities=[4, 8])
  reader = _reader(capacities=[4, 8])
  assert reader.client_ids == population.client_ids
  assert len(reader) == len(population)
  members = ['dot', 'cid', 'bob', 'cid']
  for one, other in zip(
    reader.cohort(members, _seeds(4)),
    population.cohort(members, _seeds(4)),
    strict=True,
  ):
    tf.nest.map_structure(np.testing.assert_array_equal, one, other)


def test_a_reader_loads_the_cohort_and_nobody_else():
  loaded = []

  def read(client):
    loaded.append(client)
    return _read(client)

  reader = dataclasses.replace(_reader(), read=read)
  cohort = reader.cohort(['eve', 'ann'], _seeds(2))
  list(cohort)
  assert loaded == ['eve', 'ann']


def test_a_reader_can_be_pickled():
  reader = pickle.loads(pickle.dumps(_reader(capacities=[8])))
  (value,) = reader.cohort(['dot'], _seeds(1))
  _check_client(value, 'dot', _seeds(1)[0])


def test_a_reader_names_whose_data_are_bad():
  reader = dataclasses.replace(_reader(), read=lambda client: {'x': [1]})
  with pytest.raises(examples.ClientDataError, match="'eve' lacks the fields"):
    reader.cohort(['eve'], _seeds(1))
  reader = dataclasses.replace(_reader(), read=lambda client: _fields(0))
  with pytest.raises(examples.EmptyClientError, match="'eve' has no examples"):
    reader.cohort(['eve'], _seeds(1))
  with pytest.raises(
    examples.ClientDataError, match="'cid' has 8 examples but the largest"
  ):
    _reader(capacities=[5]).cohort(['ann', 'cid'], _seeds(2))


# ---- data frames -------------------------------------------------------------


def _frame() -> pd.DataFrame:
  """The examples of all clients, one client's not next to one another."""
  rows = [
    (client, x, y, time, place)
    for client, fields in _clients().items()
    for place, (x, y, time) in enumerate(
      zip(fields['x'], fields['y'], fields['time'], strict=True)
    )
  ]
  rows.sort(key=lambda row: row[-1])
  return pd.DataFrame(
    [row[:-1] for row in rows], columns=['user', 'item', 'rating', 'when']
  )


def _from_frame(frame: pd.DataFrame, **options) -> examples.Population:
  return examples.from_pandas(
    frame,
    _SPEC,
    **{
      'client_id': 'user',
      'inputs': 'item',
      'labels': 'rating',
      'fields': {'time': 'when'},
      **options,
    },
  )


def test_rows_of_a_frame_go_to_their_clients_in_order():
  population = _from_frame(_frame())
  assert population.client_ids == tuple(sorted(_COUNTS))
  cohort = population.cohort(list(_COUNTS), _seeds(5))
  for value, client, seed in zip(cohort, _COUNTS, _seeds(5), strict=True):
    _check_client(value, client, seed)


def test_a_frame_may_hold_several_inputs_vectors_and_weights():
  spec = collections.OrderedDict(
    x=collections.OrderedDict(
      item=tf.TensorSpec([], tf.int32), user=tf.TensorSpec([2], tf.float32)
    ),
    y=tf.TensorSpec([], tf.float32),
    weight=examples.WEIGHT_SPEC,
  )
  frame = pd.DataFrame(
    {
      'who': [7, 3, 7],
      'item': [1, 2, 3],
      'traits': [[0.5, 1.0], [2.0, 2.5], [3.0, 3.5]],
      'rating': [4, 5, 3],
      'trust': [0.5, 1.0, 0.25],
    }
  )
  population = examples.from_pandas(
    frame,
    spec,
    client_id='who',
    inputs={'item': 'item', 'user': 'traits'},
    labels='rating',
    weight='trust',
  )
  assert population.client_ids == ('3', '7')
  (value,) = population.cohort(['7'], _seeds(1))
  held = value['examples']
  np.testing.assert_array_equal(held['x']['item'], [1, 3])
  np.testing.assert_array_equal(held['x']['user'], [[0.5, 1.0], [3.0, 3.5]])
  np.testing.assert_array_equal(held['weight'], [0.5, 0.25])


def test_small_clients_of_a_frame_are_filtered_and_counted(caplog):
  with caplog.at_level(logging.INFO):
    population = _from_frame(_frame(), min_examples=3)
  assert population.client_ids == ('ann', 'cid', 'eve')
  assert population.num_filtered == 2
  assert 'Left out 2 of 5 clients' in caplog.text
  (value,) = population.cohort(['eve'], _seeds(1))
  _check_client(value, 'eve', _seeds(1)[0])


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (
      {'inputs': 'movie', 'weight': 'trust'},
      r"has no columns \['trust', 'movie'\]; it has "
      r"\['user', 'item', 'rating', 'when'\]",
    ),
    ({'client_id': 'who'}, r"no columns \['who'\]"),
    ({'inputs': {'a': 'item', 'b': 'movie'}}, r"no columns \['movie'\]"),
    ({'fields': {}}, r"The data frame lacks the fields \['time'\]"),
    ({'inputs': 'rating'}, 'The data frame, x: expected int32, found float64'),
    ({'labels': 'user'}, "found object .first value 'ann'"),
  ],
)
def test_columns_that_do_not_fit_are_refused(options, message):
  with pytest.raises(examples.ClientDataError, match=message):
    _from_frame(_frame(), **options)


def test_a_row_without_a_value_or_a_client_is_refused():
  frame = _frame()
  frame.loc[4, 'rating'] = np.nan
  with pytest.raises(examples.ClientDataError, match='y: example 4 is nan'):
    _from_frame(frame)
  frame = _frame()
  frame.loc[6, 'user'] = None
  with pytest.raises(
    examples.ClientDataError, match="Row 6 .* has no client: 'user' is missing"
  ):
    _from_frame(frame)


@pytest.mark.parametrize(
  ('frame', 'count'), [(_frame(), 5), (_frame()[:0], 0)], ids=['small', 'empty']
)
def test_a_frame_without_eligible_client_is_refused(frame, count):
  with pytest.raises(
    examples.NoEligibleClientError, match=f'None of {count} clients has the 9'
  ):
    _from_frame(frame, min_examples=9)


# ---- TFF's data sets ---------------------------------------------------------


def _client_data(**form) -> tff.simulation.datasets.TestClientData:
  return tff.simulation.datasets.TestClientData(
    {
      client: collections.OrderedDict(
        (form.get(name, name), array) for name, array in fields.items()
      )
      for client, fields in _clients().items()
    }
  )


def test_clients_of_tff_are_read_into_memory():
  population = examples.from_tff(_client_data(), _SPEC)
  assert population.client_ids == tuple(sorted(_COUNTS))
  cohort = population.cohort(list(_COUNTS), _seeds(5))
  for value, client, seed in zip(cohort, _COUNTS, _seeds(5), strict=True):
    _check_client(value, client, seed)


def test_examples_of_tff_may_need_another_form(caplog):
  def to_fields(example):
    return {'x': example['item'], 'y': example['y'], 'time': example['time']}

  with caplog.at_level(logging.INFO):
    population = examples.from_tff(
      _client_data(x='item'),
      _SPEC,
      to_fields=to_fields,
      client_ids=['cid', 'bob', 'eve'],
      min_examples=2,
      capacities=[9],
    )
  assert population.client_ids == ('cid', 'eve')
  assert 'Left out 1 of 3 clients' in caplog.text
  cohort = population.cohort(['eve', 'cid'], _seeds(2))
  for value, client, seed in zip(
    cohort, ('eve', 'cid'), _seeds(2), strict=True
  ):
    assert len(value['examples']['y']) == 9
    _check_client(value, client, seed)


class _Pairs:
  """A data set of pairs, of which one client has none."""

  client_ids = ['one', 'none']

  def create_tf_dataset_for_client(self, client: str) -> tf.data.Dataset:
    count = 3 if client == 'one' else 0
    pairs = tf.data.Dataset.from_tensor_slices(
      (np.arange(3, dtype=np.int32), np.ones([3, 2], np.float32))
    )
    return pairs.take(count)


def test_pairs_of_tff_are_inputs_and_labels(caplog):
  spec = collections.OrderedDict(
    x=tf.TensorSpec([], tf.int32),
    y=tf.TensorSpec([2], tf.float32),
    weight=examples.WEIGHT_SPEC,
  )
  with pytest.raises(examples.EmptyClientError, match="'none' has no examples"):
    examples.from_tff(_Pairs(), spec)
  population = examples.from_tff(_Pairs(), spec, min_examples=1)
  assert population.client_ids == ('one',)
  (value,) = population.cohort(['one'], _seeds(1))
  assert value['examples']['x'].tolist() == [0, 1, 2]
  assert value['examples']['y'].tolist() == [[1, 1]] * 3


def test_examples_of_tff_that_do_not_fit_are_refused():
  with pytest.raises(examples.ClientDataError, match="'ann' lacks .*'x'"):
    examples.from_tff(_client_data(x='item'), _SPEC)


def test_the_value_of_a_client_has_this_type():
  assert examples.client_spec(_SPEC) == collections.OrderedDict(
    examples=collections.OrderedDict(
      x=tf.TensorSpec([None], tf.int32),
      y=tf.TensorSpec([None], tf.float32),
      weight=tf.TensorSpec([None], tf.float32),
      time=tf.TensorSpec([None], tf.int64),
    ),
    count=tf.TensorSpec([], tf.int32),
    seed=tf.TensorSpec([2], tf.int32),
  )
