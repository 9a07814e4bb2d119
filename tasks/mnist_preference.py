"""The MNIST preference task of FedEmbed, section 4.2.

A user likes one digit and dislikes all others. Each has 20 images to train with
and 10 to be tested on, half of them liked, so that the same image is liked by
some users and disliked by others. The digit that a user likes is its true
sub-population, which a method may be told (FedEmbed-Type) or must find out.

900 users of a digit with 15 liked images each need 13,500, and MNIST has some
6,000 of a digit, so images repeat from user to user, also between what one
trains with and another is tested on; within a user they never do. Without
`repeat_images` every image is used at most once in all, which suits fewer
users: then no test image was trained on by anybody. Ten further images of a
user choose the best round; the paper has none.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tasks import emnist_images
from tasks import emnist_models
from tasks import emnist_partitions
from tasks import f1
from tasks import preference_models
from tasks import preferences
from tasks.errors import OptionError
from tasks.task import MeasuredByProtocol
from tasks.task import SEEN
from tasks.task import TEST
from tasks.task import TRAIN
from tasks.task import VALIDATION
from tff_partial import examples
from tff_partial import models
from tff_partial import populations

NAME = 'mnist_preference'
NUM_GROUPS = 10

BALANCED, IMBALANCED = 'balanced', 'imbalanced'
# The share of the users that like each digit.
SHARES = {
  BALANCED: (0.1,) * NUM_GROUPS,
  IMBALANCED: (0.25, 0.15, *(0.1,) * 4, *(0.05,) * 4),
}

# Images of a user in each part; half of them are liked.
_SIZES = {TRAIN: 20, VALIDATION: 10, TEST: 10}
# The paper's 900 a digit, and as many as suit 1,797 small images.
_PAPER_USERS, _FEW_USERS = 9_000, 300


@dataclasses.dataclass(frozen=True)
class Options:
  """What can be chosen about the task; the defaults are the paper's.

  Attributes:
    shares: BALANCED or IMBALANCED: how common each preference is.
    num_users: All users; by default 9,000, and 300 of the small digits.
    repeat_images: Whether an image may be several users'.
    validation_users: Users whose validation images choose the best round.
    embedding_size: Length of the personal embedding of the model; 0 for none,
      as the baseline Global has it. The paper's is 28.
    local: What is the user's where a part of the model is, as a regular
      expression over names of layers and variables; '' for the personal
      embedding, or for `head`, the last layer, where there is none.
    activation: Between the layers of the encoder, such as 'relu'; '' for none,
      as the paper prints it.
  """

  shares: str = BALANCED
  num_users: int | None = None
  repeat_images: bool = True
  validation_users: int = 1_000
  embedding_size: int = 0
  local: str = ''
  activation: str = ''

  def __post_init__(self) -> None:
    """Checks the numbers."""
    if self.shares not in SHARES:
      raise OptionError(
        f'shares: {self.shares!r} is none of {", ".join(SHARES)}.'
      )
    if self.num_users is not None and self.num_users < NUM_GROUPS:
      raise OptionError(
        f'num_users: {self.num_users} users cannot like all {NUM_GROUPS} '
        f'digits. Give at least {NUM_GROUPS}.'
      )
    if self.validation_users < 1 or self.embedding_size < 0:
      raise OptionError(
        f'validation_users: {self.validation_users}, embedding_size: '
        f'{self.embedding_size}: give at least 1 and 0.'
      )


class MnistPreference(MeasuredByProtocol):
  """Users as clients, who like one digit each.

  Attributes:
    images: All images.
    shares: The share of the users that like each digit.
    num_groups: How many sub-populations there are.
    selection_metric: The metric that chooses the best round.
    higher_is_better: Whether a larger value of it is better.
  """

  name = NAME
  selection_metric = 'f1'
  higher_is_better = True
  num_groups = NUM_GROUPS
  protocol = SEEN

  def __init__(self, images: emnist_images.Images, options: Options, seed: int):
    """Draws the users' images.

    Args:
      images: All images.
      options: What can be chosen.
      seed: The run's seed: images are drawn by it, and the weights start from
        it.

    Raises:
      OptionError: If there are too few images.
    """
    self.images = images
    is_mnist = len(images) >= _PAPER_USERS
    num_users = options.num_users or (_PAPER_USERS if is_mnist else _FEW_USERS)
    self.shares = SHARES[options.shares]
    self._parts = preferences.draw(
      images.labels,
      preferences.numbers_of_users(num_users, self.shares),
      _SIZES,
      repeat=options.repeat_images,
      seed=seed,
    )
    chosen = emnist_partitions.generator(seed, 'validation').permutation(
      sorted(self._parts[VALIDATION])
    )[: options.validation_users]
    self._parts[VALIDATION] = {
      user: self._parts[VALIDATION][user] for user in sorted(chosen.tolist())
    }
    self._options = options
    self._seed = seed

  def model_with(self, user: str) -> models.PartialModel:
    """Builds FedEmbed's model with a single head.

    Other methods make theirs from the same parts of `preference_models`.

    Args:
      user: OWN for personal embeddings or heads, see `Options`; or NOBODY.

    Raises:
      OptionError: If it is another form.
    """
    options = self._options
    own = (
      preference_models.PERSONAL
      if options.embedding_size
      else emnist_models.HEAD
    )
    return emnist_models.build_partial(
      functools.partial(
        preference_models.build_preference,
        self.images.shape,
        self.images.ink,
        options.embedding_size,
        options.activation or None,
      ),
      user,
      options.local or own,
      loss=preference_models.preference_loss,
      metrics=build_metrics,
      labels=preference_models.LABEL_SPEC,
      seed=self._seed,
    )

  @property
  def counts(self) -> dict[str, Any]:
    """How much of everything there is, for the result."""
    held = {
      part: np.concatenate(list(clients.values()))
      for part, clients in self._parts.items()
    }
    is_trained = np.isin(held[TEST], held[TRAIN])
    users = np.bincount(
      [preferences.kind_liked_by(user) for user in self._parts[TRAIN]]
    )
    return {
      'name': self.images.name,
      'images': len(self.images),
      'users': len(self._parts[TRAIN]),
      'users_of_a_digit': users.tolist(),
      'test_images_trained_on_by_somebody': float(is_trained.mean()),
      **{
        part: {
          'users': len(clients),
          'images': len(held[part]),
          'distinct_images': len(np.unique(held[part])),
        }
        for part, clients in self._parts.items()
      },
    }

  @property
  def attributes(self) -> dict[str, str]:
    """Each user's true sub-population: the digit that it likes."""
    return {
      user: str(preferences.kind_liked_by(user)) for user in self._parts[TRAIN]
    }

  def clients(
    self, part: str, example_spec: examples.ExampleSpec
  ) -> populations.Population:
    """Packs the users of one part: TRAIN, VALIDATION or TEST.

    The images to be measured come after those of the training part and are
    marked, so that whoever personalises has these.
    """
    wanted = self._parts[part]
    held = [wanted]
    if part != TRAIN:
      train = self._parts[TRAIN]
      held = [{user: train[user] for user in wanted}, wanted]
    return emnist_partitions.pack(
      self.images.pixels, held, self._labels, example_spec
    )

  def _labels(self, user: str, images: np.ndarray) -> np.ndarray:
    """What a user thinks of images: int32 `[images, 3]`."""
    digits = self.images.labels[images]
    liked = preferences.kind_liked_by(user)
    return np.stack(
      [digits == liked, digits, np.full_like(digits, liked)], axis=-1
    ).astype(np.int32)


def build_metrics() -> list[tf.keras.metrics.Metric]:
  """Builds `accuracy`, and `f1` as a whole and of each sub-population."""
  return [
    preference_models.PreferenceAccuracy('accuracy'),
    *f1.build_metrics(NUM_GROUPS),
  ]


def load(
  *, data: str, data_dir: str | None, seed: int, options: Options
) -> MnistPreference:
  """Loads the images and makes the task.

  Args:
    data: 'real' for the 60,000 training images of MNIST, or 'synthetic' for
      the small digits of scikit-learn, which need no files.
    data_dir: The folder that holds `emnist`, or is it.
    seed: The run's seed.
    options: What can be chosen about the task.

  Raises:
    DataError: If the data are missing or damaged; says where and what to do.
    OptionError: If there are too few images for the users.
  """
  if data == 'synthetic':
    images = emnist_images.load_digits()
  else:
    images = emnist_images.load_mnist(data_dir)
  return MnistPreference(images, options, seed)
