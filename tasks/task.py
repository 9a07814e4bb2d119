"""What the binaries ask of a task, whatever it is about."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tensorflow_federated as tff

from tasks.errors import OptionError
from tff_partial.data import examples
from tff_partial.data import populations
from tff_partial.data import splits
from tff_partial.model import models

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
    """Whom a result is about."""
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
    """Whom a result is about, by the names that it gives them."""

  def model_with(self, user: str) -> models.PartialModel:
    """Builds the model in one of `USER_FORMS`.

    Args:
      user: Where it has what belongs to one user.

    Raises:
      OptionError: If the task has no such form.
    """

  def clients(
    self, part: str, example_spec: examples.ExampleSpec
  ) -> populations.Population:
    """Packs the clients of one part of the data."""


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
) -> populations.Population:
  """Finds the clients among which a user is.

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
