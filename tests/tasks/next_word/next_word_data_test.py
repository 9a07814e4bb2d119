"""Tests of sentences: reading, cutting, choosing, dividing, packing."""

import gzip
import json
import os
import pathlib
import sqlite3

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tasks.errors import DataError
from tasks.errors import OptionError
from tasks.next_word import clients as clients_lib
from tasks.next_word import corpora
from tasks.next_word import federated_files
from tasks.next_word import on_disk
from tasks.next_word import parts
from tasks.next_word import sentences as sentences_lib
from tasks.next_word import synthetic
from tasks.next_word import tokenising
from tasks.next_word import words
from tasks.next_word.sentences import Limits
from tasks.next_word.sentences import Message
from tasks.task import TEST
from tasks.task import TRAIN
from tasks.task import VALIDATION
from tests.support.small_texts import texts_of
from tff_partial.data import examples

_REAL = os.environ.get('TFF_PARTIAL_DATA_DIR')

_MESSAGES = (
  Message('bob', 30, 'Later. And last!'),
  Message('ann', 20, 'hi'),
  Message('bob', 10, 'First'),
  Message('ann', 20, 'Same second'),
  Message('cat', 5, '\n'),
)


def _gather(messages=_MESSAGES, rule=tokenising.CHAT, **limits):
  return sentences_lib.gather('small', messages, rule, Limits(**limits))


def _load(corpus: str | pathlib.Path, folder=None, **limits):
  return corpora.load(str(corpus), folder, Limits(**limits))


def _texts(sentences: sentences_lib.Sentences) -> dict[str, list[str]]:
  return {
    author: texts_of(sentences, number)
    for number, author in enumerate(sentences.authors)
  }


# ---- tokens ------------------------------------------------------------------


@pytest.mark.parametrize(
  'text, expected',
  [
    ("It's well-known; isn't it?", ["it's well-known ; isn't it ?"]),
    ('One. Two! three.Four? 5', ['one .', 'two ! three . four ? 5']),
    ('A line\r\n\r\nanother ', ['a line', 'another']),
    ('see <url>, @user', ['see <url> , @user']),
    ('x_1 <= 0.5 ∀ Ünder', ['x_1 < = 0 . 5 ∀ ünder']),
    ('a\0b\1c', ['a b c']),
    ('\ud800', ['\ud800']),  # JSON may hold half a pair of code units.
  ],
)
def test_chat_is_cut_into_sentences_words_and_marks(text, expected):
  assert texts_of(_gather([Message('ann', 0, text)]), 0) == expected


@pytest.mark.parametrize(
  'text, rule, expected',
  [
    # The rest of a long sentence is left out, of characters it is another one.
    ('a b c d e\nhi', tokenising.CHAT, ['a b c', 'hi']),
    ('use <URL> .', tokenising.SPACED, ['use <URL> .']),
    ('Hark! Oh', tokenising.CHARACTERS, ['H a r', 'k !  ', 'O h']),
  ],
)
def test_other_rules_and_long_sentences(text, rule, expected):
  cut = _gather([Message('ann', 0, text)], rule, max_tokens=3)
  assert texts_of(cut, 0) == expected


def test_a_fingerprint_is_the_same_everywhere():
  assert on_disk.fingerprint('federated') == 0x4EA9D89B65F4D170
  assert on_disk.fingerprints(['a', 'b']).dtype == np.uint64


# ---- gathering ---------------------------------------------------------------


def test_sentences_are_sorted_by_author_and_time():
  sentences = _gather()
  # Of two messages of one second the first one comes first. Cat said nothing.
  assert _texts(sentences) == {
    'ann': ['hi', 'same second'],
    'bob': ['first', 'later .', 'and last !'],
  }
  assert sentences.time.tolist() == [20, 20, 10, 30, 30]
  assert sentences.bounds.tolist() == [0, 2, 5]
  assert sentences.offsets.tolist() == [0, 1, 3, 4, 6, 9]
  assert len(sentences) == 5
  assert len(sentences.tokens) == 9
  assert sentences.left_out == {}


def test_an_author_has_the_first_sentences_in_time():
  sentences = _gather(max_sentences=2)
  assert _texts(sentences)['bob'] == ['first', 'later .']
  assert sentences.left_out == {'sentence_too_late': 1}


def test_authors_with_few_sentences_are_left_out():
  sentences = _gather(min_sentences=3)
  assert sentences.authors == ('bob',)
  assert sentences.left_out == {'author_too_small': 2}


def test_authors_are_drawn_by_the_seed():
  many = [Message(f'{number:02}', 0, 'hi') for number in range(20)]
  drawn = [
    _gather(order, max_users=3, seed=seed)
    for seed, order in ((0, many), (0, many[::-1]), (1, many))
  ]
  assert [len(each.authors) for each in drawn] == [3, 3, 3]
  assert drawn[0].authors == drawn[1].authors != drawn[2].authors
  assert drawn[0].left_out == {'author_not_drawn': 17}


def test_limits_that_leave_nothing_are_refused():
  with pytest.raises(OptionError, match='at most 2 .* at least 3'):
    Limits(max_sentences=2, min_sentences=3)


def test_a_corpus_without_authors_is_refused():
  with pytest.raises(DataError, match='small: none of 3 authors has the 4'):
    _gather(min_sentences=4)
  with pytest.raises(DataError, match='none of 0 authors'):
    _gather([])


# ---- memory ------------------------------------------------------------------


def test_a_corpus_is_read_block_by_block(monkeypatch):
  whole = _gather()
  read: list[Message] = []
  blocks: list[tuple[int, int]] = []
  cut = tokenising.Tokeniser.cut

  def spy(self, texts, max_tokens):
    blocks.append((len(texts), len(read)))
    return cut(self, texts, max_tokens)

  def messages():
    for message in _MESSAGES:
      read.append(message)
      yield message

  # A block is full after 16 characters; sentences are sorted two at a time.
  monkeypatch.setattr(sentences_lib, '_BLOCK', 16)
  monkeypatch.setattr(sentences_lib, '_ROWS', 2)
  monkeypatch.setattr(tokenising.Tokeniser, 'cut', spy)
  sentences = _gather(messages())
  # Each block is cut before the next message is read.
  assert blocks == [(1, 1), (3, 4), (1, 5)]
  assert _texts(sentences) == _texts(whole)
  assert sentences.tokens.tolist() == whole.tokens.tolist()
  # Tokens are in a file: the array owns no memory.
  assert not sentences.tokens.flags.owndata


def test_users_are_looked_at_in_batches(monkeypatch):
  sentences = _gather()
  monkeypatch.setattr(sentences_lib, '_BATCH', 3)
  assert [len(tokens) for tokens in sentences.batches([0, 1, 0])] == [3, 6, 3]
  monkeypatch.setattr(sentences_lib, '_BATCH', 5)
  assert [len(tokens) for tokens in sentences.batches([0, 1, 0])] == [9, 3]
  assert list(sentences.batches([])) == []


def test_a_full_disk_is_named(monkeypatch):
  def full(*_, **__):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(on_disk.tempfile, 'TemporaryFile', full)
  with pytest.raises(DataError, match=r'No space left.*\$TMPDIR'):
    _gather()


# ---- JSON lines --------------------------------------------------------------


def _write_lines(path: pathlib.Path, records) -> None:
  path.parent.mkdir(exist_ok=True)
  opener = gzip.open if path.suffix == '.gz' else open
  with opener(path, 'wt') as file:
    file.writelines(json.dumps(record) + '\n' for record in records)


def test_a_corpus_is_found_by_its_name(tmp_path):
  _write_lines(
    tmp_path / 'lean_chat' / 'messages.jsonl.gz',
    [message._asdict() for message in _MESSAGES],
  )
  found = _load('lean_chat', tmp_path)
  assert found.name == 'lean_chat'
  assert _texts(found) == _texts(_gather())


def test_names_of_fields_and_gone_comments_of_reddit(tmp_path):
  comments = [
    {'author': 'ann', 'body': 'Hi!', 'created_utc': '7', 'subreddit': 'x'},
    {'author': '[deleted]', 'body': 'Hi!', 'created_utc': 7},
    {'author': 'ann', 'body': '[removed]', 'created_utc': 7},
  ]
  _write_lines(tmp_path / 'subreddit' / 'RC_2019-01', comments)
  found = _load('subreddit', tmp_path)
  assert _texts(found) == {'ann': ['hi !']}
  assert found.time.tolist() == [7]


def test_a_corpus_of_ones_own_is_a_file_or_a_folder(tmp_path):
  records = [{'user': 'ann', 'text': 'Hi.', 'time': 1}]
  _write_lines(tmp_path / 'mine' / 'a.jsonl', records)
  _write_lines(tmp_path / 'mine' / 'b.jsonl', records)
  one, both = _load(tmp_path / 'mine' / 'a.jsonl'), _load(tmp_path / 'mine')
  assert (one.name, both.name) == ('a.jsonl', 'mine')
  assert (texts_of(one, 0), texts_of(both, 0)) == (['hi .'], ['hi .', 'hi .'])


def test_a_corpus_that_is_not_there_is_refused(tmp_path):
  with pytest.raises(OptionError, match='--data_set=nowhere: is none of lean_'):
    _load('nowhere', tmp_path)
  with pytest.raises(DataError, match='lean_chat: no data folder is named'):
    _load('lean_chat')
  with pytest.raises(DataError, match="sub-folder 'subreddit'.*author"):
    _load('subreddit', tmp_path)


def test_a_damaged_line_is_named(tmp_path):
  _write_lines(tmp_path / 'a.jsonl', [{'text': 'Hi.', 'time': 1}])
  said = "a.jsonl, line 1: the field 'author' or 'user' is missing"
  with pytest.raises(DataError, match=said):
    _load(tmp_path / 'a.jsonl')


# ---- TFF's files -------------------------------------------------------------

_STACKOVERFLOW = tff.simulation.datasets.stackoverflow
_SHAKESPEARE = tff.simulation.datasets.shakespeare


def _save(path: pathlib.Path, client_data, held_out=()) -> None:
  """Has TFF write a data set of its own into a file of its own format."""
  path.parent.mkdir(exist_ok=True)
  tff.simulation.datasets.save_to_sql_client_data(
    client_data.client_ids,
    client_data.create_tf_dataset_for_client,
    str(path),
    split_names_by_client_id={
      client: 'heldout' if client in held_out else 'train'
      for client in client_data.client_ids
    },
  )


@pytest.fixture(scope='module')
def stackoverflow(tmp_path_factory) -> pathlib.Path:
  """A data folder with TFF's synthetic Stack Overflow in one file."""
  folder = tmp_path_factory.mktemp('data')
  _save(
    folder / 'stackoverflow' / 'stackoverflow.sqlite',
    _STACKOVERFLOW.get_synthetic(),
    held_out=['synthetic_3'],
  )
  return folder


def test_stackoverflow_of_one_sqlite_file(stackoverflow):
  found = _load('stackoverflow', stackoverflow)
  assert found.authors == ('synthetic_1', 'synthetic_2')
  # In the order of time; the first 20 of 21 tokens.
  assert texts_of(found, 0) == [
    'css3 does finally define the',
    "which is exactly how you'd want it to work .",
    "if you're using sql 2005 or better this is a nice , simple-ish median "
    'calculation for a single column in',
  ]
  assert texts_of(found, 1)[0].split()[8:12] == ['found', '<URL>', '"', '>']
  # 2008-08-10 08:28:52 UTC.
  assert found.time[:2].tolist() == [1218356932, 1218356932]
  assert found.bounds.tolist() == [0, 3, 6]


def test_only_drawn_clients_are_read(stackoverflow):
  found = _load('stackoverflow', stackoverflow, max_users=1)
  assert len(found.authors) == 1
  # The other one was not read, and so it is not counted as left out.
  assert not found.left_out


def test_shakespeare_by_characters(tmp_path):
  path = tmp_path / 'shakespeare' / 'shakespeare.sqlite'
  _save(path, _SHAKESPEARE.get_synthetic())
  with sqlite3.connect(path) as database:
    for table, columns in (
      ('examples', 'client_id, serialized_example_proto'),
      ('client_metadata', 'client_id, num_examples'),
    ):
      database.execute(
        f'INSERT INTO {table} (split_name, {columns}) '
        f"SELECT 'test', {columns} FROM {table}"
      )
  found = _load('shakespeare', tmp_path, max_tokens=80)
  assert found.authors[0] == 'MUCH_ADO_ABOUT_NOTHING_EMILIA'
  roles = [text.replace('  ', ' ') for text in texts_of(found, 2)]
  assert roles[0].startswith('H a r k !')
  # What was for tests comes behind the rest; there are no times.
  assert roles[:6] == roles[6:]
  assert set(found.time) == {sentences_lib.NO_TIME}


def _ann(tokens: bytes, date: bytes):
  example = {'tokens': [tokens], 'creation_date': [date]}
  return tff.simulation.datasets.TestClientData({'ann': example})


@pytest.mark.parametrize(
  'make, held_out, message',
  [
    # Shakespeare under the name of Stack Overflow.
    (
      _SHAKESPEARE.get_synthetic,
      (),
      'fields tokens and creation_date of examples are missing',
    ),
    (
      lambda: _ann(b'hi', b'yesterday'),
      (),
      'are missing or damaged .*Error parsing',
    ),
    (
      lambda: _ann(b'hi', b''),
      (),
      'are missing or damaged .*a time is missing',
    ),
    (
      lambda: _ann(b'\xff', b'2008-08-10 08:28:52 UTC'),
      (),
      'are missing or damaged .*utf-8',
    ),
    (lambda: _ann(b'hi', b''), ['ann'], 'none of 0 authors'),
  ],
)
def test_damaged_files_of_tff_are_refused(tmp_path, make, held_out, message):
  with pytest.raises(DataError, match='stackoverflow.sqlite.*--download'):
    _load('stackoverflow', tmp_path)
  _save(tmp_path / 'stackoverflow.sqlite', make(), held_out)
  with pytest.raises(DataError, match=message):
    _load('stackoverflow', tmp_path)


def test_a_download_appears_whole_or_not_at_all(tmp_path):
  def load_data(cache_dir):
    pathlib.Path(cache_dir, 'shakespeare.sqlite').write_text('half of it')
    if not load_data.works:
      raise OSError('the line broke')

  data_set = federated_files.SHAKESPEARE._replace(load_data=load_data)

  def read():
    list(federated_files.read(data_set, tmp_path, Limits(), download=True))

  load_data.works = False
  with pytest.raises(DataError, match='TFF cannot fetch it .the line broke'):
    read()
  assert not list((tmp_path / 'shakespeare').iterdir())
  load_data.works = True
  for _ in range(2):
    with pytest.raises(DataError, match='is no SQLite file of TFF'):
      read()
    load_data.works = False  # It is there, so that nothing is fetched.


# ---- invented sentences ------------------------------------------------------


@pytest.fixture(scope='module')
def invented() -> sentences_lib.Sentences:
  return synthetic.generate()


def test_invented_sentences_follow_from_the_seed(invented):
  assert synthetic.generate().tokens.tolist() == invented.tokens.tolist()
  other = synthetic.generate(seed=1)
  assert other.tokens.tolist() != invented.tokens.tolist()
  assert len(invented.authors) == 60
  counts = np.diff(invented.bounds)
  assert 20 <= counts.min() and counts.max() <= 60
  assert invented.time.min() > 0


def test_invented_authors_have_names_with_a_follower_of_their_own(invented):
  pairs = [
    (first, second)
    for text in texts_of(invented, 0)
    for first, second in zip(text.split()[:-1], text.split()[1:], strict=True)
    if first.startswith('name0_') and second != '.'
  ]
  names = {first for first, _ in pairs}
  assert names == {f'name0_{number}' for number in range(4)}
  # Behind a name, one word is far more frequent than any other.
  for name in names:
    behind = [second for first, second in pairs if first == name]
    assert max(map(behind.count, behind)) > 0.6 * len(behind)
  assert not any('name0_' in text for text in texts_of(invented, 1))


# ---- parts -------------------------------------------------------------------


def test_users_are_divided_and_their_sentences_halved(invented):
  divided = parts.divide_users(invented, seed=3)
  assert [len(part.users) for part in divided.values()] == [42, 6, 12]
  everyone = np.concatenate([part.users for part in divided.values()])
  assert sorted(everyone) == list(range(60))
  for part in divided.values():
    size = np.diff(invented.bounds)[part.users]
    # Half of 5 is 2, half of 7 is 4: as `splits.halves` rounds.
    assert np.diff(part.older)[:, 0].tolist() == np.rint(size / 2).tolist()
    assert part.older[:, 1].tolist() == part.newer[:, 0].tolist()
    assert part.newer[:, 1].tolist() == invented.bounds[part.users + 1].tolist()
  again = parts.divide_users(invented, seed=3)[TEST].users
  assert again.tolist() == divided[TEST].users.tolist()
  other = parts.divide_users(invented, seed=4)[TEST].users
  assert other.tolist() != divided[TEST].users.tolist()


def test_sentences_are_divided_by_time():
  # 10 sentences of ann, 1 of bob: 7, 1 and 2, and one to train.
  whose = ['ann'] * 10 + ['bob']
  sentences = _gather([Message(w, t, 'hi') for t, w in enumerate(whose)])
  divided = parts.divide_sentences(sentences)
  assert divided[TRAIN].older.tolist() == [[0, 4], [10, 10]]
  assert divided[TRAIN].newer.tolist() == [[4, 7], [10, 11]]
  for part, newer in ((VALIDATION, [7, 8]), (TEST, [8, 10])):
    assert divided[part].users.tolist() == [0]
    # What they have trained on comes before.
    assert divided[part].older.tolist() == [[0, 7]]
    assert divided[part].newer.tolist() == [newer]
  assert parts.describe(divided) == {
    TRAIN: {'users': 2, 'sentences': 8},
    VALIDATION: {'users': 1, 'sentences': 1},
    TEST: {'users': 1, 'sentences': 2},
  }


@pytest.mark.parametrize('divide', [parts.divide_users, parts.divide_sentences])
def test_too_few_to_divide_are_refused(divide):
  with pytest.raises(OptionError, match='(test|validation): no'):
    divide(_gather())


# ---- clients -----------------------------------------------------------------


def _spec(*fields: str) -> examples.ExampleSpec:
  types = {'time': tf.int64, 'is_query': tf.int32}
  return examples.ExampleSpec(
    {
      'x': tf.TensorSpec([3], tf.int32),
      'y': tf.TensorSpec([3], tf.int32),
      'weight': examples.WEIGHT_SPEC,
      **{field: tf.TensorSpec([], types[field]) for field in fields},
    }
  )


# Numbers: hi 1, there 2, others 3 (one bucket), beginning 4, end 5.
_WORDS = words.Words(('hi', 'there'), 1)


@pytest.fixture(scope='module')
def chatting() -> sentences_lib.Sentences:
  texts = ['hi', 'hi there you', 'you', 'hi there', 'there']
  messages = [Message('ann', 10 * t, text) for t, text in enumerate(texts)]
  return _gather(messages, max_tokens=3)


def _one(population, name='ann'):
  return population.cohort([name], np.zeros([1, 2], np.int32))[0]['examples']


def test_a_client_predicts_the_next_token(chatting):
  part = parts.Part(np.array([0]), np.array([[0, 2]]), np.array([[2, 4]]))
  packed = clients_lib.Authors(chatting, _WORDS, {TRAIN: part}).clients(
    TRAIN, _spec('time', 'is_query')
  )
  client = _one(packed)
  assert client['x'].tolist() == [[4, 1, 5], [4, 1, 2], [4, 3, 5], [4, 1, 2]]
  # A sentence that fills its row has no end.
  assert client['y'].tolist() == [[1, 5, 0], [1, 2, 3], [3, 5, 0], [1, 2, 5]]
  assert client['time'].tolist() == [0, 10, 20, 30]
  assert client['is_query'].tolist() == [0, 0, 1, 1]


def test_what_was_trained_on_comes_with_the_mark_alone(chatting):
  part = parts.Part(
    np.array([0]), np.array([[0, 1]]), np.array([[3, 5]]), knows_past=True
  )
  clients = clients_lib.Authors(chatting, _WORDS, {TEST: part})
  plain = _one(clients.clients(TEST, _spec()))
  assert plain['y'].tolist() == [[1, 2, 5], [2, 5, 0]]
  marked = _one(clients.clients(TEST, _spec('is_query')))
  assert marked['y'].tolist() == [[1, 5, 0], [1, 2, 5], [2, 5, 0]]
  assert marked['is_query'].tolist() == [0, 1, 1]


def test_a_reader_has_the_same_clients(invented, monkeypatch):
  row = tf.TensorSpec([20], tf.int32)
  spec = examples.ExampleSpec({**_spec('time'), 'x': row, 'y': row})
  divided = parts.divide_users(invented)
  counts = words.count(invented, divided[TRAIN].users)
  learned = words.choose(counts, invented, 50, 3)
  clients = clients_lib.Authors(invented, learned, divided)
  packed = clients.clients(TEST, spec)
  monkeypatch.setattr(clients_lib, '_MOST_PACKED', 100)
  read = clients.clients(TEST, spec)
  assert packed.client_ids == read.client_ids
  name = packed.client_ids[5]
  number = len(read.read(name)['x'])
  for field in ('x', 'y', 'time'):
    expected = _one(packed, name)[field][:number]
    assert _one(read, name)[field][:number].tolist() == expected.tolist()


def test_a_part_that_is_not_there_is_refused(chatting):
  clients = clients_lib.Authors(chatting, _WORDS, {})
  with pytest.raises(OptionError, match="part: 'later' is none of"):
    clients.clients('later', _spec())


# ---- real data ---------------------------------------------------------------


@pytest.mark.skipif(
  not os.path.isdir(os.path.join(_REAL or '/nowhere', 'lean_chat')),
  reason='$TFF_PARTIAL_DATA_DIR has no folder lean_chat.',
)
@pytest.mark.slow
def test_lean_chat_and_its_coverage():
  sentences = _load('lean_chat', _REAL)
  assert len(sentences.authors) == 2057
  assert len(sentences) == pytest.approx(550_479, abs=10)
  assert len(sentences.tokens) == pytest.approx(7.2e6, rel=0.02)
  users = np.arange(2057)
  counts = words.count(sentences, users[:1645])
  for size, coverage in ((1000, 0.849), (5000, 0.953), (10_000, 0.974)):
    learned = words.choose(counts, sentences, size, 1)
    found = learned.coverage(sentences, users[1645:])['coverage']
    assert found == pytest.approx(coverage, abs=0.005)
