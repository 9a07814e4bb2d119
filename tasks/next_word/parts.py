"""Division of users and sentences into training, validation and test.

Users are divided at random (`divide_users`), as in section 5.1.2 of the
FedRecon paper, where measured users did not train: the older half of a user's
sentences is the support set, the newer half the query set. Or each user's
sentences are divided by time (`divide_sentences`): all users train on their
older ones and are measured on later ones.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import numpy as np

from tasks.errors import OptionError
from tasks.next_word.sentences import Sentences
from tasks.task import TEST
from tasks.task import TRAIN
from tasks.task import VALIDATION
from tff_partial import random_bits

# Shares of the users, or of each user's sentences.
_VALIDATION_SHARE, _TEST_SHARE = 0.1, 0.2


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
  """The sentences of some users, cut in two by time.

  Attributes:
    users: Positions in `Sentences.authors`, ascending, `[users]`.
    older: Range of each user's older sentences, `[users, 2]`.
    newer: Range of each user's newer sentences, `[users, 2]`.
    knows_past: True if users have trained on the older ones. Then these belong
      to the part only where examples are marked.
  """

  users: np.ndarray
  older: np.ndarray
  newer: np.ndarray
  knows_past: bool = False


def divide_users(sentences: Sentences, *, seed: int = 0) -> dict[str, Part]:
  """Divide users at random.

  The last users of a random order are for tests, those before them for
  validation; both numbers are rounded.

  Args:
    sentences: A corpus.
    seed: Determines the division, together with the authors' names only.

  Returns:
    TRAIN, VALIDATION and TEST, mapped to their parts.

  Raises:
    OptionError: If a part would have no user.
  """
  number = len(sentences.authors)
  order = random_bits.generator('next word', seed, 'parts').permutation(number)
  num_test = round(_TEST_SHARE * number)
  num_validation = round(_VALIDATION_SHARE * number)
  cuts = [number - num_test - num_validation, number - num_test]
  parts = {}
  divided = np.split(order, cuts)
  for part, users in zip((TRAIN, VALIDATION, TEST), divided, strict=True):
    if not len(users):
      raise OptionError(
        f'{part}: none of {number} users is left for it. Give data of '
        'more users.'
      )
    users = np.sort(users)
    first, last = sentences.bounds[users], sentences.bounds[users + 1]
    parts[part] = _halves(users, first, last)
  return parts


def divide_sentences(sentences: Sentences) -> dict[str, Part]:
  """Divide each user's sentences by time: the last ones are for tests.

  Of a user's n sentences, those for training end at n times their share,
  rounded down, but are at least one; those for validation end likewise. Users
  without sentences for a part are not in it.

  Returns:
    TRAIN, VALIDATION and TEST, mapped to their parts. In the latter two, the
    older sentences are those of training.

  Raises:
    OptionError: If a part would have no sentence.
  """
  first, last = sentences.bounds[:-1], sentences.bounds[1:]
  # The small number keeps a product such as 0.7 * 10 from falling below 7.
  train_end, validation_end = (
    first + np.maximum(np.floor((last - first) * share + 1e-6), 1).astype(int)
    for share in (1.0 - _VALIDATION_SHARE - _TEST_SHARE, 1.0 - _TEST_SHARE)
  )
  users = np.arange(len(first))
  past = np.stack([first, train_end], axis=1)
  parts = {TRAIN: _halves(users, first, train_end)}
  for part, begin, end in (
    (VALIDATION, train_end, validation_end),
    (TEST, validation_end, last),
  ):
    has_any = begin < end
    if not has_any.any():
      raise OptionError(
        f'{part}: no sentence is left for it. Give data with more sentences '
        'of each user.'
      )
    newer = np.stack([begin, end], axis=1)
    parts[part] = Part(users[has_any], past[has_any], newer[has_any], True)
  return parts


def describe(parts: Mapping[str, Part]) -> dict[str, Any]:
  counted = {}
  for part, held in parts.items():
    ranges = [held.newer] if held.knows_past else [held.older, held.newer]
    number = int(np.diff(ranges).sum())
    counted[part] = {'users': len(held.users), 'sentences': number}
  return counted


def _halves(users: np.ndarray, first: np.ndarray, last: np.ndarray) -> Part:
  """Cut sentences as `splits.halves` does: odd numbers round to even."""
  size = last - first
  half = np.clip(
    np.rint(0.5 * size).astype(int),
    np.minimum(size, 1),
    np.maximum(size - 1, 0),
  )
  middle = first + half
  return Part(
    users, np.stack([first, middle], axis=1), np.stack([middle, last], axis=1)
  )
