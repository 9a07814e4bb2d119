"""FedAdam and FedYogi (Reddi et al., ICLR 2021), Algorithm 2.

`rule` chooses one of two rules. `PAPER` is the algorithm as printed: the server
moves weights by

    eta m / (sqrt(v) + tau),

where v is initialized to tau squared and moments have no bias correction.

`TFF`, the default, uses TFF's optimizers, which correct the bias of both
moments:

    eta sqrt(1 - beta_2^t) / (1 - beta_1^t) m / (sqrt(v) + tau).

So tau is outside the correction. Relative to the corrected second moment it
counts as `tau / sqrt(1 - beta_2^t)`: with beta_2 = .99 ten times as much in
round 1, 1.6 times in round 50. The second moment of TFF's Adam is initialized
to zero. If updates are large relative to tau, both rules take steps of about
eta, the printed one of at most eta; a tau tuned for one rule does not carry
over to the other.
"""

import collections
import math
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.composition import Aggregation
from tff_partial.errors import SettingError
from tff_partial.model import models
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training

# TFF's optimizers, or the algorithm as printed.
TFF, PAPER = 'tff', 'paper'


def build_fed_adam(
  model: models.PartialModel,
  *,
  training: Phase = Phase(),
  server_learning_rate: float = 0.01,
  beta_1: float = 0.9,
  beta_2: float = 0.99,
  tau: float = 1e-3,
  rule: str = TFF,
  aggregation: Aggregation = Aggregation(),
) -> PartialProcess:
  """Build FedAdam: the server applies Adam to the mean update.

  Args:
    model: The model, without local variables.
    training: How a client trains: optimizer, batches, epochs.
    server_learning_rate: eta of the paper, at the server.
    beta_1: Decay of the first moment.
    beta_2: Decay of the second moment.
    tau: Degree of adaptivity; with `TFF` outside the bias correction.
    rule: `TFF`, or `PAPER` for the algorithm as printed.
    aggregation: How the server aggregates updates.

  Example:
    >>> process = baselines.build_fed_adam(whole, server_learning_rate=0.01)

  Raises:
    CompositionError, PhaseError, SettingError: If the arguments do not fit
      together.
  """
  numbers = server_learning_rate, beta_1, beta_2, tau
  return partial_training.build_global(
    model,
    training=training,
    aggregation=aggregation,
    server_optimizer=_server(False, rule, *numbers),
  )


def build_fed_yogi(
  model: models.PartialModel,
  *,
  training: Phase = Phase(),
  server_learning_rate: float = 0.01,
  beta_1: float = 0.9,
  beta_2: float = 0.99,
  tau: float = 1e-3,
  rule: str = TFF,
  aggregation: Aggregation = Aggregation(),
) -> PartialProcess:
  """Build FedYogi: the server applies Yogi to the mean update.

  Args:
    model: The model, without local variables.
    training: How a client trains: optimizer, batches, epochs.
    server_learning_rate: eta of the paper, at the server.
    beta_1, beta_2, tau, rule, aggregation: As for `build_fed_adam`; the second
      moment is initialized to `tau` squared.

  Example:
    >>> process = baselines.build_fed_yogi(whole, server_learning_rate=0.01)

  Raises:
    CompositionError, PhaseError, SettingError: If the arguments do not fit
      together.
  """
  numbers = server_learning_rate, beta_1, beta_2, tau
  return partial_training.build_global(
    model,
    training=training,
    aggregation=aggregation,
    server_optimizer=_server(True, rule, *numbers),
  )


build_fed_adam_eval = build_fed_yogi_eval = partial_training.build_evaluation


def _server(is_yogi: bool, rule: str, *numbers: float) -> Optimizer:
  """Return the server's optimizer by its rule, rates and tau."""
  *_, tau = numbers
  if rule not in (TFF, PAPER):
    raise SettingError(f'rule={rule!r} is none of {[TFF, PAPER]}.')
  if not 0.0 < tau < math.inf:
    raise SettingError(
      f'tau={tau}: give a positive, finite number. With 0, a weight that never '
      'moved would be divided by 0.'
    )
  builders = tff.learning.optimizers
  if is_yogi:
    found = builders.build_yogi(*numbers, initial_preconditioner_value=tau**2)
  else:
    found = builders.build_adam(*numbers)  # Which checks the numbers.
  return _AsPrinted(is_yogi, *numbers) if rule == PAPER else found


_RATE = tff.learning.optimizers.LEARNING_RATE_KEY
_FIRST, _SECOND = 'first_moment', 'second_moment'


class _AsPrinted(Optimizer):
  """Server optimizer of lines 12 to 16 of Algorithm 2, for Adam or Yogi."""

  def __init__(
    self,
    is_yogi: bool,
    learning_rate: float,
    beta_1: float,
    beta_2: float,
    tau: float,
  ):
    self._is_yogi = is_yogi
    self._learning_rate = learning_rate
    self._beta_1, self._beta_2, self._tau = beta_1, beta_2, tau

  def initialize(self, specs: Any) -> Any:
    """Return the learning rate and both moments."""

    def filled(value: float) -> Any:
      return tf.nest.map_structure(
        lambda spec: tf.fill(spec.shape, tf.cast(value, spec.dtype)), specs
      )

    return collections.OrderedDict(
      {
        _RATE: self._learning_rate,
        _FIRST: filled(0.0),
        _SECOND: filled(self._tau**2),
      }
    )

  def next(self, state: Any, weights: Any, gradients: Any) -> tuple[Any, Any]:
    """Move weights against the mean update, used as a gradient."""

    def first(moment: tf.Tensor, slope: tf.Tensor) -> tf.Tensor:
      return self._beta_1 * moment + (1.0 - self._beta_1) * slope

    def second(moment: tf.Tensor, slope: tf.Tensor) -> tf.Tensor:
      square = tf.square(slope)
      if self._is_yogi:
        sign = tf.sign(moment - square)
        return moment - (1.0 - self._beta_2) * square * sign
      return self._beta_2 * moment + (1.0 - self._beta_2) * square

    def moved(w: tf.Tensor, m: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
      rate = tf.cast(state[_RATE], w.dtype)
      return w - rate * m / (tf.sqrt(v) + self._tau)

    one = tf.nest.map_structure(first, state[_FIRST], gradients)
    two = tf.nest.map_structure(second, state[_SECOND], gradients)
    after = collections.OrderedDict(
      {_RATE: state[_RATE], _FIRST: one, _SECOND: two}
    )
    return after, tf.nest.map_structure(moved, weights, one, two)
