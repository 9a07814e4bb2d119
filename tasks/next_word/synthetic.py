"""Invented sentences whose authors have their own words.

Words are common to all, or belong to one topic, or to one author. Common words
follow Zipf's law, and each has a favourite successor, so that there is
something to learn about the language. An author has a few topics, and names
that no other author uses; after each name the author mostly writes the same
word, so that there is something to learn about the author, and only from that
author.
"""

from typing import NamedTuple

import numpy as np

from tasks.next_word import tokenising
from tasks.next_word.sentences import gather
from tasks.next_word.sentences import Limits
from tasks.next_word.sentences import Message
from tasks.next_word.sentences import Sentences
from tff_partial import random_bits

_COMMON, _TOPICS, _OF_TOPIC = 200, 6, 20
_OWN = 4  # Names of an author.
_SHORTEST, _LONGEST = 4, 12  # Tokens of a sentence, including its last mark.
# Probability that a token is a word of the author's topic, or one of its names.
# Otherwise it is a common word.
_TOPICALITY, _PRIVACY = 0.2, 0.15
# Probability of the favourite successor: of a common word, of a name.
_HABIT, _OWN_HABIT = 0.5, 0.8
_FIRST_SECOND = 1_500_000_000


class _Language(NamedTuple):
  """Language shared by all authors.

  Words are numbers: common ones, those of the topics, those of authors.
  """

  frequency: np.ndarray  # Of common words, floats [common words].
  successor: np.ndarray  # The favourite successor of common and topic words.


def generate(
  num_authors: int = 60,
  sentences_per_author: int = 40,
  *,
  limits: Limits | None = None,
  seed: int = 0,
) -> Sentences:
  """Invent sentences.

  Args:
    num_authors: Number of authors.
    sentences_per_author: Mean number of an author's sentences; it varies from
      half to one and a half times as many.
    limits: Limits on what is used; by default none.
    seed: Seed of all draws.
  """
  generator = random_bits.generator('next word', seed, 'synthetic')
  frequency = 1.0 / np.arange(1, _COMMON + 1)
  language = _Language(
    frequency / frequency.sum(),
    generator.integers(_COMMON, size=_COMMON + _TOPICS * _OF_TOPIC),
  )
  names = [f'w{word}' for word in range(_COMMON)]
  names += [f't{t}_{word}' for t in range(_TOPICS) for word in range(_OF_TOPIC)]
  messages: list[Message] = []
  for author in range(num_authors):
    own = [f'name{author}_{number}' for number in range(_OWN)]
    low = (sentences_per_author + 1) // 2
    size = int(generator.integers(low, sentences_per_author * 3 // 2 + 1))
    rows, lengths = _invent(generator, language, size)
    times = _FIRST_SECOND + np.cumsum(generator.integers(60, 86_400, size))
    words = np.array(names + own)[rows]
    messages += [
      Message(f'author{author:04d}', time, ' '.join([*row[:length], '.']))
      for row, length, time in zip(
        words.tolist(), (lengths - 1).tolist(), times.tolist(), strict=True
      )
    ]
  return gather('synthetic', messages, tokenising.SPACED, limits or Limits())


def _invent(
  generator: np.random.Generator, language: _Language, size: int
) -> tuple[np.ndarray, np.ndarray]:
  """Invent the sentences of one author.

  Returns:
    Numbers of words, `[size, longest]`, and the number of tokens of each
    sentence, including its last mark, `[size]`.
  """
  num_common, num_shared = len(language.frequency), len(language.successor)
  own = generator.integers(num_common, size=_OWN)
  successor = np.concatenate([language.successor, own])
  habit = np.repeat([_HABIT, _OWN_HABIT], [num_shared, _OWN])
  taste = generator.dirichlet(np.full(_TOPICS, 0.3))
  topic = generator.choice(_TOPICS, size, p=taste)
  rows = np.zeros([size, _LONGEST], np.int64)
  for place in range(_LONGEST):
    kind = generator.random(size)
    drawn = np.select(
      [kind < _PRIVACY, kind < _PRIVACY + _TOPICALITY],
      [
        num_shared + generator.integers(_OWN, size=size),
        num_common
        + _OF_TOPIC * topic
        + generator.integers(_OF_TOPIC, size=size),
      ],
      generator.choice(num_common, size, p=language.frequency),
    )
    if place:
      before = rows[:, place - 1]
      follows = generator.random(size) < habit[before]
      drawn = np.where(follows, successor[before], drawn)
    rows[:, place] = drawn
  return rows, generator.integers(_SHORTEST, _LONGEST + 1, size)
