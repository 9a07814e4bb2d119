"""User models: GUM, the two that HPFL compares it with, and biases alone.

All have the same inputs: the number of a user, the number of an item, and the
item's attributes, padded with -1; all predict one number, `[batch, 1]`. Weights
of a user or item are a row of a table, in a layer whose name starts with `user`
or `item`. All other weights are public.
"""

from collections.abc import Callable
import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tasks.errors import OptionError
from tasks.user_modeling import model_parts
from tasks.user_modeling.model_parts import AnswerScale as AnswerScale
from tasks.user_modeling.model_parts import ATTRIBUTES as ATTRIBUTES
from tasks.user_modeling.model_parts import BINARY as BINARY
from tasks.user_modeling.model_parts import InputSizes as InputSizes
from tasks.user_modeling.model_parts import ITEM as ITEM
from tasks.user_modeling.model_parts import multi_hot as multi_hot
from tasks.user_modeling.model_parts import RATINGS as RATINGS
from tasks.user_modeling.model_parts import USER as USER
from tasks.user_modeling.model_parts import XAVIER
from tasks.user_modeling.options import BIAS as BIAS
from tasks.user_modeling.options import GUM as GUM
from tasks.user_modeling.options import MODELS as MODELS
from tasks.user_modeling.options import NCD as NCD
from tasks.user_modeling.options import NCF as NCF

# N of GUM, the length of its knowledge vectors.
_WIDTH = 5
# Layers of users' and of items' weights, for `from_keras`.
USER_LAYERS = ('user(_.*)?',)
ITEM_LAYERS = ('item(_.*)?',)
# Variables of users' and items' vectors, in models that have them.
VECTORS = tuple(
  f'{layer}/embeddings'
  for layer in ('user', 'item', 'user_tower', 'item_tower')
)
# Variables with a row per attribute, in models that have them.
KNOWLEDGE = tuple(
  f'{layer}/kernel'
  for layer in ('knowledge_user', 'knowledge_item', 'relation')
)
# All such variables, with the biases of attributes.
BY_ATTRIBUTE = (*KNOWLEDGE, 'attribute_bias/kernel')


def build(
  model: str,
  sizes: InputSizes,
  output: AnswerScale = BINARY,
  *,
  biases: bool = False,
  biases_in_attributes: bool = False,
  identity_relation: bool = False,
) -> tf.keras.Model:
  if model == GUM:
    return build_gum(
      sizes,
      output,
      biases=biases,
      biases_in_attributes=biases_in_attributes,
      identity_relation=identity_relation,
    )
  if biases or biases_in_attributes:
    raise OptionError(
      f'--biases: the model {model} has them always, or never. Leave it out, '
      'or give --model=gum.'
    )
  if identity_relation:
    raise OptionError(
      f'--set=user_model_identity_relation=true: the model {model} has no RM. '
      'Leave it out, or give --model=gum.'
    )
  builders: dict[str, Callable[..., tf.keras.Model]] = {
    NCD: build_ncd,
    NCF: build_ncf,
    BIAS: build_bias,
  }
  return builders[model](sizes, output)


def build_gum(
  sizes: InputSizes,
  output: AnswerScale = BINARY,
  *,
  biases: bool = False,
  biases_in_attributes: bool = False,
  identity_relation: bool = False,
) -> tf.keras.Model:
  """Build the general user model of HPFL, section 4.4.

  The multi-hot vector m of the item's attributes gives Emb_c = m RM. A user is
  R_u = (Emb_u * Emb_c) KM_u (Eq. 4), an item R_v = (Emb_v * Emb_c) KM_v (Eq.
  5), and the score is (R_u - R_v) HM (Eqs. 6 and 7). All weights are
  initialized by Xavier.

  Args:
    sizes: Sizes of the model's inputs.
    output: Conversion of scores to predictions.
    biases: True to add biases of the user, of the item and of its attributes,
      and a common one, all initially zero, to the score. Biases of attributes
      are public, with a row per attribute.
    biases_in_attributes: With biases, True to also add those of the user in
      each of the item's attributes: a table with a row per user.
    identity_relation: True to begin RM at the identity, as the authors' code
      does: a number of a user's vector then belongs to an attribute.

  Raises:
    OptionError: If there are biases in attributes and no others.
  """
  if biases_in_attributes and not biases:
    raise OptionError(
      '--set=user_model_biases_in_attributes=true: without other biases there '
      'are none of users in attributes. Add --biases, or leave it out.'
    )
  inputs = model_parts.inputs_of(sizes)
  score = _gum_score(inputs, sizes, 'identity' if identity_relation else XAVIER)
  if biases:
    common = model_parts.biases(inputs, sizes)
    of_attributes = model_parts.attribute_biases(
      inputs, sizes, of_users=biases_in_attributes
    )
    score = tf.keras.layers.Add(name='score')([score, common, *of_attributes])
  return tf.keras.Model(inputs, output.of(score), name=GUM)


def _gum_score(
  inputs: dict[str, Any], sizes: InputSizes, first_relation: str
) -> Any:
  """Build GUM's score of a user and an item, without biases."""
  layers = tf.keras.layers
  linear = functools.partial(
    layers.Dense, use_bias=False, kernel_initializer=XAVIER
  )
  relation = linear(
    sizes.attributes, kernel_initializer=first_relation, name='relation'
  )(model_parts.attributes_of(inputs, sizes))

  def project(vectors: Any, whose: str) -> Any:
    seen = layers.Multiply(name=f'{whose}_on_attributes')([vectors, relation])
    return linear(_WIDTH, name=f'knowledge_{whose}')(seen)

  users = model_parts.looked_up(inputs, sizes, sizes.attributes, 'user')
  items = model_parts.looked_up(inputs, sizes, sizes.attributes, 'item')
  distance = layers.Subtract(name='distance')(
    [project(users, 'user'), project(items, 'item')]
  )
  return linear(1, name='hidden')(distance)


def build_ncd(
  sizes: InputSizes,
  output: AnswerScale = BINARY,
  *,
  hidden: tuple[int, ...] = (512, 256),
) -> tf.keras.Model:
  """Build neural cognitive diagnosis (Wang et al., AAAI 2020).

  A user's mastery of each attribute and an item's difficulty in it, both
  between 0 and 1, are compared on the item's attributes and multiplied by the
  item's discrimination; layers with non-negative weights compute a score that
  increases with mastery. Layers use the absolute values of the weights, instead
  of a constraint as in the paper. Hidden layers use tanh instead of its
  sigmoids: a sum of hundreds of sigmoids with non-negative weights is so large
  that the next layer would saturate at 1 for any input, and never learn.
  """
  layers = tf.keras.layers

  def share(vectors: Any, name: str) -> Any:
    return layers.Activation('sigmoid', name=name)(vectors)

  inputs = model_parts.inputs_of(sizes)
  users = model_parts.looked_up(inputs, sizes, sizes.attributes, 'user')
  items = model_parts.looked_up(inputs, sizes, sizes.attributes, 'item')
  sharpness = model_parts.looked_up(inputs, sizes, 1, 'item_discrimination')
  values = layers.Subtract(name='difference')(
    [share(users, 'mastery'), share(items, 'difficulty')]
  )
  values = layers.Multiply(name='compared')(
    [
      model_parts.attributes_of(inputs, sizes),
      values,
      share(sharpness, 'discrimination'),
    ]
  )
  for number, size in enumerate(hidden, 1):
    values = model_parts.NonNegativeDense(
      size, activation='tanh', name=f'interaction_{number}'
    )(values)
  score = model_parts.NonNegativeDense(1, name='score')(values)
  return tf.keras.Model(inputs, output.of(score), name=NCD)


def build_ncf(
  sizes: InputSizes, output: AnswerScale = BINARY, *, factors: int = 8
) -> tf.keras.Model:
  """Build neural collaborative filtering, NeuMF (He et al., WWW 2017).

  One pair of tables is multiplied, another goes through a tower of layers of
  halving sizes; a last layer computes a score from both results. Attributes are
  not used.
  """
  layers = tf.keras.layers
  inputs = model_parts.inputs_of(sizes)
  product = layers.Multiply(name='product')(
    [
      model_parts.looked_up(inputs, sizes, factors, 'user'),
      model_parts.looked_up(inputs, sizes, factors, 'item'),
    ]
  )
  # As in section 4.1 of the paper: 32, 16 and 8 for 8 factors.
  values = layers.Concatenate(name='both')(
    [
      model_parts.looked_up(inputs, sizes, 2 * factors, 'user_tower'),
      model_parts.looked_up(inputs, sizes, 2 * factors, 'item_tower'),
    ]
  )
  for number, size in enumerate((4 * factors, 2 * factors, factors), 1):
    values = layers.Dense(size, 'relu', name=f'tower_{number}')(values)
  score = layers.Dense(1, name='score')(
    layers.Concatenate(name='fused')([product, values])
  )
  return tf.keras.Model(inputs, output.of(score), name=NCF)


def build_bias(
  sizes: InputSizes, output: AnswerScale = BINARY
) -> tf.keras.Model:
  """Build a model of only user and item biases, without attributes."""
  inputs = model_parts.inputs_of(sizes)
  score = model_parts.biases(inputs, sizes)
  return tf.keras.Model(inputs, output.of(score), name=BIAS)


# ---- trained models ----------------------------------------------------------


def hidden_characteristics(model: tf.keras.Model) -> np.ndarray | None:
  """Compute users' hidden characteristics, `[users, attributes]`.

  For GUM they are Eq. 8, for NCD the mastery, for the others None.
  """
  names = {layer.name for layer in model.layers}
  if 'relation' in names:
    users, knowledge_of_users, hidden = (
      model.get_layer(name).get_weights()[0]
      for name in ('user', 'knowledge_user', 'hidden')
    )
    # h_u = Emb_u * (KM_u HM).
    return users * (knowledge_of_users @ hidden)[:, 0]
  if 'mastery' in names:
    users = model.get_layer('user').get_weights()[0]
    return 1 / (1 + np.exp(-users))
  return None


def biases_in_attributes(model: tf.keras.Model) -> np.ndarray | float:
  """Return each user's advantage over others on items with an attribute.

  It is `[users, attributes]`, or zero for a model without such biases.
  """
  table = model_parts.BIAS_IN_ATTRIBUTES
  if table not in {layer.name for layer in model.layers}:
    return 0.0
  return model.get_layer(table).get_weights()[0]


def knowledge(model: tf.keras.Model) -> dict[str, np.ndarray]:
  """Return a model's public components, `[attributes, size]`, by name."""
  names = {layer.name for layer in model.layers}
  layers = {name: name.split('/')[0] for name in KNOWLEDGE}
  return {
    name: model.get_layer(layer).get_weights()[0]
    for name, layer in layers.items()
    if layer in names
  }
