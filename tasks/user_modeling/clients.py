"""Clients with many users each."""

import collections
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tasks.task import TRAIN
from tasks.task import VALIDATION
from tasks.user_modeling import models as user_models
from tasks.user_modeling import records as records_lib
import tff_partial
from tff_partial.data import examples
from tff_partial.data import id_ranges
from tff_partial.data import populations

# Fields that mark examples held back from a client's training.
IS_VALIDATION, IS_QUERY = 'is_validation', 'is_query'


class ManyUserClients:
  """All clients, with the records of each part.

  Attributes:
    num_users: Number of users of each client in any part, `[clients]`.
    num_items: Number of items of each client in any part, `[clients]`.
    first_user: Number of each client's first user among the users of all
      clients, `[clients]`.
  """

  def __init__(
    self, records: records_lib.Records, parts: Mapping[str, records_lib.Records]
  ):
    numbers = range(len(records.clients))
    self.num_users = np.array([records.num_users(c) for c in numbers])
    self.num_items = np.array([records.num_own_items(c) for c in numbers])
    self._num_items = records.num_items
    self._names = records.clients
    self.first_user = np.cumsum(self.num_users) - self.num_users
    self._parts = {
      part: [held.of_client(c) for c in numbers] for part, held in parts.items()
    }

  def rows_of(self, fields: Iterable[str]) -> np.ndarray:
    """Return the rows at each client of a table that these inputs look up."""
    is_of_users = f'x.{user_models.USER}' in fields
    return self.num_users if is_of_users else self.num_items

  def pack(
    self, part: str, example_spec: examples.ExampleSpec
  ) -> populations.Population:
    """Pack all clients with the records of one part.

    Where examples have a mark of those not to train on, clients have more: in
    training the records of VALIDATION, otherwise those of TRAIN. They have
    tables for all users and items that they have in any part.

    Args:
      part: TRAIN, VALIDATION or TEST.
      example_spec: Fields of an example. Where tables are client-sized, users
        and items are numbered within the client, else among all.
    """
    sized = id_ranges.client_sized(examples.ids_of(example_spec))
    own = {path for fields in sized.values() for path in fields}
    marked = {part: 0 if part == TRAIN else 1}
    mark = IS_QUERY
    if part == TRAIN and IS_VALIDATION in example_spec:
      marked, mark = {TRAIN: 0, VALIDATION: 1}, IS_VALIDATION
    elif part != TRAIN and IS_QUERY in example_spec:
      marked = {TRAIN: 0, part: 1}
    packed, num_rows = {}, {}
    for number, name in enumerate(self._names):
      fields = examples.map_fields(
        lambda *arrays: np.concatenate(arrays),
        *(
          {
            **self._fields(self._parts[each][number], own),
            mark: np.full(len(self._parts[each][number]), value, np.int32),
          }
          for each, value in marked.items()
        ),
      )
      if mark not in example_spec:
        del fields[mark]
      packed[name] = fields
      num_rows[name] = {
        table: int(self.rows_of(paths)[number])
        for table, paths in sized.items()
      }
    return tff_partial.pack(
      packed, example_spec, min_examples=0, num_rows=num_rows
    )

  def records_for(
    self, model: tf.keras.Model, part: str, client: int
  ) -> Mapping[str, Any]:
    """Return one client's records of a part, numbered as a model's tables are.

    Args:
      model: A client's own model, or one with tables of all clients.
      part: TRAIN, VALIDATION or TEST.
      client: The client's number.
    """
    # Layers with tables of users or items have names that start like this.
    totals = {
      user_models.USER: int(self.num_users.sum()),
      user_models.ITEM: self._num_items,
    }
    own = {
      f'x.{field}'
      for field, total in totals.items()
      for layer in model.layers
      if layer.name.startswith(field)
      and any(table.shape[0] != total for table in layer.weights)
    }
    return self._fields(self._parts[part][client], own)

  def _fields(
    self, held: records_lib.Records, own: set[str]
  ) -> Mapping[str, Any]:
    """Return one client's examples, with `own` inputs numbered within it."""
    user, item = held.user, held.item
    if f'x.{user_models.USER}' not in own:
      user = user + self.first_user[held.client].astype(np.int32)
    if f'x.{user_models.ITEM}' not in own:
      item = held.public_item
    inputs = {
      user_models.USER: user,
      user_models.ITEM: item,
      user_models.ATTRIBUTES: held.attributes,
    }
    return collections.OrderedDict(x=inputs, y=held.answer[:, np.newaxis])
