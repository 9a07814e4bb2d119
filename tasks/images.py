"""Labelled images of clients, and the first and last layers of their models.

Images stay integers, a quarter of the size of floats: the model scales them.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tasks import task
import tff_partial
from tff_partial.data import examples
from tff_partial.data import partitions
from tff_partial.data import populations
from tff_partial.model import keras_models
from tff_partial.model import models

# The last layer of a model; the layers before it represent the image.
HEAD = 'head'


@dataclasses.dataclass(frozen=True, eq=False)
class Images:
  """Images of single characters.

  Attributes:
    name: The name of the data set.
    pixels: uint8 `[images, height, width]`; 0 is paper.
    labels: int32 `[images]`: the character, from 0 to `num_classes` - 1.
    num_classes: The number of characters.
    ink: The value of full ink.
    writers: `[images]`: the writer, or None if unknown.
    is_test: bool `[images]`: True for the publisher's test images, or None if
      the publisher defines no test set.
  """

  name: str
  pixels: np.ndarray
  labels: np.ndarray
  num_classes: int
  ink: int
  writers: np.ndarray | None = None
  is_test: np.ndarray | None = None

  @property
  def shape(self) -> tuple[int, int]:
    height, width = self.pixels.shape[1:]
    return height, width

  def __len__(self) -> int:
    return len(self.labels)


def pack(
  pixels: np.ndarray,
  holdings: Sequence[partitions.Partition],
  label: Callable[[str, np.ndarray], np.ndarray],
  example_spec: examples.ExampleSpec,
) -> populations.Population:
  """Pack clients from their images.

  Of two holdings of a client, the second are marked `is_query` for the split
  that evaluates on them.
  """
  clients, query = (
    {
      client: {'x': pixels[images], 'y': label(client, images)}
      for client, images in held.items()
    }
    for held in (holdings[0], holdings[-1])
  )
  return tff_partial.pack(
    clients,
    example_spec,
    query=query if len(holdings) > 1 else None,
    min_examples=1,
  )


def scaled_input(shape: tuple[int, int], ink: int) -> tuple[Any, Any]:
  """Return a model's input, and the same scaled to [0, 1] with a channel."""
  layers = tf.keras.layers
  images = tf.keras.Input(shape, dtype=tf.uint8, name='image')
  values = layers.Rescaling(1.0 / ink, name='scaled')(images)
  return images, layers.Reshape([*shape, 1], name='with_channel')(values)


def build_partial(
  build: Callable[[], tf.keras.Model],
  user: str,
  local: str,
  num_groups: int,
  **options: Any,
) -> models.PartialModel:
  """Build a partial model in one of four user forms.

  For OWN, what matches `local` is local; for GROUP_HEADS there are `num_groups`
  copies of it, and for GROUPS of all.
  """
  forms: dict[str, dict[str, Any]] = {
    task.OWN: {'local': local},
    task.NOBODY: {},
    task.GROUPS: {'group': '.*', 'num_groups': num_groups},
    task.GROUP_HEADS: {'group': local, 'num_groups': num_groups},
  }
  return keras_models.from_keras(build, **forms[user], **options)
