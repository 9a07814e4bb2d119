"""Independent local training: Eq. 1 of FURL, checked on a centralized model.

See `split_personalization.py` for the equations.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import functools
import math
import re
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial import random_bits
from tff_partial.checks.split_personalization import CheckError
from tff_partial.checks.split_personalization import Report
from tff_partial.checks.split_personalization import Violation
from tff_partial.data import examples as examples_lib
from tff_partial.model import keras_analysis
from tff_partial.model import seeded_draws


def _name(variable: tf.Variable) -> str:
  return variable.name.split(':')[0]


def _draw_weights(model: tf.keras.Model, private: str, seed: Any) -> None:
  """Draw weights at which no penalty is flat by chance."""
  for place, variable in enumerate(model.trainable_variables):
    rows = math.prod(variable.shape[:-1])
    is_private = re.fullmatch(private, _name(variable)) is not None
    drawn = random_bits.normal(
      random_bits.fold_in(seed, place),
      variable.shape,
      stddev=1.0 if is_private else rows**-0.5,
      dtype=variable.dtype,
    )
    variable.assign(drawn)


class _Table:
  """A private variable of all users, with its worst gradients.

  Attributes:
    variable: The variable, one row per user.
    is_read: True if any loss depends on it.
    worst: For each part of the loss, the largest gradient on a row of another
      user, with the two users.
  """

  def __init__(self, variable: tf.Variable):
    self.variable = variable
    self.is_read = False
    self.worst: dict[str, tuple[float, int, int]] = {}

  def look_at(self, part: str, gradient: Any, user: int) -> None:
    """Note the gradient of one part of a user's loss."""
    sizes = np.abs(tf.convert_to_tensor(gradient).numpy())
    self.is_read |= bool(np.any(sizes != 0))
    sizes = sizes.reshape([len(sizes), -1]).max(axis=1, initial=0)
    sizes[user] = 0
    other = int(np.argmax(sizes))  # The first NaN, if any.
    size = float(sizes[other])
    if size != 0 and not size <= self.worst.get(part, (0.0,))[0]:
      self.worst[part] = (size, user, other)

  def violations(self) -> Iterator[Violation]:
    """Yield the violations of Eq. 1."""
    for part, (size, user, other) in self.worst.items():
      yield Violation(
        1,
        _name(self.variable),
        size,
        f'has a row of user {other} that {part} of user {user} depends on',
      )


def _tables(model: tf.keras.Model, private: str, users: Any) -> list[_Table]:
  """Return the private variables, checked to have a row for each user."""
  chosen = [
    variable
    for variable in model.trainable_variables
    if re.fullmatch(private, _name(variable))
  ]
  if not chosen:
    raise CheckError(
      f'private={private!r} names none of the trainable variables '
      f'{[_name(v) for v in model.trainable_variables]}.'
    )
  for variable in chosen:
    rows = variable.shape[0] if variable.shape.rank else 0
    if users.min() < 0 or users.max() >= rows:
      raise CheckError(
        f'Variable {_name(variable)!r} of shape {tuple(variable.shape)} has no '
        f'row for each of the users {users.min()} to {users.max()}.'
      )
  return [_Table(variable) for variable in chosen]


def _users(inputs: Any, user: str | None) -> np.ndarray:
  """Return the user of each example."""
  if user is None:
    if not isinstance(inputs, np.ndarray):
      raise CheckError(
        'user=None: the examples have several inputs. Name the one with the '
        "row of each example's user, `user=...`."
      )
    return inputs
  if not (isinstance(inputs, Mapping) and user in inputs):
    known = list(inputs) if isinstance(inputs, Mapping) else 'one without name'
    raise CheckError(f'There is no input {user!r}; the inputs are {known}.')
  return inputs[user]


def _gradients(
  model: tf.keras.Model,
  loss: Callable[[Any, Any], tf.Tensor],
  inputs: Any,
  labels: Any,
  tables: Sequence[_Table],
) -> Iterator[tuple[str, Sequence[Any]]]:
  """Yield each part of a loss with its gradients on the tables."""
  with tf.GradientTape(persistent=True) as tape:
    parts = {'the loss': loss(labels, model(inputs, training=True))}
    if model.losses:
      parts['a loss that a layer adds'] = tf.add_n(model.losses)
  for part, value in parts.items():
    yield (
      part,
      tape.gradient(
        value,
        [table.variable for table in tables],
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
      ),
    )


def check_independent_training(
  build: Callable[[], tf.keras.Model],
  examples: Mapping[str, Any],
  *,
  loss: Callable[[Any, Any], tf.Tensor],
  private: str,
  user: str | None = None,
  draws: int = 2,
  seed: int = 0,
) -> Report:
  """Check Eq. 1 on a centralized model with the parameters of all users.

  The gradient of each user's loss, including all that layers add, must be zero
  on every row of another user. Layers such as dropout are in training mode.

  Args:
    build: Builds the Keras model.
    examples: `x` and `y`, arrays `[examples, ...]`, of some of the users.
    loss: A Keras loss, or a function of labels and predictions.
    private: A regular expression over whole names of variables: tables with a
      row for each user.
    user: The name of the model's input with the user's row; None if that is the
      only input.
    draws: Number of times that weights are drawn.
    seed: Seed of all random draws.

  Raises:
    CheckError: If there is no such variable or input, if a variable lacks a
      row for a user, or if no user's loss depends on it.
  """
  fields = examples_lib.map_fields(np.asarray, (examples['x'], examples['y']))
  users = _users(fields[0], user)
  model = build()
  if not model.built:
    model(fields[0])
  tables = _tables(model, private, users)
  for draw in range(draws):
    own_seed = random_bits.fold_in(random_bits.derive(seed, 'check'), draw)
    _draw_weights(model, private, own_seed)
    for place, layer in enumerate(keras_analysis.layers_of(model)):
      if hasattr(layer, '_random_generator'):
        layer._random_generator = seeded_draws.SeededDraws(
          random_bits.fold_in(own_seed, place)
        )
    for one in np.unique(users):
      take = functools.partial(np.compress, users == one, axis=0)
      inputs, labels = examples_lib.map_fields(take, fields)
      for part, gradients in _gradients(model, loss, inputs, labels, tables):
        for table, gradient in zip(tables, gradients, strict=True):
          table.look_at(part, gradient, int(one))
  unread = [_name(table.variable) for table in tables if not table.is_read]
  if unread:
    raise CheckError(
      f'No loss depends on the private variables {unread}, so that there is '
      'nothing to check. Is this the personalized model?'
    )
  return Report((1,), tuple(v for table in tables for v in table.violations()))
