"""Tests of the reader of JSON lines: what it accepts and what it refuses."""

import bz2
import gzip
import importlib
import json
import lzma
import pathlib

import pytest

from tasks.errors import DataError
from tasks.files import json_lines

_FIELDS = (
  json_lines.Field(('who',), json_lines.text),
  json_lines.Field(('created_utc', 'time'), json_lines.seconds),
  json_lines.Field(('label',), json_lines.binary),
)
_LINE = {'who': 'ann', 'time': 3, 'label': 1, 'more': [1]}


def _write(path: pathlib.Path, *lines, opener=open) -> pathlib.Path:
  texts = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines]
  with opener(path, 'wb') as file:
    file.write(b''.join(text + b'\n' for text in texts))
  return path


def _read(path: pathlib.Path) -> list[tuple]:
  return list(json_lines.read(path, _FIELDS))


def test_reads_fields_in_the_order_asked_for(tmp_path):
  path = _write(
    tmp_path / 'a.jsonl', _LINE, b' \r', {**_LINE, 'label': False}, b''
  )
  assert _read(path) == [('ann', 3, 1), ('ann', 3, 0)]


@pytest.mark.parametrize('value', [12, 12.9, '12', '12.0'])
def test_times_are_numbers_or_texts_of_numbers(tmp_path, value):
  # Old dumps of Reddit write times as texts. The first name found counts.
  path = _write(tmp_path / 'a.jsonl', {**_LINE, 'created_utc': value})
  assert _read(path) == [('ann', 12, 1)]


@pytest.mark.parametrize(
  ('ending', 'opener'),
  [('gz', gzip.open), ('bz2', bz2.open), ('xz', lzma.open)],
)
def test_reads_compressed_files_and_refuses_halves(tmp_path, ending, opener):
  path = _write(tmp_path / f'a.{ending}', *[_LINE] * 100, opener=opener)
  assert _read(path) == [('ann', 3, 1)] * 100
  path.write_bytes(path.read_bytes()[:-10])
  with pytest.raises(DataError, match=r'after line \d+: .*cannot be read'):
    _read(path)


def test_reads_zstandard_where_its_package_is(tmp_path):
  zstandard = pytest.importorskip('zstandard')
  path, line = tmp_path / 'a.zst', json.dumps(_LINE).encode()
  path.write_bytes(zstandard.ZstdCompressor().compress(line))
  assert _read(path) == [('ann', 3, 1)]
  assert importlib.import_module('zstandard') is zstandard


@pytest.mark.parametrize(
  ('line', 'problem'),
  [
    (b'{"who": ', 'Expecting value'),
    (b'[' * 100_000, '.*recursion'),
    (b'[1, 2]', r'expected a JSON object, found \[1, 2\]'),
    ({'who': 'ann', 'label': 1}, "'created_utc' or 'time' is missing"),
    ({**_LINE, 'who': 3}, "'who' should be a text, found 3"),
    ({**_LINE, 'time': '1_0'}, "'time' should be a time in seconds"),
    ({**_LINE, 'label': 2}, "'label' should be 0 or 1, found 2"),
  ],
)
def test_refuses_a_bad_line_by_its_number(tmp_path, line, problem):
  path = _write(tmp_path / 'a.jsonl', _LINE, b'', line, _LINE)
  with pytest.raises(DataError, match=rf'a\.jsonl, line 3: .*{problem}'):
    _read(path)


def test_records_without_a_time_keep_their_place_in_the_file(tmp_path, caplog):
  lines = [{'who': who} for who in 'abcd']
  lines[1]['time'], lines[2]['time'] = 5, None
  path = _write(tmp_path / 'a.jsonl', *lines)
  fields = [
    json_lines.Field(('who',), json_lines.text),
    json_lines.Field(('time',), json_lines.seconds, 0),
  ]
  found = list(json_lines.read(path, fields))
  assert found == [('a', 0), ('b', 5), ('c', 5), ('d', 5)]
  (said,) = [r for r in caplog.records if "'time' is missing" in r.message]
  assert 'a.jsonl, line 1: ' in said.message


def test_a_name_is_of_whole_characters(tmp_path):
  field = json_lines.Field(('who',), json_lines.identifier)
  path = _write(tmp_path / 'a.jsonl', {'who': 'z\u00f6e \U0001f600\0'})
  assert list(json_lines.read(path, [field])) == [('z\u00f6e \U0001f600\0',)]
  path = _write(tmp_path / 'a.jsonl', {'who': 'ann'}, {'who': 'ann\ud83d'})
  said = "line 2: 'who' should be a text of whole"
  with pytest.raises(DataError, match=said):
    list(json_lines.read(path, [field]))


@pytest.mark.parametrize('lines', [(), (b'', b'  ')])
def test_refuses_a_file_without_records(tmp_path, lines):
  with pytest.raises(DataError, match=r'a\.jsonl: the file has no records'):
    _read(_write(tmp_path / 'a.jsonl', *lines))


# ---- finding files -----------------------------------------------------------


def _find(folder) -> list[str]:
  found = json_lines.find(folder, 'texts', ('RC_*',), 'Look elsewhere.')
  return [path.name for path in found]


def test_finds_files_of_the_task_by_name(tmp_path):
  folder = tmp_path / 'texts'
  folder.mkdir()
  names = ['RC_2019-02.xz', 'RC_2019-01', 'a.jsonl.gz', 'b.ndjson', 'c.jsonl']
  for name in [*names, 'README.md', 'sums.txt.gz', 'c.jsonl.part']:
    (folder / name).touch()
  (folder / 'd.jsonl').mkdir()
  assert _find(tmp_path) == sorted(names)
  assert _find(folder) == sorted(names)


def test_a_file_beside_its_packed_form_is_read_once(tmp_path):
  for name in ('RC_1', 'RC_1.zst', 'a.jsonl', 'a.jsonl.gz', 'b.jsonl.xz'):
    (tmp_path / name).touch()
  assert _find(tmp_path) == ['RC_1', 'a.jsonl', 'b.jsonl.xz']


@pytest.mark.parametrize(
  ('make', 'problem'),
  [
    (lambda path: None, 'in what is no folder'),
    (lambda path: path.touch(), 'in what is no folder'),
    (lambda path: path.mkdir(), 'in the folder'),
  ],
)
def test_says_what_is_missing(tmp_path, make, problem):
  make(tmp_path / 'data')
  with pytest.raises(DataError, match=rf'{problem}.*Look elsewhere'):
    _find(tmp_path / 'data')
