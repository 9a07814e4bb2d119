"""Who holds which images: by labels, by writer, and into parts.

Everything here is about numbers of images; the images themselves stay where
they are. A client's images follow from the seed and its id alone, or from the
seed and all labels where clients share out what there is.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tasks.errors import DataError
from tasks.errors import OptionError
import tff_partial
from tff_partial import examples
from tff_partial import populations
from tff_partial import random_bits

# Client to the numbers of its images.
Holdings = dict[str, np.ndarray]

_LEAST = 10


def generator(seed: int, *words: int | str) -> np.random.Generator:
  """A generator of its own for each purpose."""
  return np.random.default_rng(random_bits.derive(seed, *words).view('u4'))


def by_labels(
  labels: np.ndarray,
  num_users: int = 20,
  labels_per_user: int = 2,
  size_deviation: float = 0.5,
  seed: int = 0,
) -> Holdings:
  """Gives each user images of a few labels only, and users different sizes.

  As in the experiments of pFedMe (Dinh et al., NeurIPS 2020), user i holds the
  labels i, i + 1, ... of the ten, around the clock, and its sizes are drawn
  from a lognormal distribution. The images of a label are shared out without
  rest among those who hold it: ten to each, and all others in proportion to
  their draws. pFedMe draws with a deviation of 2 of the logarithm and then adds
  a constant; 0.5 without a constant comes to a like spread, largest to smallest
  about three to one.

  Args:
    labels: `[images]`.
    num_users: How many users there are.
    labels_per_user: How many labels each holds.
    size_deviation: Of the logarithm of the shares; 0 gives equal ones.
    seed: Draws shares and images.

  Returns:
    User to its images, shuffled.

  Raises:
    OptionError: If a number makes no sense, or there are too many users.
  """
  known = np.unique(labels)
  if num_users < 1 or not 1 <= labels_per_user <= len(known):
    raise OptionError(
      f'{num_users} users with {labels_per_user} labels each are not possible. '
      f'Give at least 1 user, and 1 to {len(known)} labels.'
    )
  if size_deviation < 0:
    raise OptionError(
      f'size_deviation: {size_deviation} is no deviation. Give 0 or more.'
    )
  holders: dict[int, list[int]] = {label: [] for label in range(len(known))}
  for user in range(num_users):
    for offset in range(labels_per_user):
      holders[(user + offset) % len(known)].append(user)
  held: list[list[np.ndarray]] = [[] for _ in range(num_users)]
  for place, users in holders.items():
    images = np.flatnonzero(labels == known[place])
    rest = len(images) - _LEAST * len(users)
    if users and rest < 0:
      raise OptionError(
        f'{len(users)} users would share {len(images)} images of label '
        f'{known[place]}, and {_LEAST} are the least for each. Give fewer '
        'users, or fewer labels to each.'
      )
    draw = generator(seed, 'labels', int(known[place]))
    images = draw.permutation(images)
    shares = np.cumsum(draw.lognormal(0.0, size_deviation, len(users)))
    ends = _LEAST * np.arange(1, len(users) + 1) + np.rint(
      rest * shares / shares[-1:]
    ).astype(int)
    for user, mine in zip(users, np.split(images, ends[:-1]), strict=False):
      held[user].append(mine)
  return {
    f'{user:04d}': generator(seed, 'user', user).permutation(
      np.concatenate(mine)
    )
    for user, mine in enumerate(held)
  }


def by_writer(writers: np.ndarray, seed: int = 0) -> Holdings:
  """Gives each writer what it wrote, shuffled."""
  order = np.argsort(writers, kind='stable')
  names, starts = np.unique(writers[order], return_index=True)
  return {
    str(name): generator(seed, 'writer', str(name)).permutation(mine)
    for name, mine in zip(names, np.split(order, starts[1:]), strict=True)
  }


def limit(holdings: Holdings, most: int | None) -> Holdings:
  """Keeps the first images of each client."""
  return {client: images[:most] for client, images in holdings.items()}


def split_images(
  holdings: Holdings,
  fractions: Sequence[float],
  is_test: np.ndarray | None = None,
) -> list[Holdings]:
  """Divides the images of each client into parts, in their order.

  Of n images a part ends at n times the summed fractions up to it, rounded
  down, but the first part has at least one.

  Args:
    holdings: What to divide.
    fractions: A share for each part; together 1.
    is_test: bool `[images]`: if given, these are the last part, and the others
      divide the rest by their shares.

  Returns:
    For each part the images of every client.
  """
  shares = np.asarray(fractions, float)
  if is_test is not None:
    shares = shares[:-1] / shares[:-1].sum()
  ends = np.cumsum(shares)[:-1]
  parts: list[Holdings] = [{} for _ in fractions]
  for client, images in holdings.items():
    kept = images if is_test is None else images[~is_test[images]]
    # The small number keeps a product such as 0.7 * 10 from falling below 7.
    until = np.maximum(np.floor(len(kept) * ends + 1e-9), 1).astype(int)
    pieces = np.split(kept, until)
    if is_test is not None:
      pieces.append(images[is_test[images]])
    for part, piece in zip(parts, pieces, strict=True):
      part[client] = piece
  return parts


def split_users(
  holdings: Holdings, fractions: Sequence[float], seed: int = 0
) -> list[Holdings]:
  """Divides clients at random: each part has all images of its clients.

  Args:
    holdings: What to divide.
    fractions: A share of the clients for each part; together 1.
    seed: Chooses the division.

  Raises:
    DataError: If a part would have no client.
  """
  clients = generator(seed, 'split').permutation(sorted(holdings))
  ends = np.rint(np.cumsum(fractions)[:-1] * len(clients)).astype(int)
  parts = [
    {str(client): holdings[str(client)] for client in sorted(piece)}
    for piece in np.split(clients, ends)
  ]
  if not all(parts):
    raise DataError(
      f'{len(clients)} clients cannot be divided into the shares '
      f'{tuple(fractions)}: one part would have none. Use more clients, or '
      'measure those who took part.'
    )
  return parts


def pack(
  pixels: np.ndarray,
  holdings: Sequence[Holdings],
  label: Callable[[str, np.ndarray], np.ndarray],
  example_spec: examples.ExampleSpec,
) -> populations.Population:
  """Makes clients of their images.

  Args:
    pixels: `[images, height, width]`.
    holdings: The images of each client; if there are two, the second are
      marked `is_query` for the split that measures them.
    label: From a client and the numbers of images to labels.
    example_spec: What one example consists of.
  """
  clients: dict[str, Mapping[str, np.ndarray]] = {}
  for client in holdings[0]:
    pieces = [held[client] for held in holdings]
    images = np.concatenate(pieces)
    clients[client] = {
      'x': pixels[images],
      'y': label(client, images),
      'is_query': np.repeat(np.arange(len(pieces)), [len(p) for p in pieces]),
    }
  return tff_partial.pack(clients, example_spec, min_examples=1)
