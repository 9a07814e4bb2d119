"""Interfaces of tasks that the programs use."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple, Self, TYPE_CHECKING, TypeAlias

import numpy as np

from tasks.errors import OptionError
from tasks.shared_options import Data as Data
from tasks.shared_options import Release as Release
from tasks.shared_options import SEEN as SEEN
from tasks.shared_options import Spent as Spent
from tasks.shared_options import TaskOptions as TaskOptions
from tasks.shared_options import UNSEEN as UNSEEN
import tff_partial

if TYPE_CHECKING:
  import tensorflow as tf
  import tensorflow_federated as tff

  from tff_partial import assignments
  from tff_partial.algorithms import hpfl
  from tff_partial.data import client_readers
  from tff_partial.data import examples
  from tff_partial.data import populations
  from tff_partial.data import splits
  from tff_partial.evaluation import Evaluation
  from tff_partial.model import models

# In memory, or read lazily in their round.
Clients: TypeAlias = 'populations.Population | client_readers.Reader'

# Parts of the data that every task has.
PARTS = TRAIN, VALIDATION, TEST = 'train', 'validation', 'test'

# Where a model keeps the parameters of one user: at the user (local weights),
# in a row of a table at the server, or nowhere: all users share all weights.
OWN, TABLE, NOBODY = 'own', 'table', 'nobody'
# FedEmbed's forms: the user's embedding, and with it heads of sub-populations
# at the server or a head at the user.
HEADS, OWN_HEAD = 'heads', 'own_head'
# PFedKM's forms: heads of clusters, and the centers of the gradients by which
# users join them: those of the whole model, or of a linear head.
CLUSTERS, HEAD_CLUSTERS = 'clusters', 'head_clusters'
# Forms of IFCA and FedEM: copies of all weights at the server, one for each
# group of users, or of the part that is otherwise local.
GROUPS, GROUP_HEADS = 'groups', 'group_heads'
# The form of FedProto and MOON: nowhere, and the model also outputs features.
FEATURES = 'features'
# FedDBE's form: a vector of the user's own, added to features, which the model
# also outputs.
SHIFTED = 'shifted'
# Federated ALS's form: the user's posterior, with those of items at the server.
POSTERIOR = 'posterior'
# The same, whose items' vectors have public attributes as columns.
PUBLIC_POSTERIOR = 'public_posterior'
# Federated iALS's form: vectors that are solved for, of interactions alone.
IMPLICIT = 'implicit'
# FedRAP's form: the user's vector, and a table of items beside the shared one.
ADDITIVE = 'additive'
# The key of that model's other output.
LOGITS = 'logits'
USER_FORMS = (
  OWN,
  TABLE,
  NOBODY,
  HEADS,
  OWN_HEAD,
  CLUSTERS,
  HEAD_CLUSTERS,
  GROUPS,
  GROUP_HEADS,
  FEATURES,
  SHIFTED,
  POSTERIOR,
  PUBLIC_POSTERIOR,
  IMPLICIT,
  ADDITIVE,
)


@dataclasses.dataclass(frozen=True)
class EvaluationClients:
  """Clients to evaluate.

  Attributes:
    part: The part of the data that they are evaluated on.
    seen: True if they took part in training; they keep their states from there.
    split: Support and query set, if the protocol prescribes them; None leaves
      them to the algorithm.
  """

  part: str
  seen: bool
  split: splits.Split | None = None


@dataclasses.dataclass(frozen=True)
class Recommendation:
  """An item that a user is expected to like.

  Attributes:
    item_id: The item's number.
    title: The item's title.
    score: The expected liking, as the task measures it.
  """

  item_id: int
  title: str
  score: float


class OwnModel(NamedTuple):
  """A client's own model, and the examples to evaluate it on.

  Attributes:
    client: The client.
    keras_model: The model.
    examples: Its examples in the form of its population, `[examples, ...]`.
  """

  client: str
  keras_model: tf.keras.Model
  examples: Mapping[str, Any]


class Task(abc.ABC):
  """Clients, their data, and the model that they train.

  What only some algorithms and programs ask for has a default: nothing.

  Attributes:
    name: The task's name.
    selection_metric: The metric that chooses the best round.
    higher_is_better: True if larger values of it are better.
    learned_from_training: Names of what is computed from the training data
      before training, without noise, such as a vocabulary. A private run
      assumes it to be public, and says so.
    attribute: The name of what is known of the users, such as 'most used
      subreddit'; '' if nothing is.
    own_weights: A regular expression over names that selects the weights of a
      client's state that are its user's vector; '' for all.
    fed_embed_parts: The parts of FedEmbed's model; None without such a model.
    recommends: True if the task can `recommend`.
    keeps_tables: True if clients keep `kept_tables` of many users each. They
      train and keep their tables with any algorithm. Only if one client holds
      the examples of all are all users in one table.
    predicts_tokens: True if the task reads tokens and predicts the next of
      each.
    forms: Those of `USER_FORMS` in which it has a model.
  """

  name: str
  selection_metric: str
  higher_is_better: bool
  learned_from_training: tuple[str, ...]
  attribute: str = ''
  own_weights: str = ''
  fed_embed_parts: assignments.FedEmbedVariables | None = None
  recommends: bool = False
  keeps_tables: bool = False
  predicts_tokens: bool = False
  forms: tuple[str, ...]

  @property
  @abc.abstractmethod
  def counts(self) -> dict[str, Any]:
    """Counts of the data, for the result."""

  @property
  @abc.abstractmethod
  def validation(self) -> EvaluationClients:
    """The clients that choose the best round."""

  @property
  @abc.abstractmethod
  def tests(self) -> dict[str, EvaluationClients]:
    """The test clients, by their names in the result."""

  def model_with(self, user: str) -> models.PartialModel:
    """Return the model in one of its `forms`, which is built once.

    Args:
      user: The user form.

    Raises:
      OptionError: If the task has no such form.
    """
    if user not in self.forms:
      raise OptionError(
        f'--user_form={user}: the model of the task {self.name} has no such '
        f'form. Choose {", ".join(self.forms)}, or another algorithm.'
      )
    return self._models(user)

  @functools.cached_property
  def _models(self) -> Callable[..., models.PartialModel]:
    return functools.cache(self._build_model)

  @abc.abstractmethod
  def _build_model(self, user: str) -> models.PartialModel:
    """Build the model in one of its `forms`."""

  def model_with_features(self, user: str) -> models.PartialModel:
    """Build the model of a user form, with its features as an output.

    Its outputs are a mapping of FEATURES and LOGITS; its variables are those
    of the same form without features.

    Args:
      user: OWN or NOBODY.

    Raises:
      OptionError: If the task has no such form.
    """
    if user == NOBODY:
      return self.model_with(FEATURES)
    raise OptionError(
      f'--task={self.name}: no model of it has both local weights and features '
      'as an output. Use --algorithm=knn_per, or --task=next_word.'
    )

  def targets(self, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the target classes of labels, and where there is one.

    Args:
      labels: Labels of a batch, integers `[batch, ...]`.

    Returns:
      The classes and a mask, both `[batch, ...]`.
    """
    return labels, labels >= 0

  @abc.abstractmethod
  def clients(self, part: str, example_spec: examples.ExampleSpec) -> Clients:
    """Pack the clients of one part of the data."""

  def one_user(
    self, user_id: str, example_spec: examples.ExampleSpec
  ) -> Clients:
    """Find clients that include a user, with all of its examples.

    Args:
      user_id: The user.
      example_spec: The spec of one example.

    Raises:
      OptionError: If there is no such user.
    """
    for part in PARTS:
      clients = self.clients(part, example_spec)
      if user_id in clients.client_ids:
        return clients
    raise OptionError(
      f'--user={user_id}: there is no user {user_id!r} in any part of the '
      f'data; users are called like {clients.client_ids[0]!r}.'
    )

  @property
  def attributes(self) -> dict[str, str]:
    """The attribute of each training user."""
    return {}

  def vectors_at_server(
    self, weights: tff.learning.models.ModelWeights
  ) -> dict[str, np.ndarray]:
    """Return the users' rows in a table at the server, if there is one.

    Args:
      weights: The weights at the server.
    """
    del weights
    return {}

  def from_labels_alone(
    self, num_support: int, num_reserved: int
  ) -> dict[str, dict[str, float]]:
    """Evaluate predictors that only use labels, by the selection metric.

    Args:
      num_support: The number of known examples of each new user.
      num_reserved: The number of first examples not evaluated on.

    Returns:
      Predictor to the name of a test to the metric.
    """
    del num_support, num_reserved
    return {}

  def recommend(
    self, keras_model: Any, user_id: str, number: int
  ) -> list[Recommendation]:
    """Rank the items that a user has not seen, the best first.

    Args:
      keras_model: The user's own model.
      user_id: The user.
      number: The number of items to return.

    Raises:
      OptionError: If there is no such user, or there are fewer items.
    """
    raise NotImplementedError

  def kept_tables(self) -> Mapping[str, Sequence[int]]:
    """Return the tables that can be drafted, `[rows, width]`.

    Returns:
      The names of their variables to their numbers of rows by client.
    """
    return {}

  def item_attributes(self) -> hpfl.Attributes | None:
    """Return items' attributes and the weights that belong to each, if any."""
    return None

  def item_columns(self) -> np.ndarray | None:
    """Return public numbers of each item, `[items, width]`, if any."""
    return None

  def measure_models(self, models: Iterable[OwnModel]) -> dict[str, float]:
    """Evaluate clients' own models by metrics that need all of them.

    Args:
      models: The models of all clients of a part.

    Returns:
      Metrics by name, which are added to the others or replace them.
    """
    del models
    return {}

  def measured(
    self, evaluation: Evaluation, clients: EvaluationClients
  ) -> Evaluation:
    """Return an evaluation as the task measures its clients.

    Args:
      evaluation: The algorithm's evaluation, which measures examples by the
        model's metrics, and is returned by default.
      clients: The clients to evaluate.
    """
    del clients
    return evaluation

  @property
  def released(self) -> str:
    """The fingerprint of the task's noisy release; '' if there is none."""
    return ''

  def released_anew(self, release: Release) -> Self:
    """Make the task again with another release, without reading data again.

    Args:
      release: The options of the release.
    """
    raise NotImplementedError


class MeasuredByProtocol(Task):
  """The base of tasks whose protocol decides which clients are evaluated.

  Under SEEN each client comes with its past examples, and the query examples
  are marked in the field `is_query`.

  Attributes:
    protocol: UNSEEN or SEEN, the name of the test result.
  """

  protocol: str

  @property
  def validation(self) -> EvaluationClients:
    return self._evaluation_clients(VALIDATION)

  @property
  def tests(self) -> dict[str, EvaluationClients]:
    return {self.protocol: self._evaluation_clients(TEST)}

  def _evaluation_clients(self, part: str) -> EvaluationClients:
    if self.protocol == SEEN:
      return EvaluationClients(
        part, True, tff_partial.splits.by_mark('is_query')
      )
    return EvaluationClients(part, False)
