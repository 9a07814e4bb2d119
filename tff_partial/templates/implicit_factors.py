"""A model of implicit feedback: the score of an item is a scalar product.

A user's vector is local, the table of items global. Everything that a user has
not interacted with counts as a weak negative, so the loss is over all items; as
all of these are alike, it needs only the Gram matrix of the item table, which
is a global weight too (Hu et al., "Collaborative filtering for implicit
feedback datasets", ICDM 2008).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tff_partial.arguments import checked_numbers
from tff_partial.contexts import batch_of
from tff_partial.contexts import ClientContext
from tff_partial.errors import SettingError
from tff_partial.model import keras_models
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.solvers.exact import Exact
from tff_partial.solvers.exact import Prior
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import LOCAL

LAYER = 'scores'
USER, ITEM, GRAM = f'{LAYER}/user', f'{LAYER}/item', f'{LAYER}/gram'


class Weighting(NamedTuple):
  """Weights of what is not observed, and of the regularization.

  Attributes:
    unobserved: Weight of an item without interaction, more than 0 and less than
      1, which is that of an interaction.
    ridge: Weight of the squared length of a vector, times the total weight of
      what it is fitted to (Rendle et al., "Revisiting the performance of iALS
      on item recommendation benchmarks", RecSys 2022).
  """

  unobserved: float = 0.2
  ridge: float = 0.007

  def check(self) -> None:
    """Check the weights."""
    if not 0 < self.unobserved < 1 or not self.ridge > 0:
      raise SettingError(
        f'{self}: `unobserved` must be more than 0 and less than 1, and '
        '`ridge` more than 0.'
      )

  def net(
    self, items: tf.Tensor, weights: tf.Tensor, num_items: int
  ) -> tf.Tensor:
    """Return what interactions weigh beyond the same items if unobserved.

    An item that a client has several times has the weight of an unobserved one
    once to lose.

    Args:
      items: Ids, `[interactions]`.
      weights: float32 `[interactions]`, zero for padding.
      num_items: Number of items.
    """
    of_item = tf.math.unsorted_segment_sum(weights, items, num_items)
    shares = tf.math.divide_no_nan(weights, tf.gather(of_item, items))
    return weights - self.unobserved * shares

  def penalty(self, net: Any, of: Any) -> Any:
    """Return the weight of the squared length of a vector.

    Args:
      net: Sum of the net weights of its interactions, see `net`.
      of: Number of items, or of users, that it could have them with.
    """
    return self.ridge * (net + self.unobserved * of)


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class ItemScores(tf.keras.layers.Layer):
  """Scores of items for one user."""

  def __init__(self, num_items: int, num_factors: int, **kwargs: Any):
    """Take the sizes, see `build_model`, and arguments of all layers."""
    super().__init__(**kwargs)
    self.num_items = num_items
    self.num_factors = num_factors

  def build(self, input_shape: tf.TensorShape) -> None:
    """Create the weights."""
    size = self.num_factors
    normal = tf.keras.initializers.RandomNormal(stddev=0.1 / size**0.5)
    self.item = self.add_weight('item', [self.num_items, size], None, normal)
    # That of the first items, about.
    scale = 0.01 * self.num_items / size
    identity = tf.keras.initializers.Identity(scale)
    self.gram = self.add_weight('gram', [size, size], None, identity)
    self.user = self.add_weight('user', [size], None, 'zeros')
    super().build(input_shape)

  def call(self, items: tf.Tensor) -> tf.Tensor:
    """Return each item's score, `[batch]`."""
    return tf.linalg.matvec(tf.gather(self.item, items), self.user)

  def get_config(self) -> dict[str, Any]:
    """Return the layer's configuration."""
    return {
      **super().get_config(),
      'num_items': self.num_items,
      'num_factors': self.num_factors,
    }


def build_model(
  num_items: int,
  num_factors: int,
  *,
  metrics: Callable[[], Sequence[tf.keras.metrics.Metric]] = list,
  seed: int = 0,
) -> models.PartialModel:
  """Build the model that `build_fed_ials` trains.

  Labels are 1 for an interaction; what is not observed needs none. One with
  another label, such as 0 for an item that was shown in vain, is observed too.

  Args:
    num_items: Number of items; inputs are their ids.
    num_factors: Length of the vectors.
    metrics: Makes metrics of labels and scores.
    seed: Draws the first values.

  Raises:
    SettingError: If a size is not possible.
  """
  sizes = {'num_items': num_items, 'num_factors': num_factors}
  checked_numbers.check_whole(SettingError, 1, **sizes)

  def build() -> tf.keras.Model:
    items = tf.keras.Input([], dtype=tf.int32, name='item_id')
    scores = ItemScores(num_items, num_factors, name=LAYER)(items)
    return tf.keras.Model(items, scores, name='implicit_factors')

  return keras_models.from_keras(
    build,
    local=[USER],
    loss=lambda labels, scores: tf.square(labels - scores),
    labels=tf.TensorSpec([]),
    metrics=metrics,
    seed=seed,
  )


def check_model(builder: str, model: models.PartialModel) -> None:
  """Refuse a model that `build_model` did not make.

  Raises:
    SettingError: It names the `builder` that got the model.
  """
  models.check(model)
  if GRAM not in model.specs(GLOBAL):
    raise SettingError(
      f'{builder}: the model has no Gram matrix. Make it with '
      '`tff_partial.templates.implicit_factors.build_model`.'
    )


def user_phase(weighting: Weighting, num_items: int) -> Phase:
  """Return the phase in which a client solves for its vector.

  Args:
    weighting: Weights of the unobserved and the regularization.
    num_items: Number of items.
  """

  def prior(client: ClientContext) -> Prior:
    """Return the loss of the items that are not observed, and the penalty."""
    batch, gram = batch_of(client), client.weight(GLOBAL, GRAM)
    weights = batch.example_weights
    items = tf.where(batch.is_real, batch.x, 0)
    net = weighting.net(items, weights, num_items)
    rows = tf.gather(client.weight(GLOBAL, ITEM), items)
    taken = tf.matmul(rows, rows * (weights - net)[:, None], transpose_a=True)
    penalty = weighting.penalty(tf.reduce_sum(net), num_items)
    return Prior(
      None,
      weighting.unobserved * gram - taken + penalty * tf.eye(gram.shape[0]),
    )

  return Phase(train=(LOCAL,), optimizer=Exact(prior=prior))
