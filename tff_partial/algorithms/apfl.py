"""APFL (Deng et al., 2020), Algorithm 1: personal models are mixtures.

A client remembers a personal model, v, in addition to the global one, w, and
uses the mixture alpha v + (1 - alpha) w. On each batch it takes a step on v by
the gradient of the mixture's loss, and one on w by that of w's own loss; the
server averages the w. An adaptive alpha (Eq. 10) is a number that each client
learns along with v, by the same gradient, and remembers.

Deviations: v starts from the first w that the client receives. An adaptive
alpha takes a step on each batch, and is clipped to [0, 1]. Clients are weighted
by their examples unless `client_weighting` says otherwise.
"""

import tensorflow as tf

from tff_partial import client_state
from tff_partial import evaluation
from tff_partial import tiers
from tff_partial.composition import Aggregation
from tff_partial.composition import compose
from tff_partial.data import splits
from tff_partial.errors import SettingError
from tff_partial.model import models
from tff_partial.phases import changed
from tff_partial.phases import Interleaved
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.processes import PartialProcess
from tff_partial.templates import server_optimizers
from tff_partial.tiers import CLIENT_VALUES
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import PERSONAL

_ALPHA = 'alpha'


def build_apfl(
  model: models.PartialModel,
  *,
  mixture: float = 0.5,
  mixture_learning_rate: float = 0.0,
  training: Phase = Phase(),
  personal: Phase | None = None,
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
) -> PartialProcess:
  """Build APFL: train the global model and a personal model mixed with it.

  Metrics of training are those of the mixture before each batch.

  Args:
    model: The model, without local variables.
    mixture: alpha of the paper, v's share, from 0 to 1; its first if learned.
    mixture_learning_rate: Rate of plain gradient descent on alpha, which
      `personal.rate_factor` scales, too; 0 for a fixed one.
    training: How w is trained: optimizer, batches, epochs.
    personal: How v is trained, on the same batches; like w by default.
    aggregation: How the server aggregates updates.
    server_optimizer: Applies aggregated updates; SGD with rate 1 by default.

  Example:
    >>> process = algorithms.build_apfl(whole, mixture=0.5)

  Raises:
    CompositionError, PhaseError, SettingError: If the arguments do not fit
      together.
  """
  adaptive = mixture_learning_rate > 0.0
  personal = changed(personal or training)
  optimizer = {
    PERSONAL: personal.optimizer_of(PERSONAL),
    CLIENT_VALUES: server_optimizers.WithinUnit(sgd(mixture_learning_rate)),
  }
  return compose(
    model,
    client_state=_memory(mixture, adaptive),
    work=[
      Interleaved(
        (
          changed(
            personal,
            train=(PERSONAL, CLIENT_VALUES) if adaptive else (PERSONAL,),
            optimizer=optimizer,
            weights_fn=_weights_fn(mixture, adaptive),
            variable_filter=personal.variable_filter
            and f'{personal.variable_filter}|{_ALPHA}',
            measured=True,
          ),
          changed(
            training,
            train=(GLOBAL,),
            weights_fn=tiers.server_and_local_weights,
            measured=False,
          ),
        )
      )
    ],
    aggregation=aggregation,
    server_optimizer=server_optimizer,
  )


def build_apfl_eval(
  model: models.PartialModel,
  *,
  mixture: float = 0.5,
  mixture_learning_rate: float = 0.0,
  personalise: Phase | None = None,
  split: splits.Split | None = None,
) -> evaluation.Evaluation:
  """Build an evaluation with the mixture of w and the v that clients remember.

  With `personalise`, which new clients need, they first train v through the
  mixture, with alpha fixed.

  Args:
    model: The model.
    mixture: alpha of the paper, as in training.
    mixture_learning_rate: As in training; if it is not 0, alpha is the number
      that each client has learned.
    personalise: How clients train v before they are measured; not at all by
      default.
    split: As for `evaluation.build_query_evaluation`.

  Example:
    >>> evaluation = algorithms.build_apfl_eval(whole, mixture=0.5)
  """
  adaptive = mixture_learning_rate > 0.0
  return evaluation.build_query_evaluation(
    model,
    client_state=_memory(mixture, adaptive),
    train=(PERSONAL,),
    weights_fn=_weights_fn(mixture, adaptive),
    personalise=personalise,
    split=split,
  )


def _memory(mixture: float, adaptive: bool) -> client_state.ClientState:
  if not 0.0 <= mixture <= 1.0:
    raise SettingError(
      f'mixture={mixture}: the personal share lies between 0 and 1.'
    )
  if not adaptive:
    return client_state.persist_personal
  return client_state.persist_numbers(
    client_state.persist_personal, lambda model: {_ALPHA: float(mixture)}
  )


def _weights_fn(mixture: float, adaptive: bool) -> tiers.WeightsFn:
  """Return the function to the mixture that the model reads."""

  def share(weights: tiers.Weights) -> tf.Tensor:
    if adaptive:
      return weights[CLIENT_VALUES][_ALPHA]
    return tf.constant(float(mixture))

  return tiers.mixed(share)
