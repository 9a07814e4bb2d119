"""Division of records into training, validation and test.

The split is random within each user (HPFL, section 5.2.1), by pairs of user and
item: a student may answer the same problem again, and the first answer is
informative about the second, so that all records of a pair are in one part.
"""

import numpy as np

from tasks import task
from tasks.errors import OptionError
from tasks.user_modeling.records import Records
from tff_partial import random_bits

# Share of a user's pairs for tests in the paper, and of the others for
# validation.
TEST_SHARE, _VALIDATION_SHARE = 0.2, 0.1


def divide(records: Records, *, seed: int = 0, repeat: int = 0) -> np.ndarray:
  """Divide each user's pairs of user and item at random.

  Of a user's n pairs, a fifth are for tests, and a tenth of the others for
  validation; both are rounded, halves upward, and at least one pair
  is left for training. Thus 25 pairs become 18, 2 and 5, and a single one is
  for training. A client's split does not depend on the other clients, nor on
  the order of the records.

  Args:
    records: The records to divide.
    seed: Determines the split, together with `repeat`.
    repeat: The number of the repetition; the paper has five.

  Returns:
    int8 `[records]`: positions in `task.PARTS`.
  """
  codes = np.zeros(len(records), np.int8)
  for index, name in enumerate(records.clients):
    rows = np.flatnonzero(records.client == index)
    generator = random_bits.generator('parts', seed, repeat, name)
    codes[rows] = _divide_client(
      records.user[rows].astype(np.int64),
      records.item[rows].astype(np.int64),
      generator,
    )
  return codes


def divided(
  records: Records, *, seed: int = 0, repeat: int = 0
) -> dict[str, Records]:
  """Divide records as `divide` does; refuse parts without records."""
  codes, found = divide(records, seed=seed, repeat=repeat), {}
  for code, part in enumerate(task.PARTS):
    found[part] = records.take(codes == code)
    if not len(found[part]):
      raise OptionError(
        f'{part}: no record is left for it. Give data with more records of '
        'each user.'
      )
  return found


def _divide_client(
  user: np.ndarray, item: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
  """Return the codes of one client's records."""
  if not len(user):
    return np.zeros(0, np.int8)
  size = int(item.max()) + 1
  pairs, pair_of = np.unique(user * size + item, return_inverse=True)
  users = pairs // size
  counts = np.bincount(users)
  starts = np.cumsum(counts) - counts
  # Rank of each pair in a random order of the user's pairs.
  order = np.lexsort((generator.random(len(pairs)), users))
  place = np.empty(len(pairs), np.int64)
  place[order] = np.arange(len(pairs))
  place -= starts[users]
  # One pair of each user is left for training.
  num_test = np.minimum(_rounded(TEST_SHARE * counts), counts - 1)
  others = counts - num_test
  num_validation = np.minimum(_rounded(_VALIDATION_SHARE * others), others - 1)
  is_test = place < num_test[users]
  is_validation = ~is_test & (place < (num_test + num_validation)[users])
  codes = np.zeros(len(pairs), np.int8)
  codes[is_test] = task.PARTS.index(task.TEST)
  codes[is_validation] = task.PARTS.index(task.VALIDATION)
  return codes[pair_of]


def _rounded(numbers: np.ndarray) -> np.ndarray:
  # The small number keeps 0.1 * 15 from falling below 1.5.
  return np.floor(numbers + 0.5 + 1e-9).astype(np.int64)
