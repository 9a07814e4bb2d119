"""Tests of the MovieLens readers, splits, generator and download."""

import functools
import hashlib
import os
import pathlib
import shutil

import numpy as np
import pandas as pd
import pytest

from tasks.errors import DataError
from tasks.movielens import data as movielens_data
from tasks.movielens import files as movielens_files
from tasks.movielens import synthetic

# Items 5, 17 and 90 by users 2 and 30; user 30 rates two items in one second.
_ROWS = (
  (30, 90, 4, 1_000_000_300),
  (30, 17, 1, 1_000_000_100),
  (30, 5, 3, 1_000_000_100),
  (2, 17, 5, 1_000_000_200),
  (2, 90, 2, 1_000_000_050),
)
_TITLES = {5: 'Été (1996)', 17: 'Heat, The (1995)', 90: 'Ran', 91: 'Unseen'}
_USERS = {
  2: ('F', 25, '7', '02139'),
  30: ('M', 56, '12', 'V3N4P'),
  31: ('F', 1, '0', '00000'),
}
_DAMAGED = 'Correct the line, or move the folder away'


def _write(folder: pathlib.Path, name: str, lines, encoding='latin-1') -> None:
  folder.mkdir(parents=True, exist_ok=True)
  text = ''.join(f'{line}\n' for line in lines)
  (folder / name).write_bytes(text.encode(encoding))


def _write_ml_1m(folder, rows=_ROWS, titles=_TITLES, users=_USERS):
  _write(folder, 'ratings.dat', ('::'.join(map(str, row)) for row in rows))
  movies = (f'{item}::{title}::Drama|War' for item, title in titles.items())
  _write(folder, 'movies.dat', movies)
  lines = ('::'.join(map(str, (user, *known))) for user, known in users.items())
  _write(folder, 'users.dat', lines)


def _write_ml_100k(folder, rows=_ROWS, titles=_TITLES, users=_USERS):
  _write(folder, 'u.data', ('\t'.join(map(str, row)) for row in rows))
  rest = f'01-Jan-1996||http://x|{"|".join("0" * 19)}'
  _write(folder, 'u.item', (f'{i}|{t}|{rest}' for i, t in titles.items()))
  lines = (f'{user}|{a}|{g}|{o}|{z}' for user, (g, a, o, z) in users.items())
  _write(folder, 'u.user', lines)


def _write_tables(folder, rows=_ROWS, titles=_TITLES, users=None):
  del users  # The newer data sets tell nothing about them.
  lines = [f'{u},{i},{float(r)},{t}' for u, i, r, t in rows]
  _write(folder, 'ratings.csv', ['userId,movieId,rating,timestamp', *lines])
  lines = [f'{item},"{title}",Drama|War' for item, title in titles.items()]
  _write(folder, 'movies.csv', ['movieId,title,genres', *lines], 'utf-8')


_WRITERS = {
  'ml-1m': _write_ml_1m,
  'ml-100k': _write_ml_100k,
  'ml-latest-small': _write_tables,
}


def _write_all_of(folder: pathlib.Path, file: str) -> pathlib.Path:
  """Writes the data set that has a file of this name; returns its path."""
  kind = {'.csv': 'ml-latest-small', '.dat': 'ml-1m', '.data': 'ml-100k'}
  _WRITERS[kind[pathlib.Path(file).suffix]](folder)
  return folder / file


def _message(error: pytest.ExceptionInfo) -> str:
  """The text of an error, which must be one paragraph in whole sentences."""
  text = str(error.value)
  assert '\n' not in text
  assert text.endswith('.')
  return text


# ---- reading -----------------------------------------------------------------


def test_a_title_may_end_like_a_separator(tmp_path):
  _write_ml_1m(tmp_path / 'ml-1m', titles={**_TITLES, 90: 'Ran:'})
  assert movielens_data.load(tmp_path / 'ml-1m').item_titles[2] == 'Ran:'


@pytest.mark.parametrize('name', _WRITERS)
def test_every_layout_is_read(tmp_path, name):
  _WRITERS[name](tmp_path / name)
  ratings = movielens_data.load(tmp_path / name)

  assert ratings.name == name
  assert ratings.frame['user_id'].nunique() == 2
  assert ratings.num_items == 3
  assert ratings.item_titles == ('Été (1996)', 'Heat, The (1995)', 'Ran')
  np.testing.assert_array_equal(ratings.original_item_ids, [5, 17, 90])
  pd.testing.assert_frame_equal(
    ratings.frame,
    pd.DataFrame(
      {
        'user_id': np.array([2, 2, 30, 30, 30], np.int64),
        # Of the ratings in one second, item 17 comes first, as in the file.
        'item_id': np.array([2, 1, 1, 0, 2], np.int32),
        'rating': np.array([2, 5, 1, 3, 4], np.float32),
        'timestamp': 1_000_000_000 + np.array([50, 200, 100, 100, 300]),
      }
    ),
  )
  if name == 'ml-latest-small':
    assert ratings.users is None
    assert ratings.scale == (0.5, 5.0)
  else:
    assert ratings.scale == (1.0, 5.0)
    pd.testing.assert_frame_equal(
      ratings.users,
      pd.DataFrame(
        {
          'user_id': [2, 30],
          'gender': ['F', 'M'],
          'age': [25, 56],
          'occupation': ['7', '12'],
          'zip': ['02139', 'V3N4P'],
        }
      ),
    )


def test_unusual_but_whole_files_are_read(tmp_path):
  plain, odd = tmp_path / 'plain', tmp_path / 'odd'
  _write_tables(plain)
  for name in ('ratings.csv', 'movies.csv'):
    data = (plain / name).read_bytes().replace(b'\n', b'\r\n')
    odd.mkdir(exist_ok=True)
    (odd / name).write_bytes(b'\xef\xbb\xbf' + data + b'\r\n\r\n')
  pd.testing.assert_frame_equal(
    movielens_data.load(odd).frame, movielens_data.load(plain).frame
  )


def test_older_files_may_be_utf_8_and_tell_nothing_of_users(tmp_path):
  _write_ml_1m(tmp_path)
  text = (tmp_path / 'movies.dat').read_text('latin-1')
  (tmp_path / 'movies.dat').write_text(text, 'utf-8')
  assert movielens_data.load(tmp_path).item_titles[0] == 'Été (1996)'
  (tmp_path / 'users.dat').unlink()
  assert movielens_data.load(tmp_path).users is None


def test_half_stars_are_read_where_they_exist(tmp_path):
  _write_tables(tmp_path, rows=[(1, 5, 0.5, 7), (1, 17, 4.5, 8)])
  frame = movielens_data.load(tmp_path).frame
  np.testing.assert_array_equal(frame['rating'], [0.5, 4.5])


def test_the_data_set_can_be_chosen(tmp_path):
  for name in ('ml-100k', 'ml-1m', 'ml-latest-small', 'ml-25m'):
    write = _WRITERS.get(name, _write_tables)
    write(tmp_path / 'movielens' / name)
  assert movielens_data.load(tmp_path).name == 'ml-1m'
  for name in ('ml-100k', 'ml-latest-small', 'ml-25m'):
    assert movielens_data.load(tmp_path, name).name == name
  inside = tmp_path / 'movielens' / 'ml-25m'
  assert movielens_data.load(inside, 'ml-25m').name == 'ml-25m'
  # The files have the right names, but are those of another data set.
  with pytest.raises(DataError, match='holds no MovieLens ratings'):
    movielens_data.load(inside, 'ml-latest-small')


# ---- refusing ----------------------------------------------------------------


@pytest.mark.parametrize(
  ('line', 'complaint'),
  [
    ('30::90::4::1000::7', 'Expected 4 fields in line 4, saw 5'),
    ('30,90,4,1000', "line 4: 'user_id' should be a whole number from 0 up,"),
    ('30::90::4', "line 4: 'timestamp' should be a whole number from 0 up, "),
    ('30::90::nan::1000', "line 4: 'rating' should be a rating on the scale,"),
    ('30::90::6::1000', "'rating' should be a rating on the scale, found '6'"),
    ('30::90::3.5::1000', "line 4: 'rating' should be a rating on the scale"),
    ('30::90::4::-1', "line 4: 'timestamp' should be .*, found '-1'"),
    ('30::90::4::9223372036854775808', "line 4: 'timestamp' should be a whole"),
    ('30::90::4::1000000000000000000', "line 4: 'timestamp' should be a whole"),
    ('+30::90::4::1000', "line 4: 'user_id' should be .*, found '\\+30'"),
    ('30::90::4::1000\x00', 'it has zero bytes'),
  ],
)
def test_a_damaged_line_is_named(tmp_path, line, complaint):
  _write_ml_1m(tmp_path)
  path = tmp_path / 'ratings.dat'
  lines = path.read_text('latin-1').splitlines()
  # A second damaged line, which is not the first one, is not the one named.
  _write(tmp_path, 'ratings.dat', [*lines[:3], line, *lines[3:], line])
  with pytest.raises(DataError, match=complaint) as error:
    movielens_data.load(tmp_path)
  message = _message(error)
  assert message.startswith(str(path))
  assert _DAMAGED in message


def test_a_second_rating_of_an_item_is_named(tmp_path):
  _write_ml_1m(tmp_path, [*_ROWS, (30, 17, 4, 1_000)])
  with pytest.raises(DataError) as error:
    movielens_data.load(tmp_path)
  said = (
    'line 6: a second line of user_id 30, item_id 17; the first is on line 2'
  )
  assert f'ratings.dat, {said}.' in _message(error)


@pytest.mark.parametrize(
  ('file', 'line'),
  [('ratings.dat', 5), ('movies.dat', 4), ('users.dat', 3), ('u.data', 5)]
  + [('ratings.csv', 6), ('movies.csv', 5)],
)
def test_a_file_that_is_cut_off_is_refused(tmp_path, file, line):
  path = _write_all_of(tmp_path, file)
  whole = path.read_bytes()
  # Also where the number that is left would do.
  for missing in (1, 2, 5):
    path.write_bytes(whole[:-missing])
    with pytest.raises(DataError) as error:
      movielens_data.load(tmp_path)
    assert f'cut off in line {line}, which has no line end' in _message(error)


_RATINGS, _MOVIES = 'userId,movieId,rating,timestamp', 'movieId,title,genres'


@pytest.mark.parametrize(
  ('file', 'content', 'complaint'),
  [
    ('ratings.dat', '', 'is empty'),
    ('ratings.csv', _RATINGS, 'is empty'),
    ('ratings.csv', 'u,i,r,t', "line 1: the header is 'u,i,r,t' instead of"),
    (
      'ratings.csv',
      f'{_RATINGS}\n2,5,4.2,7',
      "line 2: 'rating' should be a rating on the scale, found '4.2'",
    ),
    ('movies.dat', '5:: ::War', "line 1: 'title' should be a text, found ''"),
    (
      'movies.dat',
      '5::Ran::War\n5::Ran::War',
      'line 2: a second line of item_id 5; the first is on line 1',
    ),
    (
      'movies.dat',
      '5::Ran::War',
      'no line for item 17, which has ratings; 2 of 3 items are missing',
    ),
    ('movies.csv', f'{_MOVIES}\n5,\xe9t\xe9,War', 'byte 0xe9'),
    ('movies.csv', f'{_MOVIES}\n5,"Ran,War', 'EOF inside string'),
    ('movies.csv', f'{_MOVIES}\n5,Ran, War,War', 'Expected 3 fields in line 2'),
    ('users.dat', '2::F::old::7::0', "found 'old'"),
    (
      'users.dat',
      '2::F::1::7::0',
      'no line for user 30, which has ratings; 1 of 2 users are missing',
    ),
  ],
)
def test_a_damaged_file_is_named(tmp_path, file, content, complaint):
  path = _write_all_of(tmp_path, file)
  _write(tmp_path, file, content.splitlines())
  with pytest.raises(DataError, match=complaint) as error:
    movielens_data.load(tmp_path)
  message = _message(error)
  assert message.startswith(str(path))
  assert '--download' in message


def test_quotes_in_a_table_are_read(tmp_path):
  _write_tables(tmp_path)
  text = 'movieId,title,genres\n5,"""Great"" Cats, The",War\n17,N/A,\n90,1,a\n'
  (tmp_path / 'movies.csv').write_text(text)
  titles = movielens_data.load(tmp_path).item_titles
  assert titles == ('"Great" Cats, The', 'N/A', '1')


def test_missing_data_are_explained(tmp_path):
  (tmp_path / 'file').write_text('text')
  (tmp_path / 'empty').mkdir()
  _write(tmp_path / 'part', 'ratings.dat', ['2::5::4::7'])
  for folder, complaint in (
    ('absent', 'the data folder does not exist'),
    ('file', 'the data folder is not a folder'),
    ('empty', 'Looked for ratings.dat or u.data or ratings.csv'),
    ('part', 'movies.dat: cannot be read (No such file'),
    ('x' * 300, 'the data folder does not exist'),
  ):
    with pytest.raises(DataError) as error:
      movielens_data.load(tmp_path / folder)
    message = _message(error)
    assert complaint in message
    assert str(tmp_path / folder) in message
    assert '--download' in message
    if folder != 'part':
      assert '--data_dir' in message
      assert '$TFF_PARTIAL_DATA_DIR' in message
      assert '--data=synthetic' in message
  with pytest.raises(DataError, match="'': the data folder does not exist"):
    movielens_data.load('')
  with pytest.raises(DataError, match="'ml-9' is not .* Choose one of ml-1m, "):
    movielens_data.load(tmp_path, 'ml-9')


# ---- splits ------------------------------------------------------------------


@functools.cache
def _invented() -> movielens_data.Ratings:
  return synthetic.generate(101, 53, seed=3)


def _together(parts) -> pd.DataFrame:
  columns = ['user_id', 'timestamp', 'item_id']
  return pd.concat(parts).sort_values(columns).reset_index(drop=True)


def test_users_are_divided():
  ratings = _invented()
  parts = movielens_data.split_users(ratings.frame, seed=1)
  users = [set(part['user_id']) for part in parts]
  assert [len(each) for each in users] == [81, 10, 10]
  assert len(set.union(*users)) == 101
  pd.testing.assert_frame_equal(_together(parts), _together([ratings.frame]))

  same = movielens_data.split_users(ratings.frame, seed=1)
  other = movielens_data.split_users(ratings.frame, seed=2)
  shuffled = movielens_data.split_users(
    ratings.frame.sample(frac=1, random_state=0), seed=1
  )
  for part, again, mixed in zip(parts, same, shuffled, strict=True):
    pd.testing.assert_frame_equal(part, again)
    assert set(mixed['user_id']) == set(part['user_id'])
  assert set(other[0]['user_id']) != users[0]


def test_users_are_divided_in_the_papers_numbers():
  frame = pd.DataFrame({'user_id': np.arange(6040), 'item_id': 0})
  parts = movielens_data.split_users(frame)
  assert [len(part) for part in parts] == [4832, 604, 604]


def test_time_divides_each_users_ratings():
  ratings = _invented()
  parts = movielens_data.split_by_time(ratings.frame)
  pd.testing.assert_frame_equal(_together(parts), _together([ratings.frame]))
  counts = ratings.frame.groupby('user_id').size()
  train, validation, test = (part.groupby('user_id').size() for part in parts)
  assert (train == counts * 8 // 10).all()
  assert (validation == counts * 9 // 10 - counts * 8 // 10).all()
  assert (test == counts - counts * 9 // 10).all()
  for before, after in zip(parts[:-1], parts[1:], strict=True):
    last = before.groupby('user_id')['timestamp'].max()
    first = after.groupby('user_id')['timestamp'].min()
    assert (last < first).all()


def test_every_user_keeps_a_rating_to_train_on():
  users, times = [1, 2, 2, 3, 3, 3], [9, 5, 5, 3, 2, 1]
  frame = pd.DataFrame(
    {'user_id': users, 'item_id': range(6), 'timestamp': times}
  )
  parts = movielens_data.split_by_time(frame, (0.1, 0.4, 0.5))
  # Of user 2's ratings, both of one second, the first one is the older one.
  items = [part['item_id'].tolist() for part in parts]
  assert items == [[0, 1, 5], [], [2, 4, 3]]


def test_shares_are_not_lost_in_rounding():
  frame = pd.DataFrame(
    {'user_id': 1, 'item_id': range(300), 'timestamp': range(300)}
  )
  for fractions, sizes in (
    ((0.7, 0.2, 0.1), [210, 60, 30]),
    ((1 / 3, 1 / 3, 1 / 3), [100, 100, 100]),
    ((1.0,), [300]),
  ):
    parts = movielens_data.split_by_time(frame, fractions)
    assert [len(part) for part in parts] == sizes


def test_each_user_is_limited_and_shuffled():
  frame = _invented().frame
  limited = movielens_data.limit_per_user(frame, 25, seed=1)
  counts = frame.groupby('user_id').size()
  assert (limited.groupby('user_id').size() == counts.clip(upper=25)).all()
  assert not limited.duplicated().any()
  assert len(limited.merge(frame)) == len(limited)
  assert limited['user_id'].is_monotonic_increasing
  later = limited.groupby('user_id')['timestamp'].diff()
  assert (later < 0).any()

  whole = movielens_data.limit_per_user(frame, None, seed=1)
  pd.testing.assert_frame_equal(_together([whole]), frame)
  pd.testing.assert_frame_equal(
    whole.groupby('user_id').head(25).reset_index(drop=True), limited
  )
  other = movielens_data.limit_per_user(frame, 25, seed=2)
  assert not other.equals(limited)


def test_a_users_order_does_not_depend_on_other_users():
  frame = _invented().frame
  together = movielens_data.limit_per_user(frame, 25, seed=1)
  some = frame[frame['user_id'].isin([3, 7, 11])]
  alone = movielens_data.limit_per_user(some, 25, seed=1)
  expected = together[together['user_id'].isin([3, 7, 11])]
  pd.testing.assert_frame_equal(alone, expected.reset_index(drop=True))


def _counts(ratings: int, users: int, items: int) -> dict[str, int]:
  return {'ratings': ratings, 'users': users, 'items': items}


def test_counts():
  frame = _invented().frame
  assert movielens_data.describe(frame) == _counts(len(frame), 101, 53)
  assert movielens_data.limit_per_user(frame[:0]).empty
  assert movielens_data.describe(frame[:0])['users'] == 0


def test_parts_without_anything_are_refused():
  with pytest.raises(DataError) as error:
    movielens_data.split_users(synthetic.generate(4, 30).frame)
  assert '4 users cannot be divided' in _message(error)


# ---- invented ratings --------------------------------------------------------


def test_invented_ratings_have_the_schema():
  ratings = synthetic.generate(61, 23, seed=5)
  frame = ratings.frame
  types = list(frame.dtypes.astype(str))
  assert types == ['int64', 'int32', 'float32', 'int64']
  assert set(frame['rating']) <= {1.0, 2.0, 3.0, 4.0, 5.0}
  assert set(frame['item_id']) == set(range(ratings.num_items))
  assert not frame.duplicated(['user_id', 'item_id']).any()
  assert frame.groupby('user_id').size().min() >= 20
  later = frame.groupby('user_id')['timestamp'].diff().dropna()
  assert (later > 0).all()
  assert ratings.item_titles[0] == 'Film 0001'
  assert ratings.users['user_id'].tolist() == list(range(1, 62))

  again = synthetic.generate(61, 23, seed=5)
  pd.testing.assert_frame_equal(frame, again.frame)
  assert not frame.equals(synthetic.generate(61, 23, seed=6).frame)


def test_few_invented_items_are_all_rated():
  ratings = synthetic.generate(3, 7)
  assert movielens_data.describe(ratings.frame) == _counts(21, 3, 7)


# ---- downloads ---------------------------------------------------------------


@pytest.fixture(scope='module')
def archive(tmp_path_factory) -> bytes:
  folder = tmp_path_factory.mktemp('archive')
  _write_ml_1m(folder / 'ml-1m')
  made = shutil.make_archive(str(folder / 'made'), 'zip', folder, 'ml-1m')
  return pathlib.Path(made).read_bytes()


def _publish(site: pathlib.Path, archive: bytes, checksum: str = '') -> str:
  """Lay out an archive and its checksum; return the address."""
  digest = hashlib.md5(archive, usedforsecurity=False).hexdigest()
  site.mkdir(exist_ok=True)
  (site / 'ml-1m.zip').write_bytes(archive)
  text = checksum or f'MD5 (ml-1m.zip) = {digest}\n'
  (site / 'ml-1m.zip.md5').write_text(text)
  return f'{site.as_uri()}/'


def test_a_download_is_checked_and_unpacked(tmp_path, archive):
  address = _publish(tmp_path / 'site', archive)
  folder = tmp_path / 'new' / 'folder'
  place = movielens_data.download(folder, address=address)
  assert place == folder / 'ml-1m'
  assert movielens_data.load(folder).frame['user_id'].nunique() == 2
  assert [path.name for path in folder.iterdir()] == ['ml-1m']
  # What is there is not fetched again.
  shutil.rmtree(tmp_path / 'site')
  assert movielens_data.download(folder, address=address) == place


@pytest.mark.parametrize(
  ('change', 'checksum', 'said'),
  [
    (lambda archive: archive, '0' * 32, 'does not match the provided value'),
    (lambda archive: archive, 'See our page.', 'md5 holds no checksum'),
    (lambda archive: b'<html>Please log in.</html>', '', 'No such file'),
  ],
)
def test_damaged_downloads_leave_none(
  tmp_path, archive, change, checksum, said
):
  address = _publish(tmp_path / 'site', change(archive), checksum)
  folder = tmp_path / 'data'
  with pytest.raises(DataError, match=said) as error:
    movielens_data.download(folder, address=address)
  assert not folder.exists() or not list(folder.iterdir())
  message = _message(error)
  where = f'{address}ml-1m.zip: cannot be fetched into {folder}/ml-1m ('
  assert message.startswith(where)
  for way in ('--data_dir', '--data=synthetic', 'by hand'):
    assert way in message


def test_downloads_that_cannot_be_are_refused(tmp_path, archive):
  address = _publish(tmp_path / 'site', archive)
  (tmp_path / 'ml-1m').mkdir()
  (tmp_path / 'ml-1m' / 'notes').write_text('mine')
  with pytest.raises(DataError, match='not empty'):
    movielens_data.download(tmp_path, address=address)
  assert (tmp_path / 'ml-1m' / 'notes').read_text() == 'mine'
  with pytest.raises(DataError, match='No such file'):
    movielens_data.download(tmp_path, address=(tmp_path / 'no').as_uri() + '/')
  with pytest.raises(DataError, match="'ml-1m' into the folder ''.*--data_dir"):
    movielens_data.download('')
  with pytest.raises(DataError, match='Choose one of ml-1m, '):
    movielens_data.download(tmp_path, '../ml-1m')


# ---- the real data, where there are any --------------------------------------


def _real(name: str) -> pathlib.Path:
  folder = os.environ.get('TFF_PARTIAL_DATA_DIR', '')
  if not folder:
    pytest.skip('$TFF_PARTIAL_DATA_DIR names no data.')
  try:
    return movielens_files.locate(folder, name)[0]
  except DataError as error:
    pytest.skip(str(error))


@pytest.mark.slow
def test_movielens_1m():
  ratings = movielens_data.load(_real('ml-1m'))
  assert ratings.name == 'ml-1m'
  expected = _counts(1_000_209, 6_040, 3_706)
  assert movielens_data.describe(ratings.frame) == expected
  assert ratings.item_titles[0] == 'Toy Story (1995)'
  assert ratings.original_item_ids[-1] == 3_952
  assert len(ratings.users) == 6_040
  assert ratings.frame['rating'].mean() == pytest.approx(3.58156, abs=1e-5)
  by_user = movielens_data.split_users(ratings.frame)
  assert [part['user_id'].nunique() for part in by_user] == [4_832, 604, 604]
  by_time = movielens_data.split_by_time(ratings.frame)
  assert [len(part) for part in by_time] == [797_758, 99_692, 102_759]
  assert len(movielens_data.limit_per_user(ratings.frame)) == 784_767


def test_movielens_100k():
  ratings = movielens_data.load(_real('ml-100k'), 'ml-100k')
  assert ratings.name == 'ml-100k'
  assert movielens_data.describe(ratings.frame) == _counts(100_000, 943, 1_682)
  assert ratings.item_titles[266] == 'unknown'
  assert ratings.users['occupation'].nunique() == 21
