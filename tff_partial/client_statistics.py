"""Statistics that clients send besides their update, and their use.

A statistic is computed by each client, aggregated over the cohort, and used by
the server, to update its state or the weights, or by the clients, to settle
their own state. Examples are the control variates of SCAFFOLD, the prototypes
of FedProto, the numbers of examples in FURL's Eq. 6, and the moves between
sub-populations that FedEmbed's heads follow.

`join` also determines privacy: statistics joined `WITH_UPDATE` are clipped,
noised and accounted for like the update; with a mechanism that adds noise, all
others are refused.
"""

import collections
from collections.abc import Callable, Mapping
import enum
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tff_partial import aggregators
from tff_partial import tiers
from tff_partial.contexts import ClientContext
from tff_partial.contexts import outcome_of
from tff_partial.errors import SettingError


class Join(enum.Enum):
  """Aggregations of a statistic over the cohort.

  Attributes:
    SUM: A sum.
    WITH_UPDATE: The process's aggregator, as one more part of the update and
      with the same weights. The statistic must be a mapping of named floats.
  """

  SUM = 'sum'
  WITH_UPDATE = 'with update'


class Server(NamedTuple):
  """The server's weights and state.

  Attributes:
    weights: Trainable weights by tier, named tensors.
    state: The process's server state; None if it has none.
  """

  weights: tiers.Weights
  state: Any

  def with_solved(
    self, solved: Mapping[str, Any], state: Any, is_solved: tf.Tensor
  ) -> 'Server':
    """Return the server with another state and some other GLOBAL weights.

    Args:
      solved: The weights by name, of any float type.
      state: The state.
      is_solved: bool scalar; if false, weights do not change.
    """
    weights = collections.OrderedDict(self.weights[tiers.GLOBAL])
    for name, value in solved.items():
      value = tf.cast(value, weights[name].dtype)
      weights[name] = tf.where(is_solved, value, weights[name])
    return Server(
      collections.OrderedDict(self.weights, **{tiers.GLOBAL: weights}), state
    )


def check_memory(memory: float) -> None:
  """Check the weight of sums of earlier rounds.

  Args:
    memory: The weight, from 0, for cohorts of all clients, to less than 1.
  """
  if not 0 <= memory < 1:
    raise SettingError(
      f'memory={memory}: expected at least 0 and less than 1, about the share '
      'of clients that are not in a round.'
    )


# (a client's state before the round, after its work, its own statistic, the
# aggregated statistic) -> its new state.
UpdateClientState: TypeAlias = Callable[[Any, Any, Any, Any], Any]


class Statistic(NamedTuple):
  """A value that clients send besides their update.

  Attributes:
    name: Its name, unique in a process; not that of a tier.
    summarize: (a client's context, with the outcome of its work) -> a structure
      of tensors. A client that does not count, or has the weight zero, sends
      zeros instead.
    join: How it is aggregated: SUM, WITH_UPDATE, or any unweighted factory of
      `tff.aggregators`.
    update: (the server's weights and state, the aggregated statistic) -> the
      new ones. Statistics update one after another, after the server's
      optimizer.
    update_client_state: How it determines clients' state; the aggregated
      statistic is then sent back to all clients of the cohort.
    after_update: True if clients compute it from the updated weights, in a
      second exchange of the round.
  """

  name: str
  summarize: Callable[[ClientContext], Any]
  join: Join | aggregators.Factory = Join.SUM
  update: Callable[[Server, Any], Server] | None = None
  update_client_state: UpdateClientState | None = None
  after_update: bool = False


def of_computed(
  name: str, update: Callable[[Server, Any], Server]
) -> Statistic:
  """Return the statistic of what clients computed; see `contexts.Compute`.

  Args:
    name: The name of both.
    update: As for `Statistic`.
  """
  return Statistic(name, lambda client: client.computed[name], update=update)


def _share_of_step(before: Any, after: Any, own: Any, total: Any) -> Any:
  share = tf.math.divide_no_nan(own, total)
  return tf.nest.map_structure(
    lambda old, new: old + tf.cast(share, old.dtype) * (new - old),
    before,
    after,
  )


# Eq. 6 of FURL: a client keeps only a fraction of its own step, its share of
# the cohort's examples, as plain FedAvg over all users' rows does.
SCALED_BY_SHARE = Statistic(
  'weight',
  summarize=lambda client: outcome_of(client).weight,
  update_client_state=_share_of_step,
)

# The clients' weights by group, float32 `[K]`; see `groups.members_mean`.
MEMBERS = Statistic(
  'members',
  summarize=lambda client: (
    tf.one_hot(client.group, client.model.num_groups)
    * outcome_of(client).weight
  ),
)
