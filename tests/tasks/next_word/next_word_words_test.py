"""Tests of vocabularies: chosen exactly, or under differential privacy."""

import functools
import json
import math
from typing import Any

import numpy as np
import pytest

from tasks.errors import DataError
from tasks.errors import OptionError
from tasks.next_word import on_disk
from tasks.next_word import private_words
from tasks.next_word import sentences as sentences_lib
from tasks.next_word import synthetic
from tasks.next_word import tokenising
from tasks.next_word import words as words_lib
from tasks.next_word.sentences import Limits
from tasks.next_word.sentences import Message
from tff_partial.dp import accounting
from tff_partial.dp import clipping
from tff_partial.dp import privacy_plans
from tff_partial.dp import samplings


def _gather(texts: dict[str, str]) -> sentences_lib.Sentences:
  return sentences_lib.gather(
    'small',
    [Message(author, 0, text) for author, text in texts.items()],
    tokenising.SPACED,
    Limits(),
  )


# the: 4, cat: 2, sat: 2, dog: 1, ran: 1. Dan is not in training.
_TEXTS = {
  'ann': 'the the cat sat the',
  'bob': 'the dog ran cat sat',
  'dan': 'the bird bird bird flew',
}
_TRAINING = [0, 1]


@pytest.fixture(scope='module')
def small() -> sentences_lib.Sentences:
  return _gather(_TEXTS)


def _learned(sentences, users, size: int) -> words_lib.Words:
  counts = words_lib.count(sentences, users)
  return words_lib.choose(counts, sentences, size, 1)


# ---- the most frequent words -------------------------------------------------


def test_words_are_ordered_by_count_then_by_name(small):
  assert _learned(small, _TRAINING, 4).words == ('the', 'cat', 'sat', 'dog')
  # Of cat and sat, which occur equally often, the first by name.
  assert _learned(small, _TRAINING, 2).words == ('the', 'cat')


def test_users_outside_training_teach_no_word(small):
  every = _learned(small, _TRAINING, 100).words
  assert set(every) == {'the', 'cat', 'sat', 'dog', 'ran'}
  with_dan = _learned(small, [0, 1, 2], 2).words
  assert with_dan == ('the', 'bird')


def test_counts_are_added_up_in_pieces(small, monkeypatch):
  whole = words_lib.count(small, [0, 1, 2])
  assert whole.sum() == 15 and whole.index.is_monotonic_increasing
  monkeypatch.setattr(sentences_lib, '_BATCH', 1)
  monkeypatch.setattr(words_lib, '_HELD', 4)
  pieces = words_lib.count(small, [0, 1, 2])
  assert pieces.to_dict() == whole.to_dict()


def test_a_vocabulary_needs_words(small):
  with pytest.raises(DataError, match='small: .* no word to learn from'):
    _learned(small, [], 3)


# ---- numbers -----------------------------------------------------------------


def test_numbers_are_those_of_the_table():
  words = words_lib.Words(('the', 'cat'), buckets=5)
  prints = on_disk.fingerprints(['cat', 'the', 'dog', 'the'])
  # V = 2 and B = 5: words 1 and 2, buckets 3 to 7, beginning 8, end 9.
  bucket = on_disk.fingerprint('dog') % 5
  numbers = words.numbers(prints)
  assert numbers.tolist() == [2, 1, 3 + bucket, 1]
  assert numbers.dtype == np.int32
  tokens = words.tokens
  assert (tokens.pad, tokens.first_bucket) == (0, 3)
  assert (tokens.begin, tokens.end, tokens.total) == (8, 9, 10)


def test_all_buckets_are_used_and_none_beyond():
  words = words_lib.Words(('the',), buckets=7)
  others = on_disk.fingerprints([f'w{number}' for number in range(200)])
  assert set(words.numbers(others)) == set(range(2, 9))


def test_a_row_is_beginning_sentence_end_and_padding():
  words = words_lib.Words(('the', 'cat'), buckets=1)
  prints = on_disk.fingerprints('the cat the dog the cat the'.split())
  # Three sentences: of 2, 4 and 1 tokens, where 4 are the most.
  rows = words.encode(prints, np.array([2, 4, 1]), 4)
  assert rows.tolist() == [[4, 1, 2, 5, 0], [4, 1, 3, 1, 2], [4, 1, 5, 0, 0]]


def test_coverage_is_the_share_of_tokens_in_the_vocabulary(small):
  words = words_lib.Words(('the', 'cat'), buckets=1)
  assert words.coverage(small, [0]) == {'tokens': 5, 'coverage': 0.8}
  assert words.coverage(small, [0, 2]) == {'tokens': 10, 'coverage': 0.5}
  assert words.coverage(small, []) == {'tokens': 0, 'coverage': 0.0}


# ---- under differential privacy ----------------------------------------------


def _chosen(sentences, users, size, mechanism, seed=0):
  return private_words.learn(sentences, users, size, mechanism, noise_seed=seed)


def test_a_user_counts_for_its_most_frequent_words_alone(small):
  counts = private_words.bounded_counts(small, [0, 1, 2], 1)
  found = dict(zip(small.lexicon.words_of(counts.index), counts, strict=True))
  # The for ann, bird for dan, and one of bob's five words.
  assert found.pop('the', 0) + found.pop('bird', 0) + sum(found.values()) == 3
  of_ann = private_words.bounded_counts(small, [0], 1)
  assert small.lexicon.words_of(of_ann.index) == ['the']


def test_without_noise_it_is_exact_but_for_the_bound(small):
  exact = private_words.NoisyThreshold(100, 0.0, 1e-6)
  released = _chosen(small, _TRAINING, 100, exact)
  # How many of two users have it: the, cat, sat 2, dog and ran 1.
  assert released.words == ('cat', 'sat', 'the', 'dog', 'ran')
  assert exact.threshold == 1.0


def test_one_user_moves_the_counts_by_the_sensitivity_at_most():
  sentences = synthetic.generate(num_authors=8)
  for bound in (1, 9, 30):
    with_all = private_words.bounded_counts(sentences, range(8), bound)
    without = private_words.bounded_counts(sentences, range(7), bound)
    changes = with_all.sub(without, fill_value=0)
    assert set(changes) <= {0, 1}
    assert math.sqrt((changes**2).sum()) <= math.sqrt(bound)


def test_users_that_use_words_equally_often_choose_different_ones():
  text = ' '.join(f'w{number}' for number in range(20))
  alike = _gather({f'user{number}': text for number in range(40)})
  counts = private_words.bounded_counts(alike, range(40), 5)
  # Each of 20 words is expected in 10 of the 40 choices of 5.
  assert (len(counts), counts.sum()) == (20, 200) and counts.max() < 25


def test_threshold_keeps_words_of_one_user_below():
  # One word a user: it stays below with probability 1 - delta.
  one = private_words.NoisyThreshold(1, 2.0, 0.158655)
  # A normal number is above its standard deviation with probability 0.158655.
  assert one.threshold == pytest.approx(1.0 + 2.0, abs=1e-4)
  # Four words: noise sqrt(4) times as large, and all of them must stay below.
  four = private_words.NoisyThreshold(4, 2.0, 1.0 - (1.0 - 0.158655) ** 4)
  assert four.stddev == 4.0
  assert four.threshold == pytest.approx(1.0 + 4.0, abs=1e-4)


def test_a_word_of_one_user_is_told_as_rarely_as_promised():
  sentences = _gather({f'user{n}': f'common secret{n}' for n in range(60)})
  mechanism = private_words.NoisyThreshold(2, 1.0, 0.016)
  # Of each user's two words one is secret, and told with probability 0.008:
  # 40 times 60 of them are expected to be told 19 times.
  told = 0
  for seed in range(40):
    released = _chosen(sentences, range(60), 60, mechanism, seed)
    assert released.words[0] == 'common'
    told += len(released.words) - 1
  assert 6 <= told <= 33


def test_noise_follows_from_its_seed_and_is_secret_without_one():
  sentences = synthetic.generate(num_authors=30, sentences_per_author=10)
  mechanism = private_words.NoisyThreshold(30, 0.3, 0.03)
  draws = [
    _chosen(sentences, range(30), 50, mechanism, seed)
    for seed in (0, 0, 1, None, None)
  ]
  assert draws[0] == draws[1]
  assert len({each.words for each in draws}) == 4


def test_a_plan_of_a_run_pays_for_the_vocabulary():
  noise = accounting.calibrate(
    2.0, samplings.PoissonSampling(1.0), rounds=1, delta=5e-7
  )
  mechanism = private_words.NoisyThreshold(50, noise, 5e-7)
  plan = privacy_plans.plan(
    clipping.FixedClip(1.0),
    noise_multiplier=20.0,
    delta=1e-6 - mechanism.delta,
    population=100_000,
    clients_per_round=100,
    rounds=1,
    once=[mechanism.noise_multiplier],
  )
  # Next to the vocabulary, one round with so much noise costs nothing.
  assert plan.epsilon == pytest.approx(2.0, rel=0.01)


def test_too_few_users_are_refused(small):
  published = private_words.NoisyThreshold(5, 0.1, 0.5)
  with pytest.raises(OptionError, match='publishing one user of 2'):
    _chosen(small, _TRAINING, 5, published)
  # 1 + 5 * sqrt(5) * 4.9 is far above 2.
  few = private_words.NoisyThreshold(5, 5.0, 1e-6)
  with pytest.raises(OptionError, match='only 2 take part'):
    _chosen(small, _TRAINING, 5, few)


def test_fewer_words_than_wanted_are_no_error(caplog):
  texts = {f'user{number}': 'common the' for number in range(60)}
  sentences = _gather({**texts, 'user0': 'secret'})
  mechanism = private_words.NoisyThreshold(2, 1.0, 1e-6)
  with caplog.at_level('WARNING', logger='absl'):
    released = _chosen(sentences, range(60), 10, mechanism)
  assert set(released.words) == {'common', 'the'}
  assert '2 words pass the threshold' in caplog.text


# ---- what was drawn is kept --------------------------------------------------


_NOISY, _NOISIER = (
  private_words.NoisyThreshold(30, noise, 0.02) for noise in (0.3, 0.4)
)


@pytest.fixture(name='many')
def fixture_many() -> sentences_lib.Sentences:
  return synthetic.generate(num_authors=40, sentences_per_author=10)


def test_words_that_are_kept_are_taken_and_not_drawn(many):
  kept: list[Any] = []
  first = private_words.learn(many, range(30), 50, _NOISY, keep=kept.append)
  (drawn,) = json.loads(json.dumps(kept))
  again = private_words.learn(many, range(30), 50, _NOISY, kept=drawn)
  assert again == first
  # By the same seed they would come again.
  assert len(drawn['noise']) == 2


@pytest.mark.parametrize(
  ('changed', 'said'),
  [
    ({'size': 49}, 'vocabulary_size=50, and is asked for with .*=49'),
    ({'users': range(29)}, 'users=30'),
    ({'noise_seed': 1}, 'noise_seed=None'),
    ({'mechanism': _NOISIER}, 'noise_multiplier=0.3'),
  ],
)
def test_words_that_were_drawn_otherwise_are_refused(many, changed, said):
  asked = {'users': range(30), 'size': 50, 'mechanism': _NOISY}
  kept: list[Any] = []
  private_words.learn(many, **asked, keep=kept.append)
  with pytest.raises(OptionError, match=said):
    private_words.learn(many, **{**asked, **changed}, kept=kept[0])


def test_a_run_does_not_begin_with_words_of_other_sentences(many):
  kept: list[Any] = []
  private_words.learn(many, range(30), 50, _NOISY, keep=kept.append)
  others = range(1, 31)
  # To measure others is another thing than to train.
  private_words.learn(many, others, 50, _NOISY, kept=kept[0])
  with pytest.raises(OptionError, match='of other users or other sentences'):
    private_words.learn(
      many, others, 50, _NOISY, kept=kept[0], keep=kept.append
    )
  assert len(kept) == 1


def test_that_no_word_passed_is_an_error_and_kept_too():
  rare = _gather({f'user{number}': f'w{number}' for number in range(30)})
  mechanism = private_words.NoisyThreshold(1, 1.0, 1e-9)
  kept: list[Any] = []
  learn = functools.partial(private_words.learn, rare, range(30), 5, mechanism)
  with pytest.raises(DataError, match='no word passes the threshold of 7.0'):
    learn(keep=kept.append)
  with pytest.raises(DataError, match='no word passes the threshold of 7.0'):
    learn(kept=kept[0])
  assert kept[0]['words'] == ()


def test_what_stands_in_has_the_size_and_no_word_of_a_user(many):
  words = private_words.stand_in(50, 5)
  assert words.tokens == words_lib.Tokens(50, 5)
  tokens = np.concatenate(list(many.batches(range(40))))
  assert (words.numbers(tokens) >= words.tokens.first_bucket).all()
