"""Tables that have as many rows as a client needs.

The builder of a Keras model makes an ordinary `Embedding` with some number of
rows. If that table is `client_sized`, each client holds only the rows that its
own examples name, so that a client with many users and items pays for these
alone. A client's rows are padded to the size of others in its bucket; padding
is zero, is never read, and changes no result.
"""

import collections
from collections.abc import Callable, Collection, Mapping
from typing import Any

import tensorflow as tf

from tff_partial import random_bits
from tff_partial.data import id_ranges
from tff_partial.model.keras_variables import ModelError

# (seed int32 `[2]`, number of rows) -> first values of that many rows.
DrawRows = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def check_rows(name: str, draw_rows: DrawRows) -> None:
  """Refuse a table whose first rows depend on the number of rows."""
  with tf.init_scope():
    seed = tf.zeros([2], tf.int32)
    try:
      few, many = (draw_rows(seed, tf.constant(n)).numpy() for n in (2, 3))
      is_by_rows = few.shape == many[:2].shape and (few == many[:2]).all()
    except (ValueError, tf.errors.InvalidArgumentError) as error:
      if isinstance(error, ModelError):
        raise
      is_by_rows = False
  if not is_by_rows:
    raise ModelError(
      f'client_sized: the initializer of {name!r} makes all rows together, as '
      'that of an orthogonal matrix does, so that rows cannot be added. Take '
      'one that draws each number by itself, or one value for all.'
    )


def mapped(
  structure: Any,
  fit: Callable[[str, tf.Tensor], tf.Tensor],
  names: Collection[str],
) -> Any:
  """Fit the tables of these names in a client's state."""
  if isinstance(structure, Mapping):
    return collections.OrderedDict(
      (
        name,
        fit(name, value)
        if name in names and tf.is_tensor(value)
        else mapped(value, fit, names),
      )
      for name, value in structure.items()
    )
  return structure


def names_in(structure: Any, names: Collection[str]) -> set[str]:
  """Return the names of the tables in a client's state."""
  found: set[str] = set()

  def note(name: str, table: tf.Tensor) -> tf.Tensor:
    found.add(name)
    return table

  mapped(structure, note, names)
  return found


class ClientTables:
  """The tables of a model that are sized per client.

  Attributes:
    names: The names of their variables.
  """

  def __init__(self, draw_rows: Mapping[str, DrawRows]):
    """Take the function that draws the rows of each table, by name."""
    self._draw_rows = dict(draw_rows)
    self.names = tuple(self._draw_rows)

  def check(self, only_looked_up: Collection[str], ids: id_ranges.Ids) -> None:
    """Refuse tables whose number of rows does not follow from the examples."""
    told = id_ranges.client_sized(ids)
    for name in self.names:
      if name not in only_looked_up or name not in told:
        raise ModelError(
          f'client_sized: how many rows of {name!r} a client needs does not '
          'follow from its examples. Its rows must be looked up by an input '
          'of the model as it is, as `Embedding` does, and be read in no other '
          'way.'
        )

  def fit(
    self,
    structure: Any,
    known: Mapping[str, tf.Tensor],
    rows: Mapping[str, tf.Tensor],
    seed: tf.Tensor,
  ) -> Any:
    """Fit the tables in a structure to a client's data.

    Rows that are missing are drawn, those that it does not need are dropped,
    and padding becomes zeros.

    Args:
      structure: The client's state, or its local weights.
      known: Name of each table to fit to the number of its valid rows, int32.
      rows: Table name to a mask of the rows that the client needs, bool.
      seed: int32 `[2]`.
    """

    def fit(name: str, table: tf.Tensor) -> tf.Tensor:
      is_real = rows[name]
      number = tf.size(is_real)
      shape = tf.concat([[number], tf.shape(table)[1:]], 0)
      held = tf.concat([table, tf.zeros(shape, table.dtype)], 0)[:number]
      own_seed = random_bits.fold_in(seed, f'rows of {name}')
      drawn = self._draw_rows[name](own_seed, number)

      def along_rows(condition: tf.Tensor) -> tf.Tensor:
        return tf.reshape(condition, [-1, *[1] * (table.shape.rank - 1)])

      is_known = along_rows(tf.range(number) < known[name])
      fitted = tf.where(is_known, held, drawn)
      return tf.where(along_rows(is_real), fitted, tf.zeros_like(fitted))

    return mapped(structure, fit, known) if known else structure
