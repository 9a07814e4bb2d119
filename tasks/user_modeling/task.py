"""User modeling at schools and regions: HPFL (Wu et al., WWW 2021).

A client is a teacher or a region, with many users. Records are divided into
training, validation and test for each user, so that all clients are seen: they
are measured on further records of known users.

The tables of a client's users and items are local and client-sized. Items may
be public instead, in one table that the clients share, indexed by item id. For
central training all users and items are in tables at the server.
"""

import collections
from collections.abc import Iterable, Mapping
import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tasks import task
from tasks.movielens import task as movielens
from tasks.user_modeling import assist_files
from tasks.user_modeling import cuts
from tasks.user_modeling import measures
from tasks.user_modeling import models as user_models
from tasks.user_modeling import movielens_files
from tasks.user_modeling import options as user_options
from tasks.user_modeling import parts
from tasks.user_modeling import records as records_lib
from tasks.user_modeling import synthetic
import tff_partial
from tff_partial import tiers
from tff_partial.algorithms import hpfl
from tff_partial.data import examples
from tff_partial.data import id_ranges
from tff_partial.data import populations
from tff_partial.model import models

# RM of GUM.
_RELATION = 'relation/kernel'
# Fields that mark examples held back from a client's training.
_IS_VALIDATION, _IS_QUERY = 'is_validation', 'is_query'


class UserModeling(task.MeasuredByProtocol):
  """Clients with many users each, whose answers are examples.

  Attributes:
    records: All records.
  """

  selection_metric = 'rmse'
  higher_is_better = False
  keeps_tables = True
  protocol = task.SEEN
  forms = (task.OWN, task.TABLE)

  def __init__(
    self,
    name: str,
    records: records_lib.Records,
    options: user_options.UserModelingOptions,
    seed: int,
  ):
    self.name = name
    self.records = records
    self.learned_from_training: tuple[str, ...] = (
      'list of attributes',
      'median numbers of users and items',
    )
    if options.items == user_options.PUBLIC:
      self.learned_from_training += ('list of items',)
    self._options = options
    self._seed = seed
    self._parts = parts.divided(records, seed=seed, repeat=options.repeat)
    # Of each client, its users, its items, and its number of its first user
    # among the users of all.
    self._num_users = np.array([*map(len, records.user_names)])
    self._num_items = np.array([*map(len, records.own_items)])
    self._first_user = np.cumsum(self._num_users) - self._num_users

  def _evaluation_clients(self, part: str) -> task.EvaluationClients:
    return task.EvaluationClients(part, True)

  @property
  def counts(self) -> dict[str, Any]:
    return {
      'name': self.records.name,
      **self.records.describe(),
      **{part: {'records': len(held)} for part, held in self._parts.items()},
    }

  # ---- the model -------------------------------------------------------------

  def _build_model(self, user: str) -> models.PartialModel:
    """Build the model with tables at the clients, or one of all clients."""
    options, records = self._options, self.records
    own: list[str] = []
    num_users, num_items = int(self._num_users.sum()), records.num_items
    if user == task.OWN:
      # The initializers depend on the typical sizes of clients' tables.
      num_users = int(np.median(self._num_users))
      own += user_models.USER_LAYERS
      if options.items == task.OWN:
        num_items = int(np.median(self._num_items))
        own += user_models.ITEM_LAYERS
    builder = functools.partial(
      user_models.build,
      options.model,
      user_models.InputSizes(
        num_users,
        num_items,
        records.num_attributes,
        records.item_attributes.shape[1],
      ),
      user_models.AnswerScale(*records.scale, options.linear),
      biases=options.biases,
      biases_in_attributes=options.biases_in_attributes,
      identity_relation=options.identity_relation,
    )
    return tff_partial.from_keras(
      builder,
      local=own or None,
      client_sized=own or None,
      loss=tf.keras.losses.MeanSquaredError(),
      metrics=functools.partial(measures.build_metrics, records.scale),
      seed=self._seed,
    )

  # ---- requirements of algorithms --------------------------------------------

  def kept_tables(self) -> Mapping[str, tuple[int, ...]]:
    """Return the row counts of the tables that clients keep, except biases.

    A client has a row for each of its users and items.
    """
    tables = id_ranges.client_sized(self.model_with(task.OWN).example_spec.ids)
    return {
      table: tuple(self._rows_of(fields).tolist())
      for table, fields in tables.items()
      if table in user_models.VECTORS
    }

  def item_attributes(self) -> hpfl.Attributes:
    number = self.records.num_attributes
    shared = self.model_with(task.OWN).specs(tiers.GLOBAL)
    return hpfl.Attributes(
      number=number,
      of=lambda inputs: user_models.multi_hot(
        inputs[user_models.ATTRIBUTES], number
      ),
      rows=[name for name in user_models.BY_ATTRIBUTE if name in shared],
      is_correct=measures.is_right(self.records.scale),
    )

  # ---- clients ---------------------------------------------------------------

  def clients(
    self, part: str, example_spec: examples.ExampleSpec
  ) -> populations.Population:
    """Pack all clients with the records of one part.

    Where examples have a mark of those not to train on, clients have more: in
    training the records of VALIDATION, otherwise those of TRAIN. They have
    tables for all users and items that they have in any part. Where tables are
    client-sized, users and items are numbered within the client, else among
    all.
    """
    sized = id_ranges.client_sized(examples.ids_of(example_spec))
    own = {path for fields in sized.values() for path in fields}
    marked = {part: 0 if part == task.TRAIN else 1}
    mark = _IS_QUERY
    if part == task.TRAIN and _IS_VALIDATION in example_spec:
      marked, mark = {task.TRAIN: 0, task.VALIDATION: 1}, _IS_VALIDATION
    elif part != task.TRAIN and _IS_QUERY in example_spec:
      marked = {task.TRAIN: 0, part: 1}
    packed, num_rows = {}, {}
    for number, name in enumerate(self.records.clients):
      held = {each: self._parts[each].of_client(number) for each in marked}
      fields = examples.map_fields(
        lambda *arrays: np.concatenate(arrays),
        *(
          {
            **self._fields(held[each], own),
            mark: np.full(len(held[each]), value, np.int32),
          }
          for each, value in marked.items()
        ),
      )
      if mark not in example_spec:
        del fields[mark]
      packed[name] = fields
      num_rows[name] = {
        table: int(self._rows_of(paths)[number])
        for table, paths in sized.items()
      }
    return tff_partial.pack(
      packed, example_spec, min_examples=0, num_rows=num_rows
    )

  def _rows_of(self, fields: Iterable[str]) -> np.ndarray:
    """Return the rows at each client of a table that these inputs look up."""
    is_of_users = f'x.{user_models.USER}' in fields
    return self._num_users if is_of_users else self._num_items

  def _fields(
    self, held: records_lib.Records, own: set[str]
  ) -> Mapping[str, Any]:
    """Return one client's examples, with `own` inputs numbered within it."""
    user, item = held.user, held.item
    if f'x.{user_models.USER}' not in own:
      user = user + self._first_user[held.client].astype(np.int32)
    if f'x.{user_models.ITEM}' not in own:
      item = held.public_item
    inputs = {
      user_models.USER: user,
      user_models.ITEM: item,
      user_models.ATTRIBUTES: held.attributes,
    }
    return collections.OrderedDict(x=inputs, y=held.answer[:, np.newaxis])

  # ---- metrics ---------------------------------------------------------------

  def measure_models(
    self, own_models: Iterable[task.OwnModel]
  ) -> dict[str, float]:
    return measures.measure(
      map(self._answers, own_models),
      self.records.scale,
      self.records.num_attributes,
    )

  def _answers(self, own: task.OwnModel) -> measures.Answers:
    """Return the outputs of a client's model for its measured records."""
    fields = own.examples
    if _IS_QUERY in fields:
      is_query = fields[_IS_QUERY] == 1
      fields = examples.map_fields(lambda array: array[is_query], fields)
    inputs = {name: np.asarray(x) for name, x in fields['x'].items()}
    client = self.records.clients.index(own.client)
    public = user_models.knowledge(own.keras_model)
    held = self._validation_records(own.keras_model, client)
    return measures.Answers(
      own.client,
      inputs[user_models.USER],
      inputs[user_models.ATTRIBUTES],
      np.asarray(fields['y'])[:, 0],
      np.asarray(own.keras_model(inputs, training=False))[:, 0],
      _hidden(own.keras_model, public),
      {name: x for name, x in public.items() if name != _RELATION},
      int((self.records.client == client).sum()),
      cuts.histogram(
        held['y'][:, 0],
        np.asarray(own.keras_model(held['x'], training=False))[:, 0],
        self.records.scale,
      ),
    )

  def _validation_records(
    self, model: tf.keras.Model, client: int
  ) -> Mapping[str, Any]:
    """Return one client's records, numbered as a model's tables are.

    The model is the client's own, or one with tables of all clients.
    """
    # Layers with tables of users or items have names that start like this.
    totals = {
      user_models.USER: int(self._num_users.sum()),
      user_models.ITEM: self.records.num_items,
    }
    own = {
      f'x.{field}'
      for field, total in totals.items()
      for layer in model.layers
      if layer.name.startswith(field)
      and any(table.shape[0] != total for table in layer.weights)
    }
    return self._fields(self._parts[task.VALIDATION].of_client(client), own)


def _hidden(
  keras_model: tf.keras.Model, public: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Return hidden characteristics by Eq. 8, and `_related` through RM.

  In GUM an attribute of an item affects all numbers of a user through its row
  of RM, which Eq. 8 leaves out: unless RM is the identity, h_uk does not
  describe items with the attribute k, but h_u RM^T does. To that are added the
  biases of a user in attributes, which the paper does not have.
  """
  hidden = user_models.hidden_characteristics(keras_model)
  if hidden is None:
    return {}
  found = {'': hidden}
  if _RELATION in public:
    biases = user_models.biases_in_attributes(keras_model)
    found['_related'] = hidden @ public[_RELATION].T + biases
  return found


def load_assist(
  options: user_options.AssistOptions, data: task.Data, seed: int
) -> UserModeling:
  """Load the answers and make the task.

  Answers are in the folder `assistments` below `data_dir`.
  """
  if data.is_synthetic:
    return UserModeling(options.name, synthetic.generate(), options, seed)
  found = assist_files.load(data.data_dir or '')
  return UserModeling(options.name, found, options, seed)


def load_movielens(
  options: user_options.MovielensOptions, data: task.Data, seed: int
) -> UserModeling:
  """Load the ratings and make the task.

  Ratings are in the folder `movielens/ml-100k` below `data_dir`.
  """
  if data.is_synthetic:
    found = synthetic.generate(five_points=True)
    return UserModeling(options.name, found, options, seed)
  folder = movielens.data_folder(data, movielens_files.NAME)
  return UserModeling(options.name, movielens_files.load(folder), options, seed)
