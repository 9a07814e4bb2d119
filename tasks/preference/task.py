"""Shared parts of the tasks whose users like one kind of examples.

As in section 4 of FedEmbed: each user has 20 images for training and 10 for
tests, half of them liked. The kind that a user likes is its true
sub-population, which a method is given (FedEmbed-Type) or must find. Ten
further images of a user choose the best round; the paper has none. Data other
than images, such as sound, are converted to images.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tasks import images as images_lib
from tasks import task
from tasks.errors import OptionError
from tasks.preference import f1
from tasks.preference import losses
from tasks.preference import models as preference_models
from tasks.preference import preferences
from tasks.preference.options import PreferenceOptions
from tff_partial.data import examples
from tff_partial.data import populations
from tff_partial.model import models

# Examples of a user in each part; half of them are liked.
SIZES = {task.TRAIN: 20, task.VALIDATION: 10, task.TEST: 10}


class PreferenceTask(task.MeasuredByProtocol):
  """Users as clients; each likes one kind of images.

  Attributes:
    images: All images; their labels are the kinds.
    shares: The share of the users that like each kind.
    num_groups: Number of heads, at least one for each kind.
    fed_embed_parts: Parts of FedEmbed's model with all heads.
  """

  name: str
  selection_metric = 'f1'
  higher_is_better = True
  learned_from_training: tuple[str, ...] = ()
  protocol = task.SEEN
  attribute = 'what the user likes'
  own_weights = preference_models.PERSONAL
  forms = (
    task.OWN,
    task.NOBODY,
    task.GROUPS,
    task.GROUP_HEADS,
    task.HEADS,
    task.OWN_HEAD,
    task.CLUSTERS,
    task.HEAD_CLUSTERS,
  )

  def __init__(
    self,
    images: images_lib.Images,
    shares: Sequence[float],
    num_users: int,
    options: PreferenceOptions,
    seed: int,
    *,
    part_of: np.ndarray | None = None,
    build_encoder: Callable[..., tf.keras.Model],
  ):
    """Draw the users' images.

    Args:
      images: All images.
      shares: The share of the users that like each kind.
      num_users: Number of users, unless the options set it.
      options: The task's options.
      seed: The run's seed, which draws the images and initializes the weights.
      part_of: `[images]`: the part of the data that each image is for. By
        default any may be in any part.
      build_encoder: Builds the encoder of images from their shape, channels and
        an activation, like `preference_models.build_encoder`.

    Raises:
      OptionError: If there are too few images or users.
    """
    self.images = images
    self.shares = tuple(shares)
    self._num_kinds = len(self.shares)
    self.num_groups = options.num_groups or self._num_kinds
    num_users = options.num_users or num_users
    users_of = preferences.numbers_of_users(num_users, self.shares)
    if 0 in users_of:
      enough = preferences.enough_users(num_users, self.shares)
      raise OptionError(
        f'--users={num_users}: so few users cannot like all {self._num_kinds} '
        f'kinds: no user would like kind {users_of.index(0)}. Give {enough} '
        'users, which are enough for these shares.'
      )
    self._prototypical_users = [
      max(round(options.prototypical_share * number), 1) for number in users_of
    ]
    self._parts = preferences.draw(
      images.labels, users_of, SIZES, part_of=part_of, seed=seed
    )
    self._options = options
    parts = (
      preference_models.PARTS
      if options.type_head
      else preference_models.PARTS_WITHOUT_TYPES
    )
    if self.num_groups < self._num_kinds:
      # Sub-populations share heads, so that none is the head of a known one.
      parts = dataclasses.replace(parts, sub_population=None, liked_type=None)
    self.fed_embed_parts = parts
    self._seed = seed
    self._build_encoder = build_encoder

  def _build_model(self, user: str) -> models.PartialModel:
    """Build FedEmbed's model, with a single head or with all heads."""
    options = self._options
    has_types = user in (task.HEADS, task.OWN_HEAD)
    has_centers = user in (task.CLUSTERS, task.HEAD_CLUSTERS)
    unread = {
      'embedding_size': has_centers,
      'embedding_spread': not has_types,
      'num_groups': user in (task.OWN, task.NOBODY),
      'type_head': not has_types,
    }
    options.refuse_set(
      [field for field, is_unread in unread.items() if is_unread],
      "the algorithm's model does not have it. Leave it out.",
    )
    shape, ink = self.images.shape, self.images.ink
    encoder = functools.partial(
      self._build_encoder, activation=options.activation or None
    )
    metrics = functools.partial(build_metrics, self.shares)
    if has_types or has_centers:
      build = (
        functools.partial(
          preference_models.build_clustered,
          shape,
          ink,
          self.num_groups,
          encoder,
          by_head=user == task.HEAD_CLUSTERS,
        )
        if has_centers
        else functools.partial(
          preference_models.build_fed_embed,
          shape,
          ink,
          # The longest that fits onto the diagonal.
          options.embedding_size or min(shape),
          self.num_groups,
          encoder,
          options.embedding_spread,
          self._num_kinds,
        )
      )
      return preference_models.build_partial(
        build,
        user,
        self.num_groups,
        type_head=options.type_head,
        metrics=metrics,
        seed=self._seed,
      )
    own = (
      preference_models.PERSONAL if options.embedding_size else images_lib.HEAD
    )
    return images_lib.build_partial(
      functools.partial(
        preference_models.build_preference,
        shape,
        ink,
        options.embedding_size,
        encoder,
      ),
      user,
      own,
      self.num_groups,
      loss=losses.preference_loss,
      metrics=metrics,
      labels=preference_models.LABEL_SPEC,
      seed=self._seed,
    )

  @property
  def counts(self) -> dict[str, Any]:
    held = {
      part: np.concatenate(list(clients.values()))
      for part, clients in self._parts.items()
    }
    is_trained = np.isin(held[task.TEST], held[task.TRAIN])
    users = np.bincount(
      [preferences.kind_liked_by(user) for user in self._parts[task.TRAIN]]
    )
    return {
      'name': self.images.name,
      'images': len(self.images),
      'users': len(self._parts[task.TRAIN]),
      'users_of_sub_populations': users.tolist(),
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
    return {
      user: str(preferences.kind_liked_by(user))
      for user in self._parts[task.TRAIN]
    }

  def clients(
    self, part: str, example_spec: examples.ExampleSpec
  ) -> populations.Population:
    """Pack the users of one part: TRAIN, VALIDATION or TEST.

    The images to be measured follow those of the training part and are marked,
    for clients that personalise.
    """
    wanted = self._parts[part]
    held = [wanted]
    if part != task.TRAIN:
      train = self._parts[task.TRAIN]
      held = [{user: train[user] for user in wanted}, wanted]
    return images_lib.pack(self.images.pixels, held, self._labels, example_spec)

  def _labels(self, user: str, images: np.ndarray) -> np.ndarray:
    """Return a user's labels of images, int32 `[images, 4]`."""
    kinds = self.images.labels[images]
    liked = preferences.kind_liked_by(user)
    number = self._prototypical_users[liked]
    is_prototypical = preferences.number_of(user) < number
    return np.stack(
      [
        kinds == liked,
        kinds,
        np.full_like(kinds, liked),
        np.full_like(kinds, is_prototypical),
      ],
      axis=-1,
    ).astype(np.int32)


def build_metrics(shares: Sequence[float]) -> list[tf.keras.metrics.Metric]:
  """Build `accuracy`, and `f1` overall and by sub-population."""
  return [losses.PreferenceAccuracy('accuracy'), *f1.build_metrics(shares)]
