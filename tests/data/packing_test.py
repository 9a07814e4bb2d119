"""Clients made of dictionaries, of data frames, and of TFF's data sets."""

import collections
import logging

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import small_clients
from tests.support.small_clients import real_examples
from tff_partial.data import examples
from tff_partial.data import frames
from tff_partial.data import packing
from tff_partial.data import populations
from tff_partial.data import vocabularies
from tff_partial.data.examples import ClientDataError


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
    },
    'y': [4, 5],
  }
  population = packing.pack({'ann': fields}, spec, capacities=[3])
  (value,) = population.cohort(['ann'], small_clients.seeds(1))
  held = value['examples']
  assert list(held['x']) == ['words', 'a']
  assert held['x']['words'].tolist() == [['aha', 'b'], ['c', 'd'], [b'', b'']]
  assert held['x']['a'][0].tolist() == [True, False, False]
  assert held['x']['a'][1].dtype == np.float32
  assert held['y'].tolist() == [4, 5, 0]
  # Weights are one for each part of an example.
  assert held['weight'].tolist() == [[1, 1], [1, 1], [0, 0]]


_NAMED = collections.OrderedDict(
  x=tf.TensorSpec([], tf.int32),
  y=tf.TensorSpec([], tf.float32),
  weight=examples.WEIGHT_SPEC,
)
_OF_ITEMS = collections.OrderedDict(
  _NAMED, x=collections.OrderedDict(item=_NAMED['x'])
)


@pytest.mark.parametrize(
  ('clients', 'options', 'message'),
  [
    (
      {'ann': {'x': {'item': [1], 'itme': [2]}, 'y': [0.0]}},
      {'example_spec': _OF_ITEMS},
      r"'ann', x: unknown key 'itme'; did you mean 'item'\?",
    ),
    (
      {'ann': {'x': ['a', None], 'y': [1, 2]}},
      {'example_spec': {**_NAMED, 'x': tf.TensorSpec([], tf.string)}},
      "'ann', x: example 1 is None, where texts",
    ),
    (
      small_clients.clients(),
      {'capacities': [2, 7]},
      "Client 'cid' has 8 examples but the largest bucket holds 7. Add a "
      'larger one to `capacities`',
    ),
    *(
      (
        clients,
        {'min_examples': 9},
        f'None of {len(clients)} clients has the 9 examples that it takes. '
        'Lower `min_examples` or give more data',
      )
      for clients in (small_clients.clients(), {})
    ),
  ],
)
def test_clients_that_cannot_be_packed_are_refused(clients, options, message):
  options = {'example_spec': small_clients.SPEC, **options}
  with pytest.raises(ClientDataError, match=message):
    packing.pack(clients, **options)


# ---- small clients -----------------------------------------------------------


def test_small_clients_are_filtered_and_counted(caplog):
  clients = {**small_clients.clients(), 'nobody': small_clients.fields(0)}
  with caplog.at_level(logging.INFO, 'absl'):
    population = packing.pack(clients, small_clients.SPEC, min_examples=3)
  assert population.client_ids == ('ann', 'cid', 'eve')
  assert population.num_filtered == 3
  assert population.num_examples == 16
  assert (
    'Left out 3 of 6 clients, which have fewer than 3 examples.' in caplog.text
  )


# ---- data frames -------------------------------------------------------------


def _frame() -> pd.DataFrame:
  """The examples of all clients, one client's not next to one another."""
  rows = [
    (client, x, y, time, place)
    for client, fields in small_clients.clients().items()
    for place, (x, y, time) in enumerate(
      zip(fields['x'], fields['y'], fields['time'], strict=True)
    )
  ]
  rows.sort(key=lambda row: row[-1])
  return pd.DataFrame(
    [row[:-1] for row in rows], columns=['user', 'item', 'rating', 'when']
  )


def _from_frame(frame: pd.DataFrame, **options) -> populations.Population:
  return frames.from_pandas(
    frame,
    **{
      'example_spec': small_clients.SPEC,
      'client_id': 'user',
      'inputs': 'item',
      'labels': 'rating',
      'fields': {'time': 'when'},
      **options,
    },
  )


def test_rows_of_a_frame_go_to_their_clients_in_order():
  population = _from_frame(_frame())
  assert population.client_ids == tuple(sorted(small_clients.COUNTS))
  small_clients.check_cohort(population, list(small_clients.COUNTS))


def test_a_frame_may_hold_several_inputs_labels_and_weights():
  spec = collections.OrderedDict(
    x=collections.OrderedDict(
      item=tf.TensorSpec([], tf.int32), user=tf.TensorSpec([2], tf.float32)
    ),
    y=collections.OrderedDict(
      stars=tf.TensorSpec([], tf.float32), likes=tf.TensorSpec([2], tf.int32)
    ),
    weight=examples.WEIGHT_SPEC,
  )
  traits = [[0.5, 1.0], [2.0, 2.5], [3.0, 3.5]]
  frame = pd.DataFrame({'who': [7, 3, 7], 'item': [1, 2, 3], 'traits': traits})
  population = frames.from_pandas(
    frame.assign(rating=[4, 5, 3], trust=[0.5, 1.0, 0.25], seen=[0, 1, 1]),
    spec,
    client_id='who',
    inputs={'item': 'item', 'user': 'traits'},
    labels={'stars': 'rating', 'likes': ['seen', 'item']},
    weight='trust',
  )
  assert population.client_ids == ('3', '7')
  (value,) = population.cohort(['7'], small_clients.seeds(1))
  held = value['examples']
  np.testing.assert_array_equal(held['x']['item'], [1, 3])
  np.testing.assert_array_equal(held['x']['user'], [[0.5, 1.0], [3.0, 3.5]])
  np.testing.assert_array_equal(held['y']['stars'], [4.0, 3.0])
  np.testing.assert_array_equal(held['y']['likes'], [[0, 1], [1, 3]])
  np.testing.assert_array_equal(held['weight'], [0.5, 0.25])


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (
      {
        'example_spec': _OF_ITEMS,
        'inputs': {'item': 'item', 'itme': 'item'},
        'fields': {},
      },
      r"unknown input 'itme'; did you mean 'item'\? The model reads "
      r"\['item'\].$",
    ),
    (
      {'fields': {'time': 'when', 'wieght': 'rating'}},
      r"The data frame: unknown field 'wieght'; did you mean 'weight'\?",
    ),
    (
      {'example_spec': {**small_clients.SPEC, 'y': {'stars': _NAMED['y']}}},
      r"labels='rating': the model reads the labels \['stars'\]. Name the "
      "column of each: `labels={'stars': 'column'}`",
    ),
    (
      {'example_spec': {**small_clients.SPEC, 'y': (_NAMED['y'],)}},
      r"'y\[0\]', .* inputs or labels without names, use `pack`",
    ),
    (
      {'inputs': 'movie', 'weight': 'trust'},
      r"has no columns \['movie', 'trust'\]; it has "
      r"\['user', 'item', 'rating', 'when', 'when_as_date', 'large'\]",
    ),
    ({'weight': np.ones(3)}, 'name of a column, found a ndarray'),
    ({'weight': pd.Series([1.0])}, 'name of a column, found a Series'),
    ({'weight': 'ratng'}, "no columns .* Did you mean 'rating'"),
    (
      {'inputs': {'a': 'item', 'b': 'movie'}},
      "the model reads one input. Name the column of each: `inputs='column'`",
    ),
    (
      {'fields': {}},
      "a field 'time', for which no column is named. Say which: "
      "`fields={'time': column}`",
    ),
    (
      {'inputs': 'rating'},
      "Column 'rating': expected int32, found float64, whose fractions",
    ),
    (
      {'labels': 'user'},
      r"Column 'user' holds strings such as 'ann', where float32 is read. "
      r"Number them with `encode=\['user'\]`; if they are numbers",
    ),
    (
      {'time': 'user'},
      r"Column 'user' holds str such as 'ann', whose order need not be that of "
      r"time. .* `pd.to_datetime\(frame\['user'\]\)`, and `dayfirst=True`",
    ),
    ({'fields': {'y': 'large'}}, r"fields: \['y'\] have columns by other arg"),
    (
      {'encode': ['user']},
      r"encode=\['user'\]: \['user'\] are no columns of inputs, labels",
    ),
    (
      {'encode': {'item': vocabularies.Vocabulary([100, 200])}},
      r"Column 'item': row 0 \(client 'ann'\) holds 0, which is not in the "
      'vocabulary of 2 ids, like 16 more. .*unseen=True',
    ),
    ({'client_id': 'large'}, "Column 'large': 9007199254740992.0 may stand"),
    ({'inputs': 'large', 'encode': 'large'}, "'large': 90071.* may stand"),
  ],
)
def test_columns_that_do_not_fit_are_refused(options, message):
  date = pd.Timestamp('2001-02-03')
  frame = _frame().assign(when_as_date=date, large=2.0**53)
  with pytest.raises(ClientDataError, match=message):
    _from_frame(frame, **options)


def test_a_row_without_a_value_or_a_client_is_refused():
  frame = _frame()
  frame.loc[[6, 9], 'user'] = None
  with pytest.raises(
    ClientDataError, match="Column 'user' lacks 2 .* in row 6"
  ):
    _from_frame(frame)
  with pytest.raises(ClientDataError, match='frame has no rows'):
    _from_frame(frame[:0])
  frame = _frame().set_index('when', drop=False)
  frame['rating'] = frame['rating'].replace(1.0, np.inf)
  with pytest.raises(
    ClientDataError,
    match=r"Column 'rating': row 3 \(client 'cid'\) is inf, which is not",
  ):
    _from_frame(frame)


_FILMS = pd.DataFrame(
  {
    'user': ['u', 'v', 'u', 'v', 'u'],
    'film': ['Heat', 'Alien', 'Alien', 'Zorro', 'Heat'],
    'stars': [1, 2, 3, 4, 5],
    'day': pd.to_datetime(
      ['2005-01-01', '2004-01-01', '2001-01-01', '1999-01-01', '2003-01-01']
    ),
  }
)


def _films(
  frame: pd.DataFrame = _FILMS, spec=_NAMED, **options
) -> populations.Population:
  return frames.from_pandas(
    frame,
    spec,
    **{
      'client_id': 'user',
      'inputs': 'film',
      'labels': 'stars',
      'encode': ['film'],
      **options,
    },
  )


def test_strings_are_encoded_by_a_vocabulary_that_is_kept():
  population = _films()
  assert population.vocabularies['film'].values == ('Alien', 'Heat', 'Zorro')
  assert real_examples(population, 'u')['x'].tolist() == [1, 0, 1]
  assert real_examples(population, 'v')['x'].tolist() == [0, 2]
  # Another frame is encoded alike, whatever it holds.
  later = _films(_FILMS[3:], encode=population.vocabularies)
  assert later.vocabularies == population.vocabularies
  assert real_examples(later, 'v')['x'].tolist() == [2]


@pytest.mark.parametrize('kind', [pd.Timestamp, str, 'utc', int])
def test_examples_are_sorted_by_time(kind):
  days = _FILMS['day']
  if kind == 'utc':
    days = days.dt.tz_localize('Asia/Tokyo')
  elif kind is int:
    days = days.dt.year
  population = _films(
    _FILMS.assign(day=days), **({} if kind is str else {'time': 'day'})
  )
  stars = real_examples(population, 'u')['y'].tolist()
  assert stars == ([1, 3, 5] if kind is str else [3, 5, 1])


def test_times_are_the_field_of_a_split_too():
  spec = collections.OrderedDict(_NAMED, time=tf.TensorSpec([], tf.int64))
  population = _films(spec=spec, encode='film', time='day')
  held = real_examples(population, 'v')['time']
  assert held.tolist() == [915148800 * 10**9, 1072915200 * 10**9]


@pytest.mark.parametrize(
  'dtype', ['Int64', 'category', 'object', 'int8', 'Float32', 'bool', 'boolean']
)
def test_types_of_pandas_are_read(dtype):
  frame = _FILMS.assign(stars=(_FILMS['stars'] > 2).astype(int).astype(dtype))
  assert real_examples(_films(frame), 'u')['y'].tolist() == [0.0, 1.0, 1.0]


def test_clients_may_be_named_by_dates():
  population = _films(_FILMS.assign(user=pd.Timestamp('2001-02-03')))
  assert population.client_ids == ('2001-02-03 00:00:00',)


@pytest.mark.parametrize('dtype', ['string', 'category', 'object'])
def test_columns_of_strings_may_be_encoded(dtype):
  frame = _FILMS.astype({'film': dtype, 'user': dtype})
  population = _films(frame)
  assert population.client_ids == ('u', 'v')
  assert real_examples(population, 'u')['x'].tolist() == [1, 0, 1]
  with pytest.raises(
    ClientDataError, match="Column 'film' holds strings such as 'Heat'"
  ):
    _films(frame, encode=())


@pytest.mark.parametrize(
  ('frame', 'message'),
  [
    ({'user': [1]}, 'Expected a pandas data frame, found a dict'),
    (
      pd.concat([_FILMS, _FILMS[['film']]], axis=1),
      "The data frame has 2 columns 'film'. Rename all but one",
    ),
    (
      _FILMS.assign(user=[1, '1', 2, 3, 4]),
      "2 clients have the id '1', or ids that read alike, such as 1 and '1'",
    ),
    (
      _FILMS.assign(stars=[[1, 2], [1, 2], [3], [4, 5], [6, 7]]),
      r"Column 'stars': row 2 \(client 'u'\) holds an array of shape \(1,\), "
      r'other rows one of \(2,\). Pad or cut',
    ),
    (
      # As nanoseconds it would be 1816, before all others.
      _FILMS.assign(day=np.array(['2001', '9999'] * 2 + ['2003'], 'M8[s]')),
      r"Column 'day': row 1 \(client 'v'\) holds 9999-01-01 00:00:00, too far",
    ),
    (
      # They have an order, which is not that of the numbers.
      _FILMS.assign(day=pd.Categorical([1] * 5, [2, 1], ordered=True)),
      "Column 'day' holds int64 such as 1, whose order need not be that of tim",
    ),
    (
      _FILMS.assign(film=range(5)),
      "Column 'film': 0 is a int, but the values .* are like 'Alien'",
    ),
  ],
)
def test_frames_that_cannot_be_read_are_refused(frame, message):
  films = vocabularies.Vocabulary(_FILMS['film'], unseen=True)
  with pytest.raises(ClientDataError, match=message):
    _films(frame, time='day', encode={'film': films})


# ---- TFF's data sets ---------------------------------------------------------


def _client_data(**form) -> tff.simulation.datasets.TestClientData:
  return tff.simulation.datasets.TestClientData(
    {
      client: collections.OrderedDict(
        (form.get(name, name), array) for name, array in fields.items()
      )
      for client, fields in small_clients.clients().items()
    }
  )


def test_clients_of_tff_are_read_into_memory():
  population = packing.from_tff(_client_data(), small_clients.SPEC)
  assert population.client_ids == tuple(sorted(small_clients.COUNTS))
  small_clients.check_cohort(population, list(small_clients.COUNTS))
  with pytest.raises(ClientDataError, match='None of 0 clients'):
    packing.from_tff(_client_data(), small_clients.SPEC, client_ids=[])


def test_examples_of_tff_may_need_another_form(caplog):
  def to_fields(example):
    return {'x': example['item'], 'y': example['y'], 'time': example['time']}

  with caplog.at_level(logging.INFO, 'absl'):
    population = packing.from_tff(
      _client_data(x='item'),
      small_clients.SPEC,
      to_fields=to_fields,
      client_ids=['cid', 'bob', 'eve'],
      min_examples=2,
      capacities=[9],
    )
  assert population.client_ids == ('cid', 'eve')
  assert 'Left out 1 of 3 clients' in caplog.text
  small_clients.check_cohort(population, ['eve', 'cid'])
  (value,) = population.cohort(['eve'], small_clients.seeds(1))
  assert len(value['examples']['y']) == 9


# ---- which values are taken --------------------------------------------------


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
      _with(weight=[1.0, -2.0]),
      "Client 'bad', weight: example 1 is -2.0, and a weight is not negative",
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
      r"Client 'bad', x: expected one example to have shape \(\), found \(2,\)"
      '. Reshape the data, or describe',
    ),
    (
      _with(y=[[1.0], [1.0, 2.0]]),
      r"Client 'bad', y: the examples differ in shape. Pad or cut them",
    ),
    (
      _with(y=[1.0]),
      "Client 'bad': fields have different numbers of examples: .1, 2.",
    ),
    (_with(y=np.ma.masked_greater([1, 999], 9)), 'y: values are masked'),
    (
      {1: small_clients.fields(1), '1': small_clients.fields(1)},
      'ids that read alike',
    ),
    (
      {'bad': small_clients.fields(0)},
      "Client 'bad' has no examples. Leave it out, or pass `min_examples`",
    ),
  ],
)
def test_bad_examples_are_refused(clients, message):
  with pytest.raises(ClientDataError, match=message):
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
  with pytest.raises(ClientDataError, match=said):
    packing.pack({'bad': {'x': value, 'y': [0.0, 1.0]}}, spec)


def test_class_numbers_in_place_of_one_hot_labels_have_their_loss_named():
  with pytest.raises(ClientDataError, match='take sparse_categorical_crossen'):
    examples.check_array([1], tf.TensorSpec([3], tf.float32), 'y')


def test_numbers_are_no_strings():
  with pytest.raises(ClientDataError, match='type string, found int'):
    examples.check_array([1], tf.TensorSpec([], tf.string), 'here')
