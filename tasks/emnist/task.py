"""The EMNIST task: classification of characters by personalised models.

Users differ in one of two ways. `labels`: users hold a few labels each (MNIST
over 20 users of two labels, as in the experiments of pFedMe). `writers`: users
are the writers (MNIST with the writers of QMNIST, or TFF's federated EMNIST).
Users are measured on images that they did not train with, or, under the
protocol `unseen`, are writers who did not take part at all.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import numpy as np

from tasks import images as images_lib
from tasks import shared_options as shared
from tasks.emnist import images as emnist_images
from tasks.emnist import models as emnist_models
from tasks.errors import OptionError
from tasks.options import detail
from tasks.options import option
from tasks.task import Data
from tasks.task import FEATURES
from tasks.task import MeasuredByProtocol
from tasks.task import SEEN
from tasks.task import TaskOptions
from tasks.task import TEST
from tasks.task import TRAIN
from tasks.task import VALIDATION
from tff_partial.data import examples
from tff_partial.data import partitions
from tff_partial.data import populations
from tff_partial.model import models

NAME = 'emnist'
LABELS, WRITERS = 'labels', 'writers'
PARTITIONS = (LABELS, WRITERS)
MNIST, FEDERATED = 'mnist', 'federated_emnist'
EDITIONS = (MNIST, FEDERATED)

# pFedMe keeps a quarter of a user's images for tests. It has no validation
# images, so these come out of the other three quarters.
_OF_IMAGES = {TRAIN: 0.65, VALIDATION: 0.1, TEST: 0.25}
_OF_USERS = {TRAIN: 0.8, VALIDATION: 0.1, TEST: 0.1}
# Minimum number of images of each of a user's labels.
_LEAST = 10
# The user's part by default: the last layer. Logistic regression has no other
# layer, so there it is the biases, which learn how frequent each label is.
_OWN = {
  emnist_models.LINEAR: f'{images_lib.HEAD}/bias',
  emnist_models.DENSE: images_lib.HEAD,
  emnist_models.CNN: images_lib.HEAD,
}


@dataclasses.dataclass(frozen=True)
class EmnistOptions(TaskOptions):
  """Options of the task."""

  name: ClassVar[str] = NAME
  title: ClassVar[str] = 'Task emnist'

  edition: str = shared.data_set(MNIST, choices=EDITIONS)
  partition: str = option(
    LABELS,
    'Whether users hold a few labels each, or what they wrote.',
    choices=PARTITIONS,
  )
  protocol: str = shared.protocol(SEEN)
  num_users: int = shared.users(20)
  labels_per_user: int = detail(
    2, 'Labels of a user of the partition labels.', at_least=1
  )
  size_deviation: float = detail(
    0.5,
    'How much the sizes of users of the partition labels differ: the deviation '
    'of their logarithm.',
    at_least=0,
  )
  max_examples: int | None = shared.max_examples(None)
  model: str = shared.model(emnist_models.LINEAR, choices=emnist_models.MODELS)
  hidden: int = detail(
    100, 'Units of the hidden layer of the dense model.', at_least=1
  )
  local: str = detail(
    '',
    "What is the user's where a part of the model is, as a regular expression "
    'over names of layers and variables; by default the last layer, and its '
    'biases in logistic regression.',
  )

  def flag_prefix(self) -> str:
    """Return the prefix of the flags."""
    return 'emnist_'

  def __post_init__(self) -> None:
    """Check that images can be divided."""
    super().__post_init__()
    if self.max_examples is not None and self.max_examples < 3:
      raise OptionError(
        f'max_examples: {self.max_examples} images a user cannot be divided '
        'into three parts. Give at least 3.'
      )

  def load(self, data: Data, seed: int) -> 'Emnist':
    """Load the images and make the task.

    Images are in the folder `emnist` below `data_dir`. Synthetic are the small
    digits of scikit-learn, which need no files.
    """
    if data.is_synthetic:
      return Emnist(emnist_images.load_digits(), self, seed)
    if self.edition == FEDERATED:
      if not data.download:
        raise OptionError(
          'Federated EMNIST comes through the loader of TFF, which fetches it '
          'unless it was kept in --data_dir: allow that with --download.'
        )
      return Emnist(
        emnist_images.load_federated_emnist(data.data_dir), self, seed
      )
    # The test images are by other writers, with few images each.
    by_writer = self.partition == WRITERS
    images = emnist_images.load_mnist(
      data.data_dir, test=not by_writer, writers=by_writer
    )
    return Emnist(images, self, seed)


class Emnist(MeasuredByProtocol):
  """Users as clients, their images as examples.

  Attributes:
    images: All images.
    protocol: SEEN or UNSEEN: the name under which the test result is reported.
    selection_metric: The metric that chooses the best round.
    higher_is_better: True if a larger value of it is better.
  """

  name = NAME
  selection_metric = 'accuracy'
  learned_from_training: tuple[str, ...] = ()
  higher_is_better = True
  attribute = 'most frequent label'

  def __init__(
    self, images: images_lib.Images, options: EmnistOptions, seed: int
  ):
    """Divide the images by the seed."""
    self.images = images
    self.protocol = options.protocol
    self._holdings = partitions.limit(
      _hold(images, options, seed), options.max_examples
    )
    if options.protocol == SEEN:
      parts = partitions.split_examples(
        self._holdings, tuple(_OF_IMAGES.values()), images.is_test
      )
    else:
      parts = partitions.split_clients(
        self._holdings, tuple(_OF_USERS.values()), seed=seed
      )
    self._parts = dict(zip(_OF_IMAGES, parts, strict=True))
    self._options = options
    self._seed = seed

  def model_with(self, user: str) -> models.PartialModel:
    """Build the model, with or without a local part."""
    options, images = self._options, self.images
    build = functools.partial(
      emnist_models.build_classifier,
      options.model,
      images.shape,
      images.num_classes,
      images.ink,
      options.hidden,
    )
    if user == FEATURES:
      return emnist_models.build_with_prototypes(build, seed=self._seed)
    return images_lib.build_partial(
      build,
      user,
      options.local or _OWN[options.model],
      loss=emnist_models.classification_loss(),
      metrics=emnist_models.build_classification_metrics,
      seed=self._seed,
    )

  @property
  def counts(self) -> dict[str, Any]:
    """Sizes of the data, for the result."""
    sizes = [len(images) for images in self._holdings.values()]
    return {
      'name': self.images.name,
      'images': sum(sizes),
      'users': len(sizes),
      'images_of_a_user': [min(sizes), max(sizes)],
      **{
        part: {
          'users': len(held),
          'images': sum(len(images) for images in held.values()),
        }
        for part, held in self._parts.items()
      },
    }

  @property
  def attributes(self) -> dict[str, str]:
    """Most frequent label of each user."""
    return {
      user: str(np.bincount(self.images.labels[images]).argmax())
      for user, images in self._holdings.items()
    }

  def clients(
    self, part: str, example_spec: examples.ExampleSpec
  ) -> populations.Population:
    """Pack the users of one part: TRAIN, VALIDATION or TEST.

    Under the protocol SEEN the images to be measured follow those of the
    training part and are marked, for clients that personalise.
    """
    held = [self._parts[part]]
    if self.protocol == SEEN and part != TRAIN:
      held.insert(0, self._parts[TRAIN])
    return images_lib.pack(
      self.images.pixels,
      held,
      lambda user, images: self.images.labels[images],
      example_spec,
    )


def _hold(
  images: images_lib.Images, options: EmnistOptions, seed: int
) -> partitions.Partition:
  """Assign the images to users."""
  if options.partition == LABELS:
    return partitions.by_label(
      images.labels,
      options.num_users,
      options.labels_per_user,
      size_deviation=options.size_deviation,
      min_examples=_LEAST,
      seed=seed,
    )
  if images.writers is None:
    raise OptionError(
      f'partition: it is unknown who wrote the images of {images.name!r}. Use '
      'the partition labels, or --data=real.'
    )
  return partitions.by_owner(images.writers, seed=seed)
