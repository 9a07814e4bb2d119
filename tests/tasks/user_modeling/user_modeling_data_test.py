"""Tests of the records of user modeling: filters, files, splits, invention."""

import os
import pathlib

import numpy as np
import pandas as pd
import pytest

from tasks.errors import DataError
from tasks.user_modeling import assist_files
from tasks.user_modeling import movielens_files
from tasks.user_modeling import parts
from tasks.user_modeling import records
from tasks.user_modeling import synthetic

_REAL = pathlib.Path(os.environ.get('TFF_PARTIAL_DATA_DIR') or '/nowhere')

# ---- records -----------------------------------------------------------------

_TAGS = records.Tags(
  item=np.array([10, 20, 30, 30, 40, 30]),
  attribute=np.array([5, 5, 9, 5, 8, 9]),
  names={5: 'sums', 8: 'angles', 9: 'areas'},
)


def _build(**changes) -> records.Records:
  arguments = {
    # School x has the users 1 and 7, school y has another user 1.
    'client': np.array(['y', 'x', 'x', 'x', 'y']),
    'user': np.array([1, 7, 1, 7, 1]),
    'item': np.array([30, 10, 30, 20, 20]),
    'answer': np.array([1.0, 0.0, 1.0, 1.0, 0.0]),
    'tags': _TAGS,
    'scale': (0.0, 1.0),
  }
  return records.build('small', **{**arguments, **changes})


def test_records_are_sorted_and_numbered_within_their_client():
  built = _build()
  assert built.clients == ('x', 'y')
  assert built.user_names == (('1', '7'), ('1',))
  assert built.item_names == ('10', '20', '30')
  # The order of the files is kept within a user.
  assert built.place.tolist() == [2, 1, 3, 0, 4]
  assert built.client.tolist() == [0, 0, 0, 1, 1]
  assert built.user.tolist() == [0, 1, 1, 0, 0]
  assert built.public_item.tolist() == [2, 0, 1, 2, 1]
  # School y has no item 10, so that its first item is 20.
  assert built.item.tolist() == [2, 0, 1, 1, 0]
  assert [own.tolist() for own in built.own_items] == [[0, 1, 2], [1, 2]]
  assert built.answer.tolist() == [1.0, 0.0, 1.0, 1.0, 0.0]
  assert [*map(len, built.user_names)] == [2, 1]
  assert [*map(len, built.own_items)] == [3, 2]
  for name in ('client', 'user', 'item', 'public_item', 'attributes'):
    assert getattr(built, name).dtype == np.int32
  assert built.answer.dtype == np.float32


def test_attributes_are_those_of_the_items_that_are_there():
  built = _build()
  # Item 40 has no record, so that angles get no number.
  assert built.attribute_names == ('sums', 'areas')
  assert (built.num_attributes, built.num_items) == (2, 3)
  assert built.item_attributes.tolist() == [[0, -1], [0, -1], [0, 1]]
  expected = [[0, 1], [0, -1], [0, -1], [0, 1], [0, -1]]
  assert built.attributes.tolist() == expected


def test_counts_are_those_of_table_1():
  built = _build()
  assert built.describe() == {
    'clients': 2,
    'users': 3,
    'items': 3,
    'records': 5,
    'attributes': 2,
    'attributes_per_item': pytest.approx(4 / 3),
    'attributes_per_record': pytest.approx(7 / 5),
    'left_out': {},
  }
  # The user 7 alone: two records of items with one attribute.
  alone = built.take(np.array([1, 2])).describe()
  assert (alone['users'], alone['items'], alone['attributes']) == (1, 2, 1)
  assert built.take(np.zeros(5, bool)).describe()['attributes_per_item'] == 0.0


def test_a_part_keeps_all_names_and_numbers():
  own = _build().of_client(1)
  assert len(own) == 2
  assert own.place.tolist() == [0, 4]
  assert own.item.tolist() == [1, 0]
  assert len(own.own_items[0]) == 3
  assert own.clients == ('x', 'y')


def test_clients_with_few_users_or_records_are_left_out():
  # a: 2 users with 3 records each; b: 1 user with 9; c: 2 users with 1 each.
  client = np.repeat(['a', 'b', 'c'], [6, 9, 2])
  user = np.concatenate([[1, 1, 1, 2, 2, 2], [3] * 9, [4, 5]])
  ones = np.full(17, 10)
  arrays = {'client': client, 'user': user, 'item': ones, 'answer': ones > 0}
  built = _build(**arrays, min_users=2, min_records_per_user=3.0)
  assert built.clients == ('a',)
  assert len(built) == 6
  assert built.left_out == {
    'clients_with_few_users': 1,
    'clients_with_few_records': 1,
    'users_of_these_clients': 3,
    'records_of_these_clients': 11,
  }
  # Three records on average are not fewer than three; four are more.
  with pytest.raises(DataError, match='none of 3 clients has at least 2 users'):
    _build(**arrays, min_users=2, min_records_per_user=4.0)


def test_records_that_cannot_be_are_refused():
  none = dict.fromkeys(('client', 'user', 'item', 'answer'), np.zeros(0))
  with pytest.raises(DataError, match='there are no records'):
    _build(**none)
  said = '2 of 3 items have no attribute, such as the item 77'
  with pytest.raises(DataError, match=said):
    _build(item=np.array([10, 10, 77, 88, 10]))


# ---- splits ------------------------------------------------------------------


def _users_of(*sizes: int) -> records.Records:
  """One client whose users have that many items each, all of them twice."""
  user = np.repeat(np.arange(len(sizes)), sizes)
  item = np.concatenate([np.arange(size) for size in sizes])
  user, item = np.tile(user, 2), np.tile(item, 2)
  items, none = np.unique(item), np.zeros(len(user), int)
  tags = records.Tags(items, np.zeros(len(items), int), {0: 'any'})
  return _build(client=none, user=user, item=item, answer=none, tags=tags)


def test_each_users_pairs_are_divided_by_rounded_shares():
  sizes = (25, 1, 2, 3, 7, 10, 75)
  own = _users_of(*sizes)
  codes = parts.divide(own)
  assert codes.dtype == np.int8
  counts = [np.bincount(codes[own.user == u], minlength=3) for u in range(7)]
  # Pairs that train, validate and test. Of 75, 15 test and 6 of 60 validate; of
  # 7, 1.4 and 0.6 are rounded; 0.1 * 5 would be rounded upward.
  pairs = [18, 2, 5], [1, 0, 0], [2, 0, 0], [2, 0, 1], [5, 1, 1], [7, 1, 2]
  expected = 2 * np.array([*pairs, [54, 6, 15]])
  assert np.array(counts).tolist() == expected.tolist()


def test_a_repeated_pair_lies_in_one_part():
  own = _users_of(30, 40)
  codes = parts.divide(own)
  frame = pd.DataFrame({'user': own.user, 'item': own.item, 'code': codes})
  part_of = frame.groupby(['user', 'item'])['code']
  assert len(part_of) == 70 and (part_of.nunique() == 1).all()


def test_a_split_belongs_to_its_seed_and_repetition():
  own = _users_of(40)
  codes = parts.divide(own, seed=3, repeat=1)
  assert np.array_equal(codes, parts.divide(own, seed=3, repeat=1))
  for seed, repeat in ((3, 0), (4, 1), (1, 3)):
    other = parts.divide(own, seed=seed, repeat=repeat)
    assert not np.array_equal(codes, other)


def test_a_clients_split_depends_on_its_own_records_only():
  many = synthetic.generate(3, 6, 12, num_items=30, seed=1)
  codes = parts.divide(many)
  alone = many.client == 1
  assert np.array_equal(parts.divide(many.take(alone)), codes[alone])
  # Nor does the order of the records matter.
  order = np.random.default_rng(0).permutation(len(many))
  assert np.array_equal(parts.divide(many.take(order)), codes[order])


# ---- ASSISTments -------------------------------------------------------------

_HEADER = (
  'user_id,position,problem_id,skill,skill_name,correct,teacher_id,school_id'
)
# Student 5 meets problem 80, of two skills, twice; the first answer is wrong.
_LOGS = (
  '5,0,80,3,Mean,0,70,1',
  '5,1,80,4,"Area, Circle",0,70,1',
  '5,2,80,3,Mean,1,70,1',
  '5,3,80,4,"Area, Circle",1,70,1',
  '5,4,81,4,"Area, Circle",1,70,1',
  '2,0,81,4,"Area, Circle",0,60,1',
)


def _write_logs(
  folder: pathlib.Path, rows=_LOGS, header: str = _HEADER, end: str = '\n'
) -> pathlib.Path:
  text = '\n'.join([header, *rows]) + end
  path = folder / assist_files.FILE
  path.write_bytes(text.encode('latin-1'))
  return path


def _load_logs(folder: pathlib.Path, **options) -> records.Records:
  limits = {'min_users': 1, 'min_records_per_user': 1.0}
  return assist_files.load(folder, **{**limits, **options})


@pytest.mark.parametrize('rows', [_LOGS, _LOGS[::-1]])
def test_rows_of_one_attempt_are_one_record(tmp_path, rows):
  """They are ordered by their positions."""
  _write_logs(tmp_path, rows)
  loaded = _load_logs(tmp_path)
  assert loaded.clients == ('60', '70')
  assert loaded.attribute_names == ('Mean', 'Area, Circle')
  assert loaded.item_names == ('80', '81')
  assert loaded.public_item.tolist() == [1, 0, 0, 1]
  assert loaded.answer.tolist() == [0.0, 0.0, 1.0, 1.0]
  assert loaded.item_attributes.tolist() == [[0, 1], [1, -1]]


@pytest.mark.parametrize(
  ('skills', 'correct', 'attempts'),
  [('34', '11', 1), ('3434', '1111', 2), ('3344', '1111', 2)]
  + [('33', '11', 2), ('34', '10', 2), ('343', '111', 2)],
)
def test_skills_and_answers_begin_attempts(skills, correct, attempts, tmp_path):
  """An attempt ends where one comes again."""
  rows = [
    f'5,{position},80,{skill},Skill {skill},{correct[position]},70,1'
    for position, skill in enumerate(skills)
  ]
  _write_logs(tmp_path, rows)
  assert len(_load_logs(tmp_path)) == attempts


def test_teachers_with_few_students_are_left_out(tmp_path):
  rows = [
    f'{100 * teacher + student},{position},80,3,Mean,1,{teacher},1'
    for teacher, students in ((1, 5), (2, 4))
    for student in range(students)
    for position in range(5)
  ]
  (tmp_path / 'assistments').mkdir()
  _write_logs(tmp_path / 'assistments', rows)
  loaded = assist_files.load(tmp_path)
  assert loaded.clients == ('1',)
  assert loaded.left_out == {
    'clients_with_few_users': 1,
    'users_of_these_clients': 4,
    'records_of_these_clients': 20,
  }


def _changed(line: int, old: str, new: str) -> tuple[str, ...]:
  """The logs with one line changed; the header is line 1."""
  rows = list(_LOGS)
  assert old in rows[line - 2]
  rows[line - 2] = rows[line - 2].replace(old, new)
  return tuple(rows)


@pytest.mark.parametrize(
  ('rows', 'message'),
  [
    (_changed(4, '80', ''), "line 4: 'problem_id' should be .*, found ''"),
    (_changed(4, '1,70', '2,70'), "'correct' should be 0 or 1, found '2'"),
    (_changed(4, ',70,1', ',70,1,1'), 'Expected 8 fields in line 4, saw 9'),
    ((), 'line 2: the table has no rows'),
    (
      _changed(4, ',70,', ',60,'),
      'line 4: a student has one teacher, but user_id 5 has the teacher_id 60 '
      'here and 70 before',
    ),
    (_changed(4, '5,2', '5,1'), 'line 4: a position has one answer'),
  ],
)
def test_a_damaged_line_is_named(rows, message, tmp_path):
  path = _write_logs(tmp_path, rows)
  with pytest.raises(DataError, match=message) as caught:
    _load_logs(tmp_path)
  assert str(caught.value).startswith(f'{path}')
  assert 'Correct the line, or fetch the file again.' in str(caught.value)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'rows': _changed(4, 'Mean', 'Mean \xe9')},
      'teacher.csv: .* byte 0xe9 .* as UTF-8',
    ),
    ({'end': ''}, 'it is cut off in line 7'),
    (
      {'header': _HEADER.replace('correct', 'right')},
      "line 1: .*the column 'correct' is missing.*needed are user_id",
    ),
    (
      {'header': _HEADER.replace('school', 'teacher')},
      "line 1: .*'teacher_id' is there 2 times.*needed are user_id",
    ),
  ],
)
def test_a_damaged_file_is_refused(changes, message, tmp_path):
  _write_logs(tmp_path, **changes)
  with pytest.raises(DataError, match=f'(?s){message}'):
    _load_logs(tmp_path)


def test_marks_and_line_ends_of_other_systems_are_read(tmp_path):
  path = _write_logs(tmp_path)
  text = path.read_bytes()
  expected = assist_files.read(path)
  path.write_bytes(b'\xef\xbb\xbf' + text.replace(b'\n', b'\r\n'))
  assert assist_files.read(path).equals(expected)
  # White space around names and numbers is no part of them.
  path.write_bytes(text.replace(b'Mean,0', b'Mean ,0 '))
  assert assist_files.read(path).equals(expected)


def test_a_missing_file_is_named_with_the_ways_out(tmp_path):
  with pytest.raises(DataError, match='no data folder is named'):
    assist_files.load('')
  for folder in (tmp_path, tmp_path / 'none', __file__):
    with pytest.raises(DataError) as caught:
      assist_files.load(folder)
    said = str(caught.value)
    assert said.startswith(f'{folder}: there is no file {assist_files.FILE} in')
    for way in ('--data_dir', 'TFF_PARTIAL_DATA_DIR', '--data=synthetic'):
      assert way in said


# ---- MovieLens ---------------------------------------------------------------

_GENRES = ['unknown', *(f'Genre {number}' for number in range(1, 19))]
_ZIPS = {1: '55455', 2: '50010', 3: '02139', 4: 'V3N4P'}
# User, movie and rating.
_RATINGS = ((1, 6, 4), (2, 6, 5), (2, 8, 1), (3, 8, 3), (4, 7, 2))
# Movie to its genres.
_MOVIES = {6: (1, 5), 7: (18,), 8: (5,)}


def _movie(number: int, genres: tuple[int, ...]) -> str:
  flags = '|'.join('1' if genre in genres else '0' for genre in range(19))
  return f'{number}|Film {number}|01-Jan-1995||http://film|{flags}'


def _write_movielens(folder: pathlib.Path, **changes) -> pathlib.Path:
  files = {
    'u_data': [f'{u}\t{i}\t{r}\t88000{u}{i}' for u, i, r in _RATINGS],
    'u_user': [f'{u}|30|F|other|{code}' for u, code in _ZIPS.items()],
    'u_item': [_movie(*movie) for movie in _MOVIES.items()],
    'u_genre': [f'{name}|{code}' for code, name in enumerate(_GENRES)],
  }
  place = folder / 'movielens' / 'ml-100k'
  place.mkdir(parents=True)
  for name, lines in {**files, **changes}.items():
    text = ''.join(f'{line}\n' for line in lines)
    (place / name.replace('_', '.')).write_text(text)
  return place


def test_regions_are_clients(tmp_path):
  _write_movielens(tmp_path)
  loaded = movielens_files.load(tmp_path, min_users=1)
  assert loaded.clients == ('0', '5')
  assert loaded.user_names == (('3',), ('1', '2'))
  # Film 7 is rated by the user without a region only.
  assert loaded.item_names == ('6', '8')
  assert loaded.attribute_names == ('Genre 1', 'Genre 5')
  assert loaded.item_attributes.tolist() == [[0, 1], [1, -1]]
  assert loaded.client.tolist() == [0, 1, 1, 1]
  assert loaded.public_item.tolist() == [1, 0, 0, 1]
  assert loaded.answer.tolist() == [3.0, 4.0, 5.0, 1.0]
  assert loaded.scale == (1.0, 5.0)
  without = {'users_without_region': 1, 'records_without_region': 1}
  assert loaded.left_out == without
  loaded = movielens_files.load(tmp_path, min_users=2)
  assert loaded.clients == ('5',)
  assert loaded.left_out['clients_with_few_users'] == 1


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'u_item': [_movie(6, (1,)), _movie(7, ()), _movie(8, (5,))]},
      'u.item: the item 7 has no genre',
    ),
    (
      {'u_item': [_movie(*m).replace('|1', '|2') for m in _MOVIES.items()]},
      "u.item, line 1: 'genre_.*' should be 0 or 1, found '2'",
    ),
    (
      {'u_genre': [f'{name}|{k}' for k, name in enumerate(_GENRES, 1)]},
      'u.genre: the genres are not numbered from 0 to 18 in order',
    ),
    ({'u_genre': ['unknown']}, 'u.genre: .*line 1 has no 2 values'),
  ],
)
def test_damaged_genres_are_named(changes, message, tmp_path):
  _write_movielens(tmp_path, **changes)
  with pytest.raises(DataError, match=message):
    movielens_files.load(tmp_path, min_users=1)


@pytest.mark.parametrize('name', ['u.user', 'u.genre'])
def test_a_missing_file_of_movielens_is_named(name, tmp_path):
  (_write_movielens(tmp_path) / name).unlink()
  said = rf'{name}: (the file is missing|.*\(No such file)'
  with pytest.raises(DataError, match=said):
    movielens_files.load(tmp_path, min_users=1)


# ---- invented records --------------------------------------------------------


def _num_pairs(some: records.Records) -> int:
  """Counts different pairs of user and item."""
  return len(set(zip(some.client, some.user, some.item, strict=True)))


def _same(one: records.Records, other: records.Records) -> bool:
  return all(
    np.array_equal(getattr(one, name), getattr(other, name))
    for name in ('client', 'user', 'public_item', 'answer', 'item_attributes')
  )


def test_invented_records_belong_to_their_seed():
  one = synthetic.generate(seed=1)
  assert _same(one, synthetic.generate(seed=1))
  assert not _same(one, synthetic.generate(seed=2))


def test_invented_clients_differ_in_size_and_attributes():
  invented = synthetic.generate(4, 6, 48, num_items=100)
  # 6 times 2 to the power of 0 to 3.
  assert [*map(len, invented.user_names)] == [6, 12, 24, 48]
  own = [*map(len, invented.own_items)]
  assert own == sorted(own)
  assert own[-1] > 2 * own[0]
  width = (invented.item_attributes >= 0).sum(axis=1)
  assert (width.min(), width.max()) == (1, 3)
  assert set(invented.answer.tolist()) == {0.0, 1.0}
  assert _num_pairs(invented) == len(invented)


# ---- the real data, where there are any --------------------------------------


def _counts(loaded: records.Records) -> tuple[int, ...]:
  counts = loaded.describe()
  names = ('clients', 'users', 'items', 'records', 'attributes')
  return tuple(counts[name] for name in names)


@pytest.mark.slow
@pytest.mark.skipif(
  not (_REAL / 'assistments').is_dir(), reason='needs TFF_PARTIAL_DATA_DIR'
)
def test_assistments():
  loaded = assist_files.load(_REAL)
  assert _counts(loaded) == (60, 1_970, 16_518, 240_639, 108)
  # Those of the paper's Table 1 are 1.20 and 1.20.
  counts = loaded.describe()
  assert counts['attributes_per_item'] == pytest.approx(1.20, abs=0.005)
  assert counts['attributes_per_record'] == pytest.approx(1.20, abs=0.01)
  codes = parts.divide(loaded)
  cut = parts.divided(loaded).values()
  assert _num_pairs(loaded) == 236_633 == sum(map(_num_pairs, cut))
  # The users' shares are rounded one by one.
  assert np.mean(codes == 2) == pytest.approx(0.2, abs=0.002)
  assert np.mean(codes == 1) == pytest.approx(0.08, abs=0.002)


@pytest.mark.skipif(
  not (_REAL / 'movielens' / 'ml-100k').is_dir(),
  reason='needs TFF_PARTIAL_DATA_DIR',
)
def test_movielens_by_region():
  loaded = movielens_files.load(_REAL)
  assert _counts(loaded) == (10, 925, 1_679, 97_914, 19)
  assert loaded.clients == tuple('0123456789')
  assert loaded.attribute_names[:2] == ('unknown', 'Action')
  without = {'users_without_region': 18, 'records_without_region': 2_086}
  assert loaded.left_out == without
  # That of the paper's Table 1 is 1.72.
  counts = loaded.describe()
  assert counts['attributes_per_item'] == pytest.approx(1.72, abs=0.005)
