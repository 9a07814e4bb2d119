"""Invented documents whose authors differ, with the real ones' schema.

Words are invented, some of which belong to one topic. In `comments` a topic is
a subreddit: an author has favourites, and a comment consists mostly of common
words, so that neither the text nor the author alone predicts the subreddit. In
`messages` a user clicks by a personal taste for topics: one user likes topics
that another dislikes, so that the text alone predicts little.
"""

from collections.abc import Sequence

import numpy as np

from tasks.subreddit import data as subreddit_data

_COMMON_WORDS, _TOPIC_WORDS = 60, 12
# Concentration of the symmetric Dirichlet distribution of an author's choices:
# the smaller, the fewer subreddits an author has.
_LOYALTY = 0.5
_FIRST_SECOND = 1_500_000_000
_SYLLABLES = [c + v for c in 'bdfgklmnprstvz' for v in 'aeiou']


def comments(
  num_authors: int = 60,
  num_subreddits: int = 6,
  comments_per_author: int = 60,
  seed: int = 0,
) -> subreddit_data.Documents:
  """Invent comments.

  Args:
    num_authors: Number of authors.
    num_subreddits: Number of subreddits.
    comments_per_author: Mean number of an author's comments; it varies from
      half to one and a half times as many.
    seed: Seed of all draws.
  """
  generator = subreddit_data.generator(seed, 'comments')
  words, topics = _words(generator, num_subreddits)
  records = []
  for author in range(num_authors):
    favour = generator.dirichlet(np.full(num_subreddits, _LOYALTY))
    for time in _times(generator, comments_per_author):
      subreddit = int(generator.choice(num_subreddits, p=favour))
      text = _sentence(generator, words, topics[subreddit], 0.3)
      records.append((f'author{author:04d}', f'r{subreddit}', time, text))
  return subreddit_data.from_records('synthetic', records)


def messages(
  num_users: int = 60,
  num_topics: int = 6,
  messages_per_user: int = 60,
  seed: int = 0,
  *,
  taste_scale: float = 2.5,
) -> subreddit_data.Documents:
  """Invent messages with a label: 1 if a suggestion is clicked on.

  The logit of a click is -1, plus the user's habit, plus the user's taste for
  the message's topic. All users write alike.

  Args:
    num_users: Number of users.
    num_topics: Number of topics.
    messages_per_user: Mean number of a user's messages.
    seed: Seed of all draws.
    taste_scale: Standard deviation of a user's taste for a topic.
  """
  generator = subreddit_data.generator(seed, 'messages')
  words, topics = _words(generator, num_topics)
  records = []
  for user in range(num_users):
    habit = generator.normal(0.0, 0.5)
    taste = generator.normal(0.0, taste_scale, num_topics)
    for time in _times(generator, messages_per_user):
      topic = int(generator.integers(num_topics))
      logit = -1.0 + habit + taste[topic]
      clicks = int(generator.random() < 1.0 / (1.0 + np.exp(-logit)))
      text = _sentence(generator, words, topics[topic], 0.5)
      records.append((f'user{user:04d}', clicks, time, text))
  return subreddit_data.from_records('synthetic', records, labels=(0, 1))


def _words(
  generator: np.random.Generator, num_topics: int
) -> tuple[list[str], list[list[str]]]:
  """Invent common words, and words of each topic; all differ."""
  number = _COMMON_WORDS + num_topics * _TOPIC_WORDS
  invented: dict[str, None] = {}
  while len(invented) < number:
    length = int(generator.integers(1, 4))
    invented[''.join(generator.choice(_SYLLABLES, length))] = None
  all_words = list(invented)
  starts = range(_COMMON_WORDS, number, _TOPIC_WORDS)
  topics = [all_words[start : start + _TOPIC_WORDS] for start in starts]
  return all_words[:_COMMON_WORDS], topics


def _times(generator: np.random.Generator, mean: int) -> list[int]:
  """Invent the ascending times of one author's documents."""
  number = int(generator.integers(max(mean // 2, 1), mean + mean // 2 + 1))
  gaps = generator.integers(60, 86_400, number)
  return (_FIRST_SECOND + np.cumsum(gaps)).tolist()


def _sentence(
  generator: np.random.Generator,
  common: Sequence[str],
  topic: Sequence[str],
  topicality: float,
) -> str:
  """Invent a text, whose words belong to its topic with that probability."""
  number = int(generator.integers(3, 9))
  of_topic = generator.random(number) < topicality
  places = generator.random(number)
  return ' '.join(
    source[int(place * len(source))]
    for source, place in zip(
      [topic if mine else common for mine in of_topic], places, strict=True
    )
  )
