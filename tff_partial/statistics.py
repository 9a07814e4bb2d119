"""What clients send beside their update, and what becomes of it.

A statistic is computed by each client, joined over the cohort, and read by the
server, which moves its state or the weights by it, or by the clients, which
decide by it what they keep. Examples are the control variates of SCAFFOLD, the
prototypes of FedProto, the examples counted by FURL's Eq. 6, and the moves
between sub-populations that FedEmbed's heads follow.

It is also the one place where what is sent beside updates meets privacy: what
is joined `WITH_UPDATE` is clipped, noised and paid for as the update is; next
to a mechanism that adds noise, anything else is refused.
"""

from collections.abc import Callable
import enum
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tff_partial import aggregators
from tff_partial import tiers
from tff_partial.contexts import ClientContext
from tff_partial.contexts import outcome_of


class Join(enum.Enum):
  """How a statistic is joined over the cohort.

  Attributes:
    SUM: It is added up.
    WITH_UPDATE: By the process's aggregator, as one more part of what clients
      send, and weighted as that is. It must be a mapping of named floats.
  """

  SUM = 'sum'
  WITH_UPDATE = 'with update'


class Server(NamedTuple):
  """What the server holds.

  Attributes:
    weights: Trainable weights by tier, named tensors.
    state: The process's server state; None if it has none.
  """

  weights: tiers.Weights
  state: Any


# What a client remembers: (before the round, after its work, what it sent
# itself, what all have sent, joined) -> to be remembered.
Settle: TypeAlias = Callable[[Any, Any, Any, Any], Any]


class Statistic(NamedTuple):
  """What clients send beside their update.

  Attributes:
    name: Its name among others of a process; that of no tier.
    summarize: (what a client knows, with the outcome of its work) -> a
      structure of tensors. A client that does not count sends zeros instead.
    join: How it is joined: SUM, WITH_UPDATE, or any unweighted factory of
      `tff.aggregators`.
    update: (what the server holds, the joined statistic) -> what it holds then.
      Statistics update one after another, after the server's optimizer.
    settle: How it decides what clients remember; it is then sent back to all
      clients of the cohort.
    after_update: Whether clients compute it by the updated weights, in a second
      trip of the round.
  """

  name: str
  summarize: Callable[[ClientContext], Any]
  join: Join | aggregators.Factory = Join.SUM
  update: Callable[[Server, Any], Server] | None = None
  settle: Settle | None = None
  after_update: bool = False


def _share_of_step(before: Any, after: Any, own: Any, total: Any) -> Any:
  share = tf.math.divide_no_nan(own, total)
  return tf.nest.map_structure(
    lambda old, new: old + tf.cast(share, old.dtype) * (new - old),
    before,
    after,
  )


# Eq. 6 of FURL: a client keeps only that share of its own step which is its
# share of the cohort's examples, as plain FedAvg over all users' rows does.
SCALED_BY_SHARE = Statistic(
  'weight',
  summarize=lambda client: outcome_of(client).weight,
  settle=_share_of_step,
)

# The clients' weights by group, float32 `[K]`; see `groups.members_mean`.
MEMBERS = Statistic(
  'members',
  summarize=lambda client: (
    tf.one_hot(client.group, client.model.num_groups)
    * outcome_of(client).weight
  ),
)
