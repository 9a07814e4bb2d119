"""The small problem that all implementations are given, in NumPy alone.

Four clients with 4 to 10 examples, of three classes that not all have. The
model is a layer of two tanh units, the base, and a linear one with a softmax,
the head. Batches are the examples in their order, so an epoch's last one may be
smaller. Two clients take part in each of five rounds, and all of them twice or
more.
"""

from collections.abc import Iterator, Mapping
import dataclasses
from typing import TypeAlias

import numpy as np

# Names to arrays: weights of one model, or the results of a run, where names
# begin with whose they are: 'server/base/kernel', 'ann/head/bias'.
Arrays: TypeAlias = dict[str, np.ndarray]

SIZES = {'ann': 7, 'bob': 4, 'cid': 10, 'dan': 5}
NAMES = tuple(SIZES)
ROUNDS = (
  ('ann', 'bob'),
  ('cid', 'dan'),
  ('bob', 'cid'),
  ('ann', 'dan'),
  ('bob', 'dan'),
)
NUM_INPUTS, NUM_FEATURES, NUM_CLASSES = 3, 2, 3
BASE = ('base/kernel', 'base/bias')
HEAD = ('head/kernel', 'head/bias')
SERVER = 'server'


@dataclasses.dataclass(frozen=True)
class Settings:
  """What methods are run with, the same for both sides.

  Attributes:
    batch_size: Examples a step.
    epochs: Passes over a client's examples a round.
    rate: The learning rate of clients.
    personal_epochs: Passes that train only what is personal (FedRep, Ditto).
    personal_rate: The rate of pFedMe's theta.
    repeats: Steps of pFedMe on each batch.
    penalty: How much FedProx, Ditto, pFedMe or FedProto hold weights near.
    server_rate: The server's rate (SCAFFOLD, FedAtt), or the share by which it
      moves (pFedMe).
    mixture: alpha of APFL, with which it begins.
  """

  batch_size: int = 3
  epochs: int = 2
  rate: float = 0.1
  personal_epochs: int = 3
  personal_rate: float = 0.07
  repeats: int = 3
  penalty: float = 0.6
  server_rate: float = 0.8
  mixture: float = 0.4


def clients() -> dict[str, Arrays]:
  """Returns x, `[examples, 3]`, and y, `[examples]`, by client."""
  random = np.random.default_rng(37)
  found = {}
  for name, size in SIZES.items():
    x = random.normal(size=[size, NUM_INPUTS]).astype(np.float32)
    # Two clients lack a class.
    y = random.integers(0, NUM_CLASSES - size % 2, size).astype(np.int32)
    found[name] = {'x': x, 'y': y}
  return found


def first_weights() -> Arrays:
  """Returns the weights with which every model begins."""
  random = np.random.default_rng(38)
  shapes = {
    'base/kernel': [NUM_INPUTS, NUM_FEATURES],
    'base/bias': [NUM_FEATURES],
    'head/kernel': [NUM_FEATURES, NUM_CLASSES],
    'head/bias': [NUM_CLASSES],
  }
  return {
    name: random.normal(scale=0.5, size=shape).astype(np.float32)
    for name, shape in shapes.items()
  }


def batches(
  examples: Mapping[str, np.ndarray], size: int, drop_remainder: bool = False
) -> Iterator[Arrays]:
  """Yields the batches of one epoch, in the examples' order."""
  count = len(examples['y'])
  for start in range(0, count, size):
    if not (drop_remainder and start + size > count):
      yield {name: v[start : start + size] for name, v in examples.items()}


def named(owner: str, arrays: Mapping[str, np.ndarray]) -> Arrays:
  """Returns arrays under names that begin with whose they are."""
  return {f'{owner}/{name}': np.asarray(v) for name, v in arrays.items()}


def difference(
  one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]
) -> float:
  """Returns by how much any number of two results differs at most.

  Raises:
    ValueError: If they are not of the same things.
  """
  if set(one) != set(other):
    raise ValueError(f'Of one of the two alone: {set(one) ^ set(other)}')
  return max(float(np.max(np.abs(one[name] - other[name]))) for name in one)
