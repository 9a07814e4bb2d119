"""Which id stands for which value."""

import contextlib
import datetime
import pickle
import types
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tff_partial.data import vocabularies
from tff_partial.data import vocabulary_checks
from tff_partial.data.vocabularies import Vocabulary
from tff_partial.data.vocabularies import VocabularyError


def test_values_are_numbered_in_their_order():
  films = Vocabulary(['Heat', 'Alien', 'Heat', 'Zorro'])
  assert films.values == ('Alien', 'Heat', 'Zorro')
  assert len(films) == 3
  assert films.encode(['Zorro', 'Alien', 'Brazil']).tolist() == [2, 0, -1]
  assert films.decode(np.array([1, 2])) == ['Heat', 'Zorro']


def test_unseen_values_may_share_the_first_id():
  films = Vocabulary(['Heat', 'Alien'], unseen=True)
  assert len(films) == 3
  assert films.encode(['Heat', 'Brazil', 'Alien']).tolist() == [2, 0, 1]
  assert films.decode([0, 1, 2]) == [None, 'Alien', 'Heat']


@pytest.mark.parametrize(
  ('given', 'message'),
  [
    (Vocabulary('ab'), 'a mapping from column .* found a Vocabulary'),
    ({'film': ['a', 'b']}, r"vocabularies\['film'\]: .* found a list"),
  ],
)
def test_what_are_no_vocabularies_of_columns_is_refused(given, message):
  with pytest.raises(VocabularyError, match=message):
    vocabularies.describe(given)


@pytest.mark.parametrize(
  'values', [[7, 3, 7], pd.Series([7, 3]), pd.Series([7, 3], dtype='Int64')]
)
def test_numbers_are_values_like_any_other(values):
  assert Vocabulary(values).encode([3, 7]).tolist() == [0, 1]


def test_equal_vocabularies_encode_alike():
  films = Vocabulary(['b', 'a'])
  assert films == Vocabulary(['a', 'b', 'a'])
  assert hash(films) == hash(Vocabulary(['a', 'b']))
  assert films != Vocabulary(['a', 'b'], unseen=True)
  assert films != Vocabulary(['a'])
  assert pickle.loads(pickle.dumps(films)) == films


def test_a_column_of_a_number_is_compared_with_that_of_a_file(tmp_path):
  vocabularies.save({1: Vocabulary('ab')}, tmp_path)
  loaded = types.SimpleNamespace(vocabularies=vocabularies.load(tmp_path))
  for values in ('ba', 'bc'):
    measured = types.SimpleNamespace(vocabularies={1: Vocabulary(values)})
    refused = pytest.raises(VocabularyError, match="Column '1': clients that")
    with refused if 'c' in values else contextlib.nullcontext():
      vocabulary_checks.check_alike(loaded, measured)


def test_columns_of_other_names_are_compared_by_their_vocabularies(caplog):
  def clients(**columns: str) -> Any:
    held = {column: Vocabulary(values) for column, values in columns.items()}
    return types.SimpleNamespace(vocabularies=held)

  trained = clients(film='ab', genre='xyz')
  vocabulary_checks.check_alike(trained, clients(item='ba', genre='xyz'))
  with pytest.raises(VocabularyError, match="Column 'film': .* have a Vocab"):
    vocabulary_checks.check_alike(trained, clients(item='b', genre='xyz'))
  assert not caplog.records
  vocabulary_checks.check_alike(trained, clients())  # Such as `pack` makes.
  assert "encode ['film', 'genre']: ids are taken" in caplog.text


def test_a_vocabulary_says_what_is_in_it():
  assert repr(Vocabulary('ab')) == "Vocabulary of 2 ids ('a', 'b')"
  assert repr(Vocabulary(range(2000), unseen=True)) == (
    'Vocabulary of 2,001 ids (0, 1, 2, ..., unseen=True)'
  )


@pytest.mark.parametrize(
  'values',
  [
    *([], ['a', None], [1.0, np.nan], [pd.NA, 'a'], [pd.NaT]),
    *(np.array([1, np.nan], 'f4'), np.array(['2001', 'NaT'], 'M8[D]')),
  ],
)
def test_missing_values_are_no_values(values):
  with pytest.raises(VocabularyError, match='of which none is missing'):
    Vocabulary(values)


def test_values_of_several_types_are_refused():
  with pytest.raises(
    VocabularyError, match=r"of one type, found \['int', 'str'\]"
  ):
    Vocabulary([1, 'a'])


def test_texts_are_no_unseen_numbers():
  with pytest.raises(VocabularyError, match="'7' is a str, but .* like 3"):
    Vocabulary([7, 3], unseen=True).encode([3, '7'])


@pytest.mark.parametrize('value', [b'a', datetime.date(2020, 1, 2)])
def test_what_is_no_text_is_no_unseen_text(value):
  texts = Vocabulary(['a', '2020-01-02'], unseen=True)
  with pytest.raises(VocabularyError, match='Convert one of them'):
    texts.encode(['a', value])
  assert texts.encode(['b', None]).tolist() == [0, 0]


@pytest.mark.parametrize('number', [-1, 2, 0.5])
def test_an_id_that_there_is_not_is_refused(number):
  with pytest.raises(VocabularyError, match=f'no id {number}; ids are 0 to 1'):
    Vocabulary('ab').decode([number])
