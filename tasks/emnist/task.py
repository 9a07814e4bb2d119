"""The EMNIST task: classification of characters by personalised models.

Users differ in one of three ways. `labels`: users hold two labels each (MNIST
over 20 users of two labels, as in the experiments of pFedMe). `dirichlet`: each
label is divided by shares from a Dirichlet distribution, as in PFLlib.
`writers`: users are the writers (MNIST with the writers of QMNIST, TFF's
federated EMNIST, or FEMNIST). Users are measured on images that they did not
train with, or, under the protocol `unseen`, are writers who did not take part
at all.
"""

import functools
from typing import Any

import numpy as np

from tasks import images as images_lib
from tasks import task
from tasks.emnist import images as emnist_images
from tasks.emnist import models as emnist_models
from tasks.emnist.options import DIRICHLET
from tasks.emnist.options import EmnistOptions
from tasks.emnist.options import FEDERATED
from tasks.emnist.options import FEMNIST
from tasks.emnist.options import LABELS
from tasks.emnist.options import MNIST
from tasks.emnist.options import NAME
from tasks.emnist.options import WRITERS
from tasks.errors import OptionError
from tff_partial.data import examples
from tff_partial.data import partitions
from tff_partial.data import populations
from tff_partial.model import models

# pFedMe keeps a quarter of a user's images for tests. It has no validation
# images, so these come out of the other three quarters.
_OF_IMAGES = {task.TRAIN: 0.65, task.VALIDATION: 0.1, task.TEST: 0.25}
_OF_USERS = {task.TRAIN: 0.8, task.VALIDATION: 0.1, task.TEST: 0.1}
# Minimum number of images of a user, and of each label that it holds.
_LEAST = 10


class Emnist(task.MeasuredByProtocol):
  """Users as clients, their images as examples.

  Attributes:
    images: All images.
  """

  name = NAME
  selection_metric = 'accuracy'
  learned_from_training: tuple[str, ...] = ()
  higher_is_better = True
  attribute = 'most frequent label'
  forms = (
    task.OWN,
    task.NOBODY,
    task.GROUPS,
    task.GROUP_HEADS,
    task.FEATURES,
    task.SHIFTED,
  )

  def __init__(
    self, images: images_lib.Images, options: EmnistOptions, seed: int
  ):
    self.images = images
    self.protocol = options.protocol
    self._holdings = partitions.limit(
      _hold(images, options, seed), options.max_examples
    )
    if options.protocol == task.SEEN:
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

  def _build_model(self, user: str) -> models.PartialModel:
    options, images = self._options, self.images
    if user not in (task.GROUPS, task.GROUP_HEADS):
      options.refuse_set(
        ('num_groups',),
        'only ifca, ifca_head, fed_em and fed_em_head have copies. Leave it '
        'out.',
      )
    build = functools.partial(
      emnist_models.build_classifier,
      options.model,
      images.shape,
      images.num_classes,
      images.ink,
    )
    if user in (task.FEATURES, task.SHIFTED):
      return emnist_models.build_with_prototypes(
        build, is_shifted=user == task.SHIFTED, seed=self._seed
      )
    # The user's part is the last layer. Logistic regression has no other, so
    # there it is the biases, which learn how frequent each label is.
    is_linear = options.model == emnist_models.LINEAR
    return images_lib.build_partial(
      build,
      user,
      f'{images_lib.HEAD}/bias' if is_linear else images_lib.HEAD,
      options.num_groups,
      loss=emnist_models.classification_loss(),
      metrics=emnist_models.build_classification_metrics,
      seed=self._seed,
    )

  @property
  def counts(self) -> dict[str, Any]:
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
    if self.protocol == task.SEEN and part != task.TRAIN:
      held.insert(0, self._parts[task.TRAIN])
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
      images.labels, options.num_users, 2, min_examples=_LEAST, seed=seed
    )
  if options.partition == DIRICHLET:
    return partitions.dirichlet(
      images.labels,
      options.num_users,
      options.alpha,
      min_examples=_LEAST,
      seed=seed,
    )
  if images.writers is None:
    raise OptionError(
      f'--emnist_partition={options.partition}: it is unknown who wrote the '
      f'images of {images.name!r}. Give labels or dirichlet, or --data=real '
      'with mnist.'
    )
  return partitions.by_owner(images.writers, seed=seed)


def load(options: EmnistOptions, data: task.Data, seed: int) -> Emnist:
  """Load the images and make the task.

  Images are in the folder `emnist` below `data_dir`. Synthetic are the small
  digits of scikit-learn, which need no files.
  """
  if data.is_synthetic:
    return Emnist(emnist_images.load_digits(), options, seed)
  if options.edition in (FEDERATED, FEMNIST):
    letters = options.edition == FEMNIST
    found = emnist_images.load_leaf(data.data_dir) if letters else None
    if found is None and not data.download:
      raise OptionError(
        f'--data_set={options.edition} comes through the loader of TFF, which '
        'fetches it unless it was kept in --data_dir: allow that with '
        "--download. LEAF's JSON files of femnist are read from the folder "
        f'{emnist_images.LEAF_FOLDER!r} below --data_dir.'
      )
    return Emnist(
      found
      or emnist_images.load_federated_emnist(
        data.data_dir, only_digits=not letters
      ),
      options,
      seed,
    )
  # The test images are by other writers, with few images each.
  by_writer = (options.edition, options.partition) == (MNIST, WRITERS)
  images = emnist_images.load_mnist(
    data.data_dir, options.edition, test=not by_writer, writers=by_writer
  )
  return Emnist(images, options, seed)
