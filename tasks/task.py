"""What the binaries ask of a task, whatever it is about."""

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import os
from typing import (
  Any,
  ClassVar,
  NamedTuple,
  Protocol,
  runtime_checkable,
  TypeAlias,
)

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tasks.errors import OptionError
from tasks.options import option
from tasks.options import Options
from tff_partial import assignments
from tff_partial.algorithms import hpfl
from tff_partial.data import client_readers
from tff_partial.data import examples
from tff_partial.data import populations
from tff_partial.data import splits
from tff_partial.model import models

# Resident in memory, or read when their round comes.
Clients: TypeAlias = populations.Population | client_readers.Reader

# Parts of the data that every task has.
TRAIN, VALIDATION, TEST = 'train', 'validation', 'test'

# Where a model has what belongs to one user: at the user (local weights), as a
# row of a table at the server, or nowhere: all users share all of the model.
OWN, TABLE, NOBODY = 'own', 'table', 'nobody'
# FedEmbed's forms: the user's embedding, and with it heads of sub-populations
# at the server or a head at the user.
HEADS, OWN_HEAD = 'heads', 'own_head'
# PFedKM's forms: heads of clusters, and the centers of the gradients by which
# users join them: those of the whole model, or of a linear head.
CLUSTERS, HEAD_CLUSTERS = 'clusters', 'head_clusters'
# FedProto's form: nowhere, but the model has its features for an output, too.
FEATURES = 'features'
# The outputs of that model are these and its logits.
LOGITS = 'logits'
USER_FORMS = (
  OWN,
  TABLE,
  NOBODY,
  HEADS,
  OWN_HEAD,
  CLUSTERS,
  HEAD_CLUSTERS,
  FEATURES,
)


@dataclasses.dataclass(frozen=True)
class EvaluationClients:
  """Clients to measure.

  Attributes:
    part: The part of the data that they are measured on.
    seen: Whether they took part in training; they come with what they remember
      from there.
    split: Support and query set, where the protocol demands them; None leaves
      them to the algorithm.
  """

  part: str
  seen: bool
  split: splits.Split | None = None


# Whether those measured took part in training; results name them so.
UNSEEN, SEEN = 'unseen', 'seen'
PROTOCOLS = (UNSEEN, SEEN)


class MeasuredByProtocol:
  """What tasks have in common whose protocol says who is measured.

  Under SEEN each client comes with its past, and what is to be measured is
  marked in the field `is_query`.

  Attributes:
    protocol: UNSEEN or SEEN: under which name the test result is reported.
  """

  protocol: str

  @property
  def validation(self) -> EvaluationClients:
    """Who chooses the best round."""
    return self._examinees(VALIDATION)

  @property
  def tests(self) -> dict[str, EvaluationClients]:
    """The clients that a result is about."""
    return {self.protocol: self._examinees(TEST)}

  def _examinees(self, part: str) -> EvaluationClients:
    if self.protocol == SEEN:
      return EvaluationClients(part, True, splits.by_mark('is_query'))
    return EvaluationClients(part, False)


class KnowsUsers:
  """A task that knows something of its users by which to tell them apart.

  Attributes:
    attribute: What it knows, such as 'most used subreddit'.
    own_weights: Which of the weights that users remember are their vectors, as
      a regular expression over names; '' for all.
  """

  attribute: str
  own_weights = ''

  @property
  def attributes(self) -> dict[str, str]:
    """What is known of each user in training."""
    raise NotImplementedError

  def vectors_at_server(
    self, weights: tff.learning.models.ModelWeights
  ) -> dict[str, np.ndarray]:
    """The users' rows in a table at the server, if there is one.

    Args:
      weights: All that the server has.
    """
    del weights
    return {}


@runtime_checkable
class HasPredictors(Protocol):
  """A task with predictors that know labels alone, to compare with."""

  def from_labels_alone(
    self, num_support: int, num_reserved: int
  ) -> dict[str, dict[str, float]]:
    """Measures the predictors by the metric that selects the best round.

    Args:
      num_support: How many examples of each new user are known.
      num_reserved: New users are measured on what comes after so many.

    Returns:
      Predictor to the name of a test to the metric.
    """


class Task(Protocol):
  """Clients, their data, and the model that they train.

  Attributes:
    name: The task's name.
    selection_metric: The metric that chooses the best round.
    higher_is_better: Whether a larger value of it is better.
    learned_from_training: What is computed from the training data before
      training, without noise, such as a vocabulary. A private run takes it to
      be public, and says so.
  """

  name: str
  selection_metric: str
  higher_is_better: bool
  learned_from_training: tuple[str, ...]

  @property
  def counts(self) -> dict[str, Any]:
    """How much of everything there is, for the result."""

  @property
  def validation(self) -> EvaluationClients:
    """Who chooses the best round."""

  @property
  def tests(self) -> dict[str, EvaluationClients]:
    """The clients that a result is about, by the names that it gives them."""

  def model_with(self, user: str) -> models.PartialModel:
    """Build the model in one of `USER_FORMS`.

    Args:
      user: Where it has what belongs to one user.

    Raises:
      OptionError: If the task has no such form.
    """

  def clients(self, part: str, example_spec: examples.ExampleSpec) -> Clients:
    """Packs the clients of one part of the data."""


class Spent(NamedTuple):
  """What a task spends of a private run's privacy before the first round.

  Attributes:
    noise_multipliers: Of what is released once of all who take part.
    delta: With what probability that may fail; a part of the run's delta.
  """

  noise_multipliers: tuple[float, ...] = ()
  delta: float = 0.0


def _forget(drawn: Mapping[str, Any]) -> None:
  """Keep nothing of a release."""


class Release(NamedTuple):
  """How a task releases something of its users with noise: once.

  Attributes:
    noise_seed: Draws the noise; by default the operating system does.
    simulated_population: As if so many users took part; by default as many as
      do.
    kept: What was released before, as `keep` was given it. It is taken, and
      nothing is drawn. By default nothing was.
    keep: Is given what is drawn, as JSON can hold it, before anything is said
      of it. With None nothing may be drawn: something of the same form that
      follows from the options alone stands in, to check a run and to plan it.
      With `kept`, None is to take it whatever the data are now.
  """

  noise_seed: int | None = None
  simulated_population: int | None = None
  kept: Mapping[str, Any] | None = None
  keep: Callable[[Mapping[str, Any]], None] | None = _forget


@runtime_checkable
class Releases(Protocol):
  """Options of a task that may release something of its users with noise."""

  @property
  def spent(self) -> Spent:
    """What that costs."""

  def load(self, data: 'Data', seed: int, release: Release) -> 'Task':
    """Load the data and makes the task.

    Args:
      data: Where they come from.
      seed: The run's seed.
      release: How it is released.
    """


@runtime_checkable
class Released(Protocol):
  """A task that may have released something of its users with noise."""

  @property
  def released(self) -> str:
    """The fingerprint of what it released; empty if that is nothing."""

  def released_anew(self, release: Release) -> 'Task':
    """Make the task again with another release; reads no data again.

    Args:
      release: How it is released.
    """


REAL, SYNTHETIC = 'real', 'synthetic'


@dataclasses.dataclass(frozen=True)
class Data(Options):
  """Where data come from."""

  title: ClassVar[str] = 'Data and task'

  data: str = option(
    REAL,
    'Real data of the task, or invented data of the same form.',
    choices=(REAL, SYNTHETIC),
    is_common=True,
  )
  data_dir: str | None = option(
    os.environ.get('TFF_PARTIAL_DATA_DIR'),
    'Folder with a folder for each task. Default: $TFF_PARTIAL_DATA_DIR.',
    may_change=True,
    is_common=True,
  )
  download: bool = option(
    False,
    'Fetch the data from their official address into --data_dir if they are '
    'not there.',
    may_change=True,
    is_common=True,
  )

  @property
  def is_synthetic(self) -> bool:
    """Whether the data are invented, or come with a library."""
    return self.data == SYNTHETIC


class TaskOptions(Options, abc.ABC):
  """What can be chosen about a task, and how it is made.

  Attributes:
    name: What `--task` calls it.
  """

  name: ClassVar[str]

  @abc.abstractmethod
  def load(self, data: Data, seed: int) -> 'Task':
    """Load the data and makes the task.

    Args:
      data: Where they come from.
      seed: The run's seed.

    Raises:
      DataError: If the data are missing or damaged; says where and what to do.
      OptionError: If they cannot be divided as the options ask.
    """


@dataclasses.dataclass(frozen=True)
class Recommendation:
  """An item that a user is expected to like.

  Attributes:
    item_id: The item's number.
    title: What it is called.
    score: How much, as the task measures it.
  """

  item_id: int
  title: str
  score: float


@runtime_checkable
class Recommends(Protocol):
  """A task with items that users may not know yet."""

  def recommend(
    self, keras_model: Any, user_id: str, number: int
  ) -> list[Recommendation]:
    """Ranks the items that a user has not seen, the best first.

    Args:
      keras_model: The user's own model.
      user_id: The user.
      number: How many items to return.

    Raises:
      OptionError: If there is no such user, or fewer items to choose from.
    """


@runtime_checkable
class HasParts(Protocol):
  """A task whose model has the parts of FedEmbed's.

  Attributes:
    parts: How they are called.
  """

  parts: assignments.Parts


@runtime_checkable
class KeepsTables(Protocol):
  """A task whose clients have many users each, in tables of their own.

  Clients train and keep their tables, whatever algorithm joins what they share.
  Only where one client holds the examples of all, all users are in one table.
  """

  def kept_tables(self) -> Mapping[str, Sequence[int]]:
    """The tables of which drafts can be made, `[rows, width]`.

    Returns:
      The names of their variables to how many rows each client has.
    """


@runtime_checkable
class HasItemAttributes(Protocol):
  """A task whose clients know the same attributes of their items."""

  def item_attributes(self) -> hpfl.Attributes:
    """The attributes, and which weights belong to them."""


class OwnModel(NamedTuple):
  """A client's own model, and what it is measured on.

  Attributes:
    client: The client.
    keras_model: The model.
    examples: Its examples as its population has them, `[examples, ...]`.
  """

  client: str
  keras_model: tf.keras.Model
  examples: Mapping[str, Any]


@runtime_checkable
class MeasuresModels(Protocol):
  """A task that measures what takes the models of all clients together."""

  def measure_models(self, models: Iterable[OwnModel]) -> dict[str, float]:
    """Measures clients' own models.

    Args:
      models: Those of all clients of a part.

    Returns:
      Metrics by name, which join the others, or take their place.
    """


@runtime_checkable
class KnowsAllOf(Protocol):
  """A task that divides what a user has done among several parts."""

  def all_of(
    self, user_id: str, example_spec: examples.ExampleSpec
  ) -> populations.Population:
    """Packs one user with all its examples, whatever part they are in.

    Raises:
      OptionError: If there is no such user.
    """


def one_user(
  task: Task, user_id: str, example_spec: examples.ExampleSpec
) -> Clients:
  """Find the clients among which a user is.

  Args:
    task: The task.
    user_id: The user.
    example_spec: What is read of an example.

  Raises:
    OptionError: If there is no such user.
  """
  if isinstance(task, KnowsAllOf):
    return task.all_of(user_id, example_spec)
  for part in (TRAIN, VALIDATION, TEST):
    clients = task.clients(part, example_spec)
    if user_id in clients.client_ids:
      return clients
  raise OptionError(
    f'--user={user_id}: there is no user {user_id!r} in any part of the data; '
    f'users are called like {clients.client_ids[0]!r}.'
  )
