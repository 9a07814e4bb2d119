"""MOON (Li, He and Song, CVPR 2021), Algorithm 1: model-contrastive learning.

A client keeps the features of each example near those of the received model and
far from those of its own model as it was after its last round:
`-log(e^(cos(z, z_received) / tau) / (e^(cos(z, z_received) / tau) +
e^(cos(z, z_own) / tau)))`, Eq. 3, times mu beside its loss. In its first round
its own model is the received one, so that the term moves nothing.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tff_partial import client_state
from tff_partial import tiers
from tff_partial.composition import Aggregation
from tff_partial.composition import compose
from tff_partial.contexts import batch_of
from tff_partial.contexts import ClientContext
from tff_partial.errors import SettingError
from tff_partial.model import models
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training


def build_moon(
  model: models.PartialModel,
  *,
  features: Callable[[Any], tf.Tensor],
  penalty: float = 1.0,
  temperature: float = 0.5,
  training: Phase = Phase(),
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
) -> PartialProcess:
  """Build MOON: train the global weights, with features near the received ones.

  Args:
    model: The model, without local variables.
    features: (a batch of the model's outputs) -> float features
      `[batch, size]`.
    penalty: mu of the paper; 0 for FedAvg.
    temperature: tau of the paper.
    training: How a client trains: optimizer, batches, epochs.
    aggregation: How the server aggregates updates.
    server_optimizer: Applies aggregated updates; SGD with rate 1 by default.

  Example:
    >>> process = baselines.build_moon(
    ...   named, features=lambda outputs: outputs['features']
    ... )

  Raises:
    CompositionError, PhaseError, SettingError: If the arguments do not fit
      together.
  """
  if not 0.0 <= penalty < float('inf') or not temperature > 0.0:
    raise SettingError(
      f'penalty={penalty}, temperature={temperature}: the penalty must be a '
      'finite number of 0 or more, the temperature positive.'
    )

  def contrast(client: ClientContext) -> tf.Tensor:
    batch = batch_of(client)
    now = features(batch.predictions)

    def likeness(weights: tiers.Weights) -> tf.Tensor:
      outputs, _ = client.model.predict(
        weights, client.frozen, batch.x, training=False, seed=client.seed
      )
      other = tf.stop_gradient(features(outputs))
      return -tf.keras.losses.cosine_similarity(now, other) / temperature

    received = likeness(tiers.server_and_local_weights(client.received))
    own = likeness(tiers.personal_copy(client.received))
    return penalty * batch.mean(tf.nn.softplus(own - received))

  return compose(
    model,
    work=[partial_training.trained(training, contrast)],
    client_state=client_state.persist_trained,
    aggregation=aggregation,
    server_optimizer=server_optimizer,
  )


build_moon_eval = partial_training.build_evaluation
