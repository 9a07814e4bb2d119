"""FedDyn (Acar et al., ICLR 2021), Algorithm 1: dynamic regularization.

Each client remembers the gradient of its loss where its last round ended, g_k,
zero at first. In a round it minimizes its loss plus
`alpha / 2 |w - x|^2 - <g_k, w>` from the received x, and then subtracts
`alpha (w - x)` from g_k. Where all clients end at the same w, their joint loss
is minimal. The server moves to the mean of the clients' w, minus `h / alpha`,
where h sums `-alpha (w - x)` of all clients that took part, over the number of
all clients.

The server holds `u = h / alpha`, so that it needs no alpha: `u += p d`, then
`x -= d + u`, for the mean d of `x - w` and the share p of clients in a round.

Deviations: p is `participation` in each round, also where clients fail; if none
counts, x stays. Batches and epochs are those of `training`; the paper minimizes
exactly.
"""

import collections
from typing import Any

import tensorflow as tf

from tff_partial import client_state
from tff_partial import tiers
from tff_partial.composition import Aggregation
from tff_partial.composition import compose
from tff_partial.composition import with_equal_weights
from tff_partial.contexts import ClientContext
from tff_partial.errors import SettingError
from tff_partial.model import models
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training
from tff_partial.terms import linear
from tff_partial.terms import proximal
from tff_partial.tiers import GLOBAL


def build_fed_dyn(
  model: models.PartialModel,
  *,
  penalty: float = 0.1,
  participation: float = 1.0,
  training: Phase = Phase(),
  aggregation: Aggregation = Aggregation(),
) -> PartialProcess:
  """Build FedDyn: train with a penalty that moves with clients' gradients.

  Args:
    model: The model, without local variables.
    penalty: alpha of the paper.
    participation: The share of all clients that take part in a round.
    training: How a client trains: optimizer, batches, epochs.
    aggregation: How the server aggregates updates; as in the paper, clients
      have equal weights by default.

  Example:
    >>> process = baselines.build_fed_dyn(
    ...   whole, penalty=0.01, participation=0.1
    ... )

  Raises:
    CompositionError, PhaseError, SettingError: If the arguments do not fit
      together.
  """
  if not penalty > 0.0:
    raise SettingError(
      f'penalty={penalty}: the server moves by a sum divided by the penalty, '
      'which must be positive. For no penalty, use FedAvg.'
    )
  if not 0.0 < participation <= 1.0:
    raise SettingError(
      f'participation={participation}: the share of clients in a round is more '
      'than 0, and at most 1.'
    )

  def renewed(client: ClientContext) -> tiers.NamedTensors:
    moved = tiers.delta(client.received[GLOBAL], client.weights[GLOBAL])
    return collections.OrderedDict(
      (name, own + penalty * moved[name])
      for name, own in client.remembered.items()
    )

  def against(client: ClientContext) -> tiers.NamedTensors:
    return tf.nest.map_structure(tf.negative, client.remembered)

  return compose(
    model,
    work=[
      partial_training.trained(training, proximal(penalty), linear(against))
    ],
    client_state=client_state.persist_slopes(renewed),
    aggregation=with_equal_weights(aggregation),
    server_optimizer=_Dynamic(participation),
  )


build_fed_dyn_eval = partial_training.build_evaluation


class _Dynamic(Optimizer):
  """The server's step, with `u` as its state."""

  def __init__(self, participation: float):
    self._participation = participation

  def initialize(self, specs: Any) -> Any:
    """Return zeros."""
    return tf.nest.map_structure(
      lambda spec: tf.zeros(spec.shape, spec.dtype), specs
    )

  def next(self, state: Any, weights: Any, gradients: Any) -> tuple[Any, Any]:
    """Add a share of the mean update, and move by it and by the whole sum."""
    total = tf.nest.map_structure(
      lambda u, d: u + self._participation * d, state, gradients
    )
    return total, tf.nest.map_structure(
      lambda x, d, u: x - d - u, weights, gradients, total
    )
