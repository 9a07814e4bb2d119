"""Invented ratings with the schema of the real ones."""

import numpy as np
import pandas as pd

from tasks.movielens.data import assemble
from tasks.movielens.data import generator as seeded_generator
from tasks.movielens.data import Ratings
from tasks.movielens.data import SYNTHETIC

# Length of the planted vectors.
_NUM_FACTORS = 3
# In stars: mean of the ratings before biases, standard deviation of the taste,
# and scale of the logistic noise, whose standard deviation is 1.81 times it.
_MEAN, _TASTE_SCALE, _NOISE_SCALE = 3.5, 0.8, 0.25


def generate(
  num_users: int = 600, num_items: int = 200, seed: int = 0
) -> Ratings:
  """Invent ratings by planted tastes, with the schema of MovieLens 1M.

  A rating is mean + item bias + user bias + taste + noise, rounded to a whole
  number from 1 to 5, where taste is the scalar product of a vector of the user
  and a vector of the item. Popular items are rated more often; users rate 20
  items or more, half of them more than 50. The attributes of users, gender to
  zip, are unrelated to the ratings.

  Args:
    num_users: Number of users.
    num_items: Number of items on offer. Items without ratings are left out, as
      in MovieLens; with the default sizes there are none.
    seed: Seed of all draws.
  """
  generator = seeded_generator(seed, SYNTHETIC)
  users, items = _who_rates_what(generator, num_users, num_items)
  order = generator.permutation(len(users))
  users, items = users[order], items[order]

  item_bias = generator.normal(0.0, 0.35, num_items)
  user_bias = generator.normal(0.0, 0.3, num_users)
  user_tastes = generator.normal(size=(num_users, _NUM_FACTORS))
  item_traits = generator.normal(size=(num_items, _NUM_FACTORS))
  taste = (user_tastes[users] * item_traits[items]).sum(axis=1)
  taste *= _TASTE_SCALE / np.sqrt(_NUM_FACTORS)
  planted = _MEAN + item_bias[items] + user_bias[users] + taste
  noise = generator.logistic(0.0, _NOISE_SCALE, len(planted))

  first_days = generator.integers(0, 365 * 86_400, num_users)
  gaps = 1 + generator.exponential(3_600.0, len(users)).astype(np.int64)
  table = pd.DataFrame(
    {
      'user_id': users + 1,
      'item_id': items + 1,
      'rating': np.clip(np.rint(planted + noise), 1.0, 5.0),
      # From the year 2000 on, each rating later than the user's last one.
      'timestamp': 946_684_800
      + first_days[users]
      + pd.Series(gaps).groupby(users).cumsum().to_numpy(),
    }
  )
  return assemble(
    'synthetic',
    table,
    {item + 1: f'Film {item + 1:04d}' for item in range(num_items)},
    _generate_users(generator, num_users),
    (1.0, 5.0),
  )


def _who_rates_what(
  generator: np.random.Generator, num_users: int, num_items: int
) -> tuple[np.ndarray, np.ndarray]:
  """Draw pairs of user and item without repetition, by popularity."""
  counts = np.rint(50.0 * np.exp(generator.normal(0.0, 0.6, num_users)))
  counts = np.clip(counts, min(20, num_items), num_items).astype(int)
  popularity = np.arange(1, num_items + 1) ** -0.7
  popularity = generator.permutation(popularity)
  # The largest of log(weight) + Gumbel noise are a weighted draw without
  # replacement.
  keys = np.log(popularity) + generator.gumbel(size=(num_users, num_items))
  ranked = np.argsort(-keys, axis=1)
  chosen = np.arange(num_items) < counts[:, np.newaxis]
  return np.nonzero(chosen)[0], ranked[chosen]


def _generate_users(
  generator: np.random.Generator, num_users: int
) -> pd.DataFrame:
  ages = np.asarray([1, 18, 25, 35, 45, 50, 56])
  occupations = generator.integers(0, 21, num_users)
  zips = generator.integers(0, 100_000, num_users)
  return pd.DataFrame(
    {
      'user_id': np.arange(1, num_users + 1),
      'gender': generator.choice(['F', 'M'], num_users),
      'age': generator.choice(ages, num_users),
      'occupation': [str(occupation) for occupation in occupations],
      'zip': [f'{code:05d}' for code in zips],
    }
  )
