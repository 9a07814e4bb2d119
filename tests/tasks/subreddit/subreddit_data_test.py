"""Tests of documents: reading, choosing, dividing, encoding, inventing."""

import gzip
import json
import os
import pathlib

import numpy as np
import pytest
from sklearn import feature_extraction
from sklearn import linear_model
from sklearn import pipeline

from tasks.errors import DataError
from tasks.errors import OptionError
from tasks.files import text_encoding
from tasks.subreddit import data as subreddit_data
from tasks.subreddit import parts as subreddit_parts
from tasks.subreddit import predictors as subreddit_predictors
from tasks.subreddit import synthetic as subreddit_synthetic

_REAL = os.environ.get('TFF_PARTIAL_DATA_DIR')

# Author, subreddit, time, text.
_COMMENTS = (
  ('bob', 'nba', 30, 'late'),
  ('ann', 'nba', 20, 'dunk'),
  ('bob', 'nba', 10, 'early'),
  ('ann', 'cfb', 20, 'kick'),
  ('ann', 'pics', 5, 'look'),
  ('cat', 'pics', 5, 'see'),
  ('bob', 'cfb', 30, 'same second'),
)


def _write(folder: pathlib.Path, comments=_COMMENTS, name='a.jsonl'):
  (folder / 'subreddit').mkdir(exist_ok=True)
  with open(folder / 'subreddit' / name, 'w') as file:
    for author, subreddit, time, text in comments:
      record = {'author': author, 'subreddit': subreddit, 'body': text}
      file.write(json.dumps({**record, 'created_utc': time, 'score': 1}) + '\n')
  return folder


def _load(folder, **choices) -> subreddit_data.Documents:
  return subreddit_data.load('subreddit', folder, **choices)


def _rows(documents: subreddit_data.Documents) -> list[tuple]:
  authors = np.take(documents.authors, documents.author)
  labels = np.take(documents.labels, documents.label)
  columns = authors, labels, documents.time, documents.texts
  return list(zip(*(column.tolist() for column in columns), strict=True))


# ---- reading -----------------------------------------------------------------


def test_comments_are_sorted_by_author_and_time(tmp_path):
  documents = _load(_write(tmp_path))
  # Of two comments of one second the file's first comes first.
  assert _rows(documents) == [
    ('ann', 'pics', 5, 'look'),
    ('ann', 'nba', 20, 'dunk'),
    ('ann', 'cfb', 20, 'kick'),
    ('bob', 'nba', 10, 'early'),
    ('bob', 'nba', 30, 'late'),
    ('bob', 'cfb', 30, 'same second'),
    ('cat', 'pics', 5, 'see'),
  ]
  # The commonest is first; of equally common ones the first by name.
  assert documents.labels == ('nba', 'cfb', 'pics')
  assert documents.has_several_labels.tolist() == [True, True, False]


def test_several_files_are_one_data_set(tmp_path):
  _write(tmp_path, _COMMENTS[:3], 'RC_2019-01')
  _write(tmp_path, _COMMENTS[3:], 'RC_2019-02')
  parts = _rows(_load(tmp_path))
  (tmp_path / 'all').mkdir()
  assert parts == _rows(_load(_write(tmp_path / 'all')))


def test_what_is_gone_is_left_out_and_counted(tmp_path):
  gone = (
    ('[deleted]', 'nba', 1, 'hello'),
    ('ann', 'nba', 1, '[removed]'),
    ('ann', 'nba', 1, '[deleted]'),
    ('ann', 'nba', 1, ' \n'),
  )
  documents = _load(_write(tmp_path, _COMMENTS + gone))
  assert len(documents) == 7
  expected = {'author_deleted': 1, 'text_deleted': 2, 'text_empty': 1}
  assert documents.left_out == expected


def test_the_largest_subreddits_are_chosen_before_the_authors(tmp_path):
  documents = _load(_write(tmp_path), num_labels=2, min_documents=2)
  # Without the two of pics, ann has two comments and cat none.
  assert documents.labels == ('nba', 'cfb')
  assert documents.authors == ('ann', 'bob')
  assert documents.left_out == {'label_not_kept': 2}


def test_authors_with_too_few_or_too_many_comments_are_left_out(tmp_path):
  more = tuple(('cat', 'nba', time, 'more') for time in range(4))
  _write(tmp_path, _COMMENTS + more)  # 3, 3 and 5 comments.
  assert _load(tmp_path, min_documents=4).authors == ('cat',)
  small = _load(tmp_path, max_documents=4)
  assert small.authors == ('ann', 'bob')
  assert small.left_out == {'author_too_large': 5}
  with pytest.raises(DataError, match='at least 4 documents and at most 4'):
    _load(tmp_path, min_documents=4, max_documents=4)


def test_texts_are_cut(tmp_path):
  texts = _load(_write(tmp_path), max_chars=3).texts
  assert set(texts) == {'loo', 'dun', 'kic', 'ear', 'lat', 'sam', 'see'}


# Half a pair, a zero, only emoji, from right to left, marks upon marks.
_WORST_TEXTS = (
  '\ud800',
  'a\ud83d b',
  '\0',
  'a\0b',
  '\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f466',
  '\u202e\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627',
  'a' + '\u0301' * 500,
  '\ufeff\ufffe\uffff\U0010ffff',
  '\u2028\x85\x0b\x1c',
  'x' * 1_000_000,
)


def test_texts_at_their_worst_are_texts(tmp_path):
  authors = ['\0', '\U0001f600', '\u202eann', 'e\u0301', '\xe9', 'x' * 9_999]
  texts = [('nba', *text) for text in enumerate(_WORST_TEXTS)]
  _write(tmp_path, [(author, *text) for author in authors for text in texts])
  documents = _load(tmp_path)
  # Line separators alone are white space, so nothing.
  expected = [text[:280] for text in _WORST_TEXTS if not text.isspace()]
  assert len(expected) == len(_WORST_TEXTS) - 1
  # Two ways to write a letter are two authors.
  assert documents.authors == tuple(sorted(authors))
  assert documents.texts.tolist() == expected * len(authors)
  vocabulary = text_encoding.learn_vocabulary(documents.texts, 20)
  encoded = vocabulary.encode(documents.texts, 30)
  assert encoded.shape == (len(documents), 30)
  lengths = (encoded > 0).sum(axis=1).tolist()
  assert lengths == [min(len(text), 30) for text in expected] * 6


def test_messages_keep_their_labels(tmp_path):
  (tmp_path / 'sticker').mkdir()
  records = [
    {'user': 'u', 'text': 'hey', 'label': 0, 'time': 1},
    {'user': 'v', 'text': 'ho', 'label': True, 'time': '2'},
    {'user': 'u', 'text': 'hi', 'label': 0, 'time': 0},
  ]
  with gzip.open(tmp_path / 'sticker' / 'm.jsonl.gz', 'wt') as file:
    file.write('\n'.join(map(json.dumps, records)))
  documents = subreddit_data.load('sticker', tmp_path)
  # A label is its own number, however common it is.
  assert documents.labels == ('0', '1')
  assert documents.label.tolist() == [0, 0, 1]
  assert documents.texts.tolist() == ['hi', 'hey', 'ho']
  assert len(subreddit_data.load('sticker', tmp_path, min_documents=2)) == 2


def test_a_bad_comment_is_named(tmp_path):
  _write(tmp_path)
  with open(tmp_path / 'subreddit' / 'a.jsonl', 'a') as file:
    file.write('{"author": "ann", "subreddit": "nba", "created_utc": 1}\n')
  with pytest.raises(DataError, match=r"a\.jsonl, line 8: .*'body' is missing"):
    _load(tmp_path)


def test_missing_data_come_with_advice(tmp_path):
  with pytest.raises(DataError, match='one comment a line.*--data=synthetic'):
    _load(tmp_path)
  with pytest.raises(DataError, match='one message a line.*--data=synthetic'):
    subreddit_data.load('sticker', tmp_path / 'nowhere')


# ---- dividing ----------------------------------------------------------------


def _documents(*counts: int) -> subreddit_data.Documents:
  """So many documents by each author, of one class but for the first one's."""
  records = [
    (f'author{author}', 'b' if author == 0 and n % 3 == 0 else 'a', n, f'{n}')
    for author, count in enumerate(counts)
    for n in range(count)
  ]
  return subreddit_data.from_records('test', records)


def test_every_author_is_divided():
  documents = _documents(76, 10, 1)
  parts = subreddit_parts.divide(documents)
  names = ('train', 'validation', 'test')
  held = [parts[part] for part in names]
  sizes = [list(map(len, parts.of_authors(part).values())) for part in names]
  # 0.8 * 76 is 60.8, 0.9 * 76 is 68.4. One document is for training.
  assert sizes == [[60, 8, 1], [8, 1], [8, 1]]
  assert sorted(np.concatenate(held)) == list(range(87))


def test_the_seed_divides_and_other_authors_do_not_matter():
  few, many = _documents(76), _documents(76, 50, 60)
  one, same, other = (
    subreddit_parts.divide(few, seed=seed)['test'].tolist()
    for seed in (1, 1, 2)
  )
  assert one == same != other
  mine = subreddit_parts.divide(many, seed=1)
  assert mine.of_authors('test')[many.authors[0]].tolist() == one


def test_by_time_the_latest_are_measured():
  documents = _documents(20, 10)
  parts = subreddit_parts.divide(documents, by_time=True)
  for part, times in (('train', range(16)), ('test', (18, 19))):
    own = parts.of_authors(part)[documents.authors[0]]
    assert documents.time[own].tolist() == list(times)


def test_authors_are_held_out_entirely():
  documents = _documents(*[20] * 10)
  parts = subreddit_parts.divide(documents, held_out_share=0.3, seed=3)
  new = set(documents.author[parts['new']].tolist())
  seen = set(documents.author[parts['train']].tolist())
  assert len(new) == 3 and len(seen) == 7 and not new & seen
  assert len(parts['new']) == 60
  again = subreddit_parts.divide(documents, held_out_share=0.3, seed=3)
  assert again['new'].tolist() == parts['new'].tolist()
  assert parts.describe()['new'] == {'documents': 60, 'authors': 3}


def test_mixed_authors_write_in_several_classes():
  documents = _documents(30, 30)
  parts = subreddit_parts.divide(documents, held_out_share=0)
  assert set(documents.author[parts['mixed']]) == {0}
  assert set(parts['mixed']) < set(parts['test'])
  assert not len(parts['new']) and not len(parts['new_mixed'])
  assert parts.of_authors('new') == {}


def test_the_first_documents_and_what_comes_after():
  documents = _documents(10, 5)
  parts = subreddit_parts.divide(documents, by_time=True)
  first, after = parts.first('train', 3), parts.after('train', 3)
  assert documents.time[first].tolist() == [0, 1, 2, 0, 1, 2]
  assert documents.time[after].tolist() == [3, 4, 5, 6, 7, 3]


@pytest.mark.parametrize('share', [1.0, 0.95])
def test_somebody_must_be_left_to_train(share):
  with pytest.raises(DataError, match='at least one must be left'):
    subreddit_parts.divide(_documents(3, 3), held_out_share=share)


# ---- encoding ----------------------------------------------------------------


def test_characters_are_numbered_by_how_common_they_are():
  vocabulary = text_encoding.learn_vocabulary(['abba', 'aé', '🙂'], 6)
  # Padding and unknown take two of the numbers. Of equally common characters
  # the one with the lower code comes first.
  assert vocabulary.characters == 'abé🙂'
  encoded = vocabulary.encode(['ab', '', 'x🙂bbba'], 5)
  assert encoded.tolist() == [[2, 3, 0, 0, 0], [0] * 5, [1, 5, 3, 3, 3]]
  assert encoded.dtype == np.uint8
  smaller = text_encoding.learn_vocabulary(['abba', 'aé', '🙂'], 4)
  assert smaller.encode(['abé'], 3).tolist() == [[2, 3, 1]]


def test_a_vocabulary_without_characters_is_refused():
  with pytest.raises(OptionError, match='vocabulary_size: 2 leaves no number'):
    text_encoding.learn_vocabulary(['a'], 2)


# ---- predictors that read no text --------------------------------------------


def _labelled(labels_of: dict, **options) -> subreddit_data.Documents:
  """Authors' documents, one at a time, by their labels alone."""
  records = [
    (author, label, time, '.')
    for author, labels in labels_of.items()
    for time, label in enumerate(labels)
  ]
  return subreddit_data.from_records('test', records, **options)


def test_accuracies_can_be_counted_by_hand():
  # Ann trains on the first three.
  documents = _labelled({'ann': 'xxyyx', 'bob': 'yyyyy'})
  known = np.array([0, 1, 2, 5, 6, 7])
  parts = {'test': np.array([3, 4, 8, 9]), 'none': np.zeros(0, int)}
  found = subreddit_predictors.accuracies(documents, known, known, parts)
  # y is the largest class of those known, four of six. Ann is taken for x.
  assert found == {
    'largest_class': {'test': 0.75},
    'author_majority': {'test': 0.75},
    # What ann wrote last, y, is right of the next of two.
    'author_nearest_in_time': {'test': 0.75},
  }
  nobody = subreddit_predictors.accuracies(
    documents, known, known[:0], {'test': np.array([4])}
  )
  # Of whom nothing is known gets the largest class, y, and ann wrote x.
  assert nobody['author_majority'] == {'test': 0.0}
  assert nobody['author_nearest_in_time'] == {'test': 0.0}


def test_places_in_history_go_from_the_first_known_document_to_the_last():
  documents = _labelled({'ann': 'xxxxxx', 'bob': 'xxx', 'cat': 'x'})
  # Known are ann's documents 1, 3 and 4, and bob's last one; of cat nothing is.
  places = subreddit_parts.places_in_history(documents, np.array([8, 4, 1, 3]))
  assert places.tolist() == [0, 0, 0.25, 0.5, 1, 1, 0, 0, 0, 0]


def test_the_nearest_document_is_the_authors_own():
  documents = _labelled({'ann': 'xyzx', 'bob': 'xyz'})
  x, y, z = (documents.labels.index(label) for label in 'xyz')
  documents.time[:] = [0, 9, 20, 30, 40, 50, 60]
  rows = {str(row): np.array([row]) for row in range(7)}
  found = subreddit_predictors.accuracies(
    documents, np.arange(7), np.array([5, 2, 0]), rows
  )['author_nearest_in_time']
  said = np.array([x, x, z, z, y, y, y])
  assert list(found.values()) == (said == documents.label).tolist()


def test_areas_can_be_counted_by_hand():
  labels = {'ann': (1, 1, 1, 0), 'bob': (0, 1, 0, 0)}
  documents = _labelled(labels, labels=(0, 1))
  known = np.array([0, 1, 4, 5])
  parts = {'test': np.array([2, 3, 6, 7]), 'one label': np.array([6, 7])}
  found = subreddit_predictors.aucs(documents, known, known, parts)
  # Ann scores higher, with labels 1 and 0; bob lower, with 0 and 0. Of the
  # pairs (1, 0), one is a tie and two are in order.
  assert found['author_majority'] == {'test': pytest.approx(2.5 / 3)}
  assert found['largest_class'] == {'test': 0.5}
  # The label before is 1 for both.
  assert found['author_nearest_in_time'] == {'test': 0.5}


# ---- invented documents ------------------------------------------------------


def _score(documents, parts, *, with_author: bool) -> float:
  """Accuracy of a linear classifier of words, perhaps beside authors."""
  texts = [
    f'{text} author{author}' if with_author else text
    for text, author in zip(documents.texts, documents.author, strict=True)
  ]
  classifier = pipeline.make_pipeline(
    feature_extraction.text.CountVectorizer(),
    linear_model.LogisticRegression(max_iter=200),
  )
  train, test = parts['train'], parts['test']
  classifier.fit([texts[i] for i in train], documents.label[train])
  return classifier.score([texts[i] for i in test], documents.label[test])


def test_invented_comments_need_both_text_and_author():
  documents = subreddit_synthetic.comments()
  parts = subreddit_parts.divide(documents)
  found = subreddit_predictors.accuracies(
    documents, parts['train'], parts['train'], {'test': parts['test']}
  )
  majority = found['author_majority']['test']
  text = _score(documents, parts, with_author=False)
  assert found['largest_class']['test'] + 0.2 < min(majority, text)
  assert max(majority, text) + 0.02 < _score(documents, parts, with_author=True)


def test_invented_users_like_different_things():
  documents = subreddit_synthetic.messages()
  parts = subreddit_parts.divide(documents)
  found = subreddit_predictors.aucs(
    documents, parts['train'], parts['train'], {'test': parts['test']}
  )
  assert 0.6 < found['author_majority']['test'] < 0.9
  # What a user clicks on says little about what others do: a classifier of
  # words that all users share hardly knows more than the share of clicks.
  share = 1.0 - documents.label.mean()
  text = _score(documents, parts, with_author=False)
  assert text < max(share, 1.0 - share) + 0.05


@pytest.mark.parametrize(
  'invent', [subreddit_synthetic.comments, subreddit_synthetic.messages]
)
def test_inventions_follow_from_the_seed(invent):
  one, same, other = (_rows(invent(5, seed=seed)) for seed in (1, 1, 2))
  assert one == same != other


# ---- the real comments -------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not _REAL, reason='needs the real comments')
def test_the_real_comments_are_as_described():
  documents = subreddit_data.load('subreddit', _REAL, min_documents=50)
  assert documents.describe() == {
    'documents': 154_837,
    'authors': 1395,
    'mixed_authors': 600,
    'labels': 8,
    'left_out': {},
  }
  parts = subreddit_parts.divide(documents)
  train = parts['train']
  found = subreddit_predictors.accuracies(
    documents, train, train, {name: parts[name] for name in ('test', 'mixed')}
  )
  assert found['largest_class']['test'] == pytest.approx(0.51, abs=0.01)
  assert found['author_majority']['test'] == pytest.approx(0.915, abs=0.01)
  assert found['author_majority']['mixed'] == pytest.approx(0.795, abs=0.015)
  nearest = found['author_nearest_in_time']
  assert nearest['mixed'] == pytest.approx(0.88, abs=0.015)
