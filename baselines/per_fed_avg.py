"""Per-FedAvg (Fallah et al., NeurIPS 2020), Algorithm 1: weights to start from.

Clients minimize the loss that weights w have after one step of their own, from
w to `v = w - alpha g(w)`. A local step of rate beta moves w against
`(I - alpha H(w)) g(v)`. First order (FO) leaves out the Hessian H; Hessian-free
(HF) approximates its product with g(v) by a difference of gradients,
`(g(w + delta g(v)) - g(w - delta g(v))) / (2 delta)` (section 5).

Deviations: of a batch, examples at even places give g(w) and H, the others
g(v), where the paper draws separate batches; a batch of one example gives both.
Clients are weighted by their examples unless `client_weighting` says otherwise.
Metrics of training are those of the w that a client ends with.
"""

import collections
from collections.abc import Callable
import functools

import tensorflow as tf

from tff_partial import evaluation
from tff_partial import tiers
from tff_partial.composition import Aggregation
from tff_partial.composition import compose
from tff_partial.contexts import batch_of
from tff_partial.contexts import ClientContext
from tff_partial.data import splits
from tff_partial.errors import SettingError
from tff_partial.model import losses
from tff_partial.model import models
from tff_partial.phases import changed
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.processes import PartialProcess
from tff_partial.tiers import GLOBAL


def build_per_fed_avg(
  model: models.PartialModel,
  *,
  adaptation_rate: float = 0.01,
  hessian_free: bool = False,
  delta: float = 1e-3,
  training: Phase = Phase(),
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
) -> PartialProcess:
  """Build Per-FedAvg: train weights that a client's own step improves most.

  Args:
    model: The model, without local variables.
    adaptation_rate: alpha of the paper, the rate of the client's own step.
    hessian_free: True for HF, with two more gradients a step; False for FO.
    delta: Half the distance of the two gradients of HF, in units of g(v).
    training: How w is trained: batches, epochs, and an optimizer whose rate is
      beta.
    aggregation: How the server aggregates updates.
    server_optimizer: Applies aggregated updates; SGD with rate 1 by default.

  Example:
    >>> process = baselines.build_per_fed_avg(whole, adaptation_rate=0.05)

  Raises:
    CompositionError, PhaseError, SettingError: If the arguments do not fit
      together.
  """
  if not (adaptation_rate >= 0.0 and delta > 0.0):
    raise SettingError(
      f'adaptation_rate={adaptation_rate}, delta={delta}: the rate must be 0 '
      'or more, the distance positive.'
    )

  loss = functools.partial(_loss, changed(training).loss)
  gradients = functools.partial(_gradients, loss)

  def adapted_loss(client: ClientContext) -> tf.Tensor:
    batch, w = batch_of(client), client.weights[GLOBAL]
    is_even = tf.equal(tf.range(tf.size(batch.is_real)) % 2, 0)
    is_single = tf.reduce_sum(tf.cast(batch.is_real, tf.int32)) < 2
    first = batch.is_real & (is_even | is_single)
    second = batch.is_real & (~is_even | is_single)
    v = _moved(w, gradients(client, w, first), -adaptation_rate)
    value = loss(client, v, second)
    if not hessian_free:
      return value
    slopes = gradients(client, v, second)
    ahead, behind = (
      gradients(client, _moved(w, slopes, way), first)
      for way in (delta, -delta)
    )
    return value - tf.add_n(
      tf.reduce_sum(adaptation_rate / (2 * delta) * (more - less) * w[name])
      for (name, more), less in zip(ahead.items(), behind.values(), strict=True)
    )

  measuring = Phase(train=(), on=training.on, loss=training.loss, measured=True)
  if training.drop_remainder:  # A client that takes no step has no weight.
    measuring = changed(
      measuring, drop_remainder=True, batch_size=training.batch_size
    )
  return compose(
    model,
    work=[
      changed(
        training,
        train=(GLOBAL,),
        terms=(*training.terms, adapted_loss),
        use_model_loss=False,
      ),
      measuring,
    ],
    aggregation=aggregation,
    server_optimizer=server_optimizer,
  )


def build_per_fed_avg_eval(
  model: models.PartialModel,
  *,
  personalise: Phase = Phase(optimizer=sgd(0.01), batch_size=None),
  split: splits.Split | None = None,
) -> evaluation.Evaluation:
  """Build an evaluation with the weights after steps of each client's own.

  It does not need client state, so it also measures new clients.

  Args:
    model: The model.
    personalise: The client's own steps; by default one on its support set.
    split: As for `evaluation.build_query_evaluation`.

  Example:
    >>> evaluation = baselines.build_per_fed_avg_eval(whole)
  """
  return evaluation.build_query_evaluation(
    model, train=(GLOBAL,), personalise=personalise, split=split
  )


def _loss(
  of: losses.LossFn | None,
  client: ClientContext,
  weights: tiers.NamedTensors,
  chosen: tf.Tensor,
) -> tf.Tensor:
  """Return the loss of GLOBAL weights on some examples of the batch."""
  batch = batch_of(client)
  held = tiers.server_and_local_weights(client.weights)
  predictions, regularization = client.model.predict(
    collections.OrderedDict(held, **{GLOBAL: weights}),
    client.frozen,
    batch.x,
    training=True,
    seed=client.seed,
  )
  return client.model.loss(
    batch.y, predictions, batch.weight, chosen, regularization, of
  ).objective


def _gradients(
  loss: Callable[..., tf.Tensor],
  client: ClientContext,
  weights: tiers.NamedTensors,
  chosen: tf.Tensor,
) -> tiers.NamedTensors:
  """Return the loss's gradients, as constants."""
  weights = tf.nest.map_structure(tf.stop_gradient, weights)
  with tf.GradientTape(watch_accessed_variables=False) as tape:
    tape.watch(weights)
    value = loss(client, weights, chosen)
  found = tape.gradient(
    value, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO
  )
  return tf.nest.map_structure(
    lambda slope: tf.stop_gradient(tf.convert_to_tensor(slope)), found
  )


def _moved(
  weights: tiers.NamedTensors, slopes: tiers.NamedTensors, rate: float
) -> tiers.NamedTensors:
  return tf.nest.map_structure(lambda w, s: w + rate * s, weights, slopes)
