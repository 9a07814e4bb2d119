"""FedDBE (Zhang et al., NeurIPS 2023): the domain bias eliminator in FedAvg.

Lower layers map an input to its features z. A client adds a vector of its own,
zero at first, to z before the head, and trains it with all other weights: the
personalized representation bias memory, which absorbs what is particular to
its data. Mean regularization keeps the features' mean over its examples near
the consensus, the mean over all clients: beside its loss it minimizes

    kappa / 2 mean_j (mean of z_j - consensus_j)^2

over features j, for each batch, which is the momentum of 1 in the authors' run
on images. Examples count by their weights. The consensus does not change once
it is known.

Deviations: the consensus is collected in the first rounds, from the clients
that take part in them, while they train without this term; the paper has all
clients train once before. It is the mean over their examples after they
trained, where the paper's is one of batches while they train. The vector is
trained in these rounds, too.
"""

import collections
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tff_partial import client_state
from tff_partial.client_statistics import of_computed
from tff_partial.client_statistics import Server
from tff_partial.composition import Aggregation
from tff_partial.composition import compose
from tff_partial.contexts import batch_of
from tff_partial.contexts import ClientContext
from tff_partial.contexts import Compute
from tff_partial.contexts import weights_of_examples
from tff_partial.errors import SettingError
from tff_partial.model import models
from tff_partial.model import outputs as outputs_lib
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import LOCAL


def build_fed_dbe(
  model: models.PartialModel,
  *,
  features: Callable[[Any], tf.Tensor],
  penalty: float = 50.0,
  collecting_rounds: int = 1,
  training: Phase = Phase(),
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
) -> PartialProcess:
  """Build FedDBE: train with a vector per client, and features near a mean.

  Args:
    model: The model, with the vector as its local variable, such as
      `z + layers.PrivateVector(size, initializer='zeros')(z)`.
    features: (a batch of the model's outputs) -> the features z, float
      `[batch, size]`, without the vector.
    penalty: kappa of the paper; 0 for the vector alone.
    collecting_rounds: Number of rounds whose clients form the consensus.
    training: How a client trains: batches, epochs, and an optimizer, or one for
      each of 'global' and 'local' (the vector).
    aggregation: How the server aggregates updates.
    server_optimizer: Applies aggregated updates; SGD with rate 1 by default.

  Example:
    >>> process = baselines.build_fed_dbe(
    ...   shifted, features=lambda outputs: outputs['features']
    ... )

  Raises:
    CompositionError, PhaseError, SettingError: If the arguments do not fit
      together.
  """
  if not 0.0 <= penalty < float('inf') or not collecting_rounds >= 1:
    raise SettingError(
      f'penalty={penalty}, collecting_rounds={collecting_rounds}: the penalty '
      'must be a finite number of 0 or more, and there must be a round.'
    )
  if LOCAL not in model.tiers:
    raise SettingError(
      "The model has no local variable, which would be the client's vector. "
      'Add a `layers.PrivateVector` to its features, and name it in `local`.'
    )
  size = outputs_lib.num_features(model.prediction_spec, features)

  def near_consensus(client: ClientContext) -> tf.Tensor:
    batch, server = batch_of(client), client.server
    found = _total(features(batch.predictions), batch.example_weights)
    distances = tf.math.squared_difference(_mean(found), _mean(server))
    return tf.where(
      _is_collecting(server), 0.0, penalty / 2.0 * tf.reduce_mean(distances)
    )

  def summed(client: ClientContext) -> Any:
    weights = weights_of_examples(client.example_weights)
    found = _total(features(client.predict(by_own_moments=True)), weights)
    return tf.nest.map_structure(
      lambda t: tf.where(_is_collecting(client.server), t, 0.0), found
    )

  return compose(
    model,
    client_state=client_state.persist_local,
    work=[
      partial_training.trained(training, near_consensus, train=(GLOBAL, LOCAL)),
      Compute('features', summed, training.on),
    ],
    statistics=[of_computed('features', _collected)],
    server_state=lambda model: collections.OrderedDict(
      sum=tf.zeros([size]),
      count=tf.constant(0.0),
      rounds_left=tf.constant(collecting_rounds),
    ),
    aggregation=aggregation,
    server_optimizer=server_optimizer,
  )


def _is_collecting(server: Any) -> tf.Tensor:
  """Return True until the consensus is known."""
  return tf.logical_or(server['rounds_left'] > 0, server['count'] <= 0.0)


def _collected(server: Server, joined: Any) -> Server:
  """Return the server with what a cohort sent, which is zero in the end."""
  state = collections.OrderedDict(
    (name, server.state[name] + value) for name, value in joined.items()
  )
  state['rounds_left'] = tf.maximum(server.state['rounds_left'] - 1, 0)
  return server._replace(state=state)


def _total(values: tf.Tensor, weights: tf.Tensor) -> Any:
  """Return the weighted sum of examples' features, and that of weights."""
  values = tf.cast(values, tf.float32) * weights[:, tf.newaxis]
  return collections.OrderedDict(
    sum=tf.reduce_sum(values, 0), count=tf.reduce_sum(weights)
  )


def _mean(total: Any) -> tf.Tensor:
  """Return the mean of features; zeros of none."""
  return tf.math.divide_no_nan(total['sum'], total['count'])


build_fed_dbe_eval = partial_training.build_evaluation
