"""Invented records with planted attributes, at clients of very unequal size.

A user has a strength in each attribute, an item a difficulty and one to three
attributes; the answer depends on how far the mean strength in the item's
attributes exceeds its difficulty. Clients differ in their numbers of users, in
their items, and in their users' strengths.
"""

from typing import NamedTuple

import numpy as np

from tasks.user_modeling import records
from tff_partial import random_bits

# Shares of items with one, two and three attributes.
_ATTRIBUTES_PER_ITEM = (0.55, 0.3, 0.15)
_DIFFICULTY = 0.8  # Standard deviations, in units of strength.
_CLIENT_STRENGTH, _USER_STRENGTH = 0.5, 1.0
_STEEPNESS = 1.8  # Of the logit of a right answer.
_STARS, _NOISE = 1.1, 0.5  # Stars a unit of strength, and their noise.


class _Items(NamedTuple):
  difficulty: np.ndarray  # Floats [items].
  has: np.ndarray  # Bool [items, attributes].


def generate(
  num_clients: int = 8,
  smallest: int = 6,
  largest: int = 60,
  *,
  num_items: int = 120,
  num_attributes: int = 6,
  records_per_user: int = 30,
  five_points: bool = False,
  seed: int = 0,
) -> records.Records:
  """Invent records.

  Args:
    num_clients: Number of clients.
    smallest: Users of the smallest client.
    largest: Users of the largest one; the others are in between, in geometric
      progression. The more users, the more items a client has.
    num_items: Number of items of all clients. Items without a record are left
      out, as in real data.
    num_attributes: Number of attributes.
    records_per_user: Mean number of a user's records; it varies from half to
      one and a half times as many, without repeated items.
    five_points: True for answers 1 to 5 instead of 0 and 1.
    seed: Seed of all draws.
  """
  generator = random_bits.generator('user modeling', seed, 'synthetic')
  items = _invent_items(generator, num_items, num_attributes)
  sizes = np.rint(np.geomspace(smallest, largest, num_clients)).astype(int)
  rows = []
  first_user = 0
  for client, size in enumerate(sizes):
    on_offer = round(num_items * (0.3 + 0.6 * size / largest))
    user, item, advantage = _invent_client(
      generator, items, int(size), max(on_offer, 1), records_per_user
    )
    answer = _answers(generator, advantage, five_points)
    rows.append((np.full(len(user), client), first_user + user, item, answer))
    first_user += int(size)
  clients, users, chosen, answers = map(np.concatenate, zip(*rows, strict=True))
  tagged, attributes = np.nonzero(items.has)
  return records.build(
    'synthetic',
    client=clients,
    user=users,
    item=chosen,
    answer=answers,
    tags=records.Tags(
      tagged, attributes, {k: f'attribute {k}' for k in range(num_attributes)}
    ),
    scale=(1.0, 5.0) if five_points else (0.0, 1.0),
  )


def _invent_items(
  generator: np.random.Generator, num_items: int, num_attributes: int
) -> _Items:
  number = 1 + generator.choice(
    len(_ATTRIBUTES_PER_ITEM), num_items, p=_ATTRIBUTES_PER_ITEM
  )
  shuffled = generator.random((num_items, num_attributes)).argsort(axis=1)
  return _Items(
    generator.normal(0.0, _DIFFICULTY, num_items),
    shuffled < number[:, np.newaxis],
  )


def _invent_client(
  generator: np.random.Generator,
  items: _Items,
  num_users: int,
  num_items: int,
  records_per_user: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Return users, items and advantages (strength - difficulty) of records."""
  has = items.has / items.has.sum(axis=1, keepdims=True)
  num_attributes = has.shape[1]
  # The client's preferred attributes.
  weights = has @ generator.dirichlet(np.ones(num_attributes))
  on_offer = _draw(generator, weights[np.newaxis], np.array([num_items]))[1]
  low, high = (records_per_user + 1) // 2, records_per_user * 3 // 2
  counts = generator.integers(low, high + 1, num_users)
  user, place = _draw(generator, np.ones((num_users, len(on_offer))), counts)
  item = on_offer[place]
  strength = generator.normal(0.0, _CLIENT_STRENGTH, num_attributes)
  strength = strength + generator.normal(
    0.0, _USER_STRENGTH, (num_users, num_attributes)
  )
  advantage = (strength[user] * has[item]).sum(axis=1) - items.difficulty[item]
  return user, item, advantage


def _draw(
  generator: np.random.Generator, weights: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Draw weighted columns of each row without replacement."""
  # The largest of log(weight) + Gumbel noise are such a draw.
  keys = np.log(weights + 1e-9) + generator.gumbel(size=weights.shape)
  ranked = np.argsort(-keys, axis=1)
  is_drawn = np.arange(weights.shape[1]) < counts[:, np.newaxis]
  return np.nonzero(is_drawn)[0], ranked[is_drawn]


def _answers(
  generator: np.random.Generator, advantage: np.ndarray, five_points: bool
) -> np.ndarray:
  """Draw answers, which increase with the advantage."""
  if five_points:
    noise = generator.normal(0.0, _NOISE, len(advantage))
    return np.clip(np.rint(3.0 + _STARS * advantage + noise), 1.0, 5.0)
  probability = 1.0 / (1.0 + np.exp(-_STEEPNESS * advantage))
  return (generator.random(len(advantage)) < probability).astype(np.float32)
