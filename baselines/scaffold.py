"""SCAFFOLD (Karimireddy et al., ICML 2020), Algorithm 1.

The server holds a control variate c, and each client remembers its own, c_i. In
each local step a client adds c - c_i to its gradient, so that it drifts less to
its own optimum. After K steps of rate eta from x to y its new c_i is the
gradient of the examples that it trains on at x (option I), or c_i - c +
(x - y) / (K eta) (option II). The server sums the changes of the cohort's c_i,
and moves c by that sum divided by the number of all clients. All control
variates are initialized to zero.

Deviations: a client without examples, of weight zero, or whose update is not
finite keeps its c_i. Batches are those of `training`.
"""

import collections
import functools

import tensorflow as tf

from tff_partial import client_state
from tff_partial import client_statistics
from tff_partial import tiers
from tff_partial.arguments import checked_numbers
from tff_partial.arguments import optimizers
from tff_partial.composition import Aggregation
from tff_partial.composition import compose
from tff_partial.composition import with_equal_weights
from tff_partial.contexts import ClientContext
from tff_partial.contexts import Compute
from tff_partial.contexts import outcome_of
from tff_partial.errors import SettingError
from tff_partial.model import models
from tff_partial.phases import changed
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training
from tff_partial.terms import linear
from tff_partial.tiers import GLOBAL

# Key of control variates at the server, at clients and in statistics.
_CONTROL = 'control'


def build_scaffold(
  model: models.PartialModel,
  *,
  num_clients: int,
  option: int = 2,
  training: Phase = Phase(),
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
) -> PartialProcess:
  """Build SCAFFOLD: train with a correction of clients' drift.

  Args:
    model: The model, without local variables.
    num_clients: N of the paper, the number of all clients.
    option: 1 or 2: the update of control variates. Option 1 needs one more pass
      over all examples.
    training: How a client trains: SGD with the rate eta_l of the paper, batches
      and epochs.
    aggregation: How the server aggregates updates; as in the paper, clients
      have equal weights by default.
    server_optimizer: Applies aggregated updates; eta_g is its rate, 1 by
      default.

  Example:
    >>> process = baselines.build_scaffold(whole, num_clients=100)

  Raises:
    CompositionError, PhaseError, SettingError: If the arguments do not fit
      together.
  """
  _check(num_clients, option, training)
  rate = optimizers.rate_of(training.optimizer_of(GLOBAL))
  renewed = functools.partial(_renewed, rate, option)
  controls = client_statistics.Statistic(
    _CONTROL,
    summarize=lambda client: tiers.delta(renewed(client), client.remembered),
    update=functools.partial(_moved, num_clients),
  )
  correction = linear(
    lambda client: tiers.delta(client.server, client.remembered)
  )
  # Before the client moves, at the x that it received.
  gradients = Compute(
    _CONTROL, lambda client: client.gradients(loss=training.loss), training.on
  )
  return compose(
    model,
    work=[
      *([gradients] if option == 1 else []),
      partial_training.trained(training, correction),
    ],
    client_state=client_state.persist_slopes(renewed),
    statistics=[controls],
    server_state=client_state.zeros_of_global,
    aggregation=with_equal_weights(aggregation),
    server_optimizer=server_optimizer,
  )


build_scaffold_eval = partial_training.build_evaluation


def _check(num_clients: int, option: int, training: Phase) -> None:
  if option not in (1, 2):
    raise SettingError(f'option={option}: the paper has the options 1 and 2.')
  checked_numbers.check_whole(SettingError, 1, num_clients=num_clients)
  optimizer = changed(training).optimizer_of(GLOBAL)
  if not (
    optimizers.is_plain_descent(optimizer)
    and optimizers.rate_of(optimizer) > 0.0
  ):
    raise SettingError(
      'training.optimizer: clients take plain steps of a positive rate, which '
      'control variates correct. Give `sgd(rate)`.'
    )
  if option == 2 and training.rate_factor != 1.0:
    raise SettingError(
      'rate_factor: option 2 divides by the rate of the steps, that of '
      '`training.optimizer`. Give that rate itself, or take option 1.'
    )


def _moved(
  num_clients: int,
  server: client_statistics.Server,
  changes: tiers.NamedTensors,
) -> client_statistics.Server:
  """Return the server with c moved by the sum of clients' changes over N."""
  state = collections.OrderedDict(
    (name, c + changes[name] / tf.cast(num_clients, c.dtype))
    for name, c in server.state.items()
  )
  return server._replace(state=state)


def _renewed(
  rate: float, option: int, client: ClientContext
) -> tiers.NamedTensors:
  """Return the client's new control variate."""
  steps = outcome_of(client).num_steps[GLOBAL]
  if option == 1:
    found = client.computed[_CONTROL]
  else:
    moved = tiers.delta(client.received[GLOBAL], client.weights[GLOBAL])
    way = rate * tf.cast(steps, tf.float32)
    found = tf.nest.map_structure(
      lambda own, shared, moved: (
        own - shared + tf.math.divide_no_nan(moved, tf.cast(way, moved.dtype))
      ),
      client.remembered,
      client.server,
      moved,
    )
  is_new = (steps > 0) & (outcome_of(client).weight > 0.0)
  return tf.nest.map_structure(
    lambda new, old: tf.where(is_new, new, old), found, client.remembered
  )
