"""FedEM (Marfoq et al., NeurIPS 2021), Algorithm 1: clients are mixtures.

The server holds K models, and client t remembers its share pi_tk of each, 1 / K
at first. In a round it computes how likely it is that model k made example i (E
step),

    q_ik ~ pi_tk exp(-loss of model k on example i),

sets pi_tk to the mean of q_ik over its examples, and trains all models, where
example i has the weight q_ik for model k (M step). The server averages each
model over the cohort, by numbers of examples. A client predicts
`sum_k pi_tk p_k(y | x)`. A new client only computes its shares.

An example's weight multiplies its loss, also in the E step; shares are means
over examples, whatever their weights, unless these are zero.

Deviations: q stays that of the received models while a client trains, also
where it trains on other examples than before; it is that of the model's own
loss, also if `training.loss` is another. Variables that are in no group,
such as an encoder, may be shared by all models, where the paper's have nothing
in common; then layers' losses of these count once for each model. Clients who
took part also renew their shares before they are measured.
"""

import collections
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tff_partial import client_state
from tff_partial import evaluation
from tff_partial import groups
from tff_partial import tiers
from tff_partial.composition import Aggregation
from tff_partial.composition import compose
from tff_partial.contexts import Batch
from tff_partial.contexts import batch_of
from tff_partial.contexts import ClientContext
from tff_partial.contexts import OverwriteWeights
from tff_partial.data import splits
from tff_partial.errors import SettingError
from tff_partial.model import losses
from tff_partial.model import models
from tff_partial.phases import changed
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training
from tff_partial.tiers import CLIENT_VALUES
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import GROUP

# Name of pi_t, `[K]`.
_SHARES = 'shares'

_CLIENT_STATE = client_state.persist_numbers(
  client_state.stateless,
  lambda model: {_SHARES: tf.fill([model.num_groups], 1 / model.num_groups)},
)


def build_fed_em(
  model: models.PartialModel,
  *,
  are_logits: bool = True,
  training: Phase = Phase(),
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
) -> PartialProcess:
  """Build FedEM: train K models, each on the examples that it explains.

  Metrics of training are those of the mixture, before each step.

  Args:
    model: The model, with groups and without local variables.
    are_logits: Whether the model predicts logits of classes, whose
      probabilities are mixed; if not, what it predicts is mixed itself.
    training: How a client trains: optimizer, batches, epochs.
    aggregation: How the server aggregates updates.
    server_optimizer: Applies aggregated updates; SGD with rate 1 by default.

  Example:
    >>> process = baselines.build_fed_em(clusters, training=Phase(epochs=2))

  Raises:
    CompositionError, PhaseError, GroupError, SettingError: If the arguments do
      not fit together.
  """

  def weighted(client: ClientContext) -> tf.Tensor:
    batch = batch_of(client)
    e_step = _e_step(client, client.received, batch)
    likely = e_step(client.received[CLIENT_VALUES][_SHARES])
    rank = batch.weight.shape.rank
    found = [
      client.model.loss(
        batch.y,
        predictions,
        batch.weight * losses.expand(likely[:, copy], rank, 'A share'),
        batch.is_real,
        regularization,
        training.loss,
      ).objective
      for copy, (predictions, regularization) in enumerate(
        groups.predict_all(client, client.weights, batch.x, training=True)
      )
    ]
    return tf.add_n(found)

  training = partial_training.trained(training, weighted, train=(GLOBAL, GROUP))
  return compose(
    model,
    client_state=_CLIENT_STATE,
    work=[
      groups.ALL_COPIES,
      OverwriteWeights(_renewed(1), training.on),
      changed(
        training,
        use_model_loss=False,
        weights_fn=groups.one_of_all(0),
        predict_fn=_mixture(model, are_logits),
      ),
    ],
    aggregation=aggregation,
    server_optimizer=server_optimizer,
  )


def build_fed_em_eval(
  model: models.PartialModel,
  *,
  are_logits: bool = True,
  steps: int = 10,
  split: splits.Split | None = None,
) -> evaluation.Evaluation:
  """Build an evaluation with the mixture that explains the support set.

  Args:
    model: The model.
    are_logits: As in training.
    steps: How often a client computes its shares, from the ones that it
      remembers, or equal ones if it is new.
    split: Support and query set; the two halves by default.

  Example:
    >>> evaluation = baselines.build_fed_em_eval(clusters)

  Raises:
    CompositionError, GroupError, SettingError: If the arguments do not fit
      together.
  """
  if steps < 1:
    raise SettingError(
      f'steps={steps}: a client computes its shares at least once.'
    )
  return evaluation.build_query_evaluation(
    model,
    client_state=_CLIENT_STATE,
    weights_fn=groups.one_of_all(0),
    predict_fn=_mixture(model, are_logits),
    before=[groups.ALL_COPIES, OverwriteWeights(_renewed(steps))],
    split=split,
  )


def _e_step(
  client: ClientContext, weights: tiers.Weights, batch: Batch
) -> Callable[[tf.Tensor], tf.Tensor]:
  """Return the function from shares `[K]` to q, `[batch, K]`."""
  found = [
    client.model.loss(batch.y, predictions, batch.weight, batch.is_real)
    for predictions, _ in groups.predict_all(client, weights, batch.x)
  ]
  values = tf.stack([loss.of_examples for loss in found], -1)
  return lambda shares: tf.nn.softmax(tf.math.log(shares) - values)


def _renewed(steps: int) -> Callable[[ClientContext], tiers.Weights]:
  """Return the function to a client's new shares."""

  def renewed(client: ClientContext) -> tiers.Weights:
    batch = Batch.of(client.examples, client.is_real, None)
    e_step = _e_step(client, client.weights, batch)
    shares = client.weight(CLIENT_VALUES, _SHARES)
    number = tf.reduce_sum(tf.cast(client.counts, tf.float32))
    for _ in range(steps):
      likely = tf.where(client.counts[:, tf.newaxis], e_step(shares), 0.0)
      mean = tf.reduce_sum(likely, 0) / number
      shares = tf.where(number > 0.0, mean, shares)
    named = collections.OrderedDict({_SHARES: shares})
    return collections.OrderedDict({CLIENT_VALUES: named})

  return renewed


def _mixture(
  model: models.PartialModel, are_logits: bool
) -> Callable[[ClientContext], Any]:
  """Return the function to a mixture's predictions for a batch."""
  specs = tf.nest.flatten(model.prediction_spec)
  if are_logits and any(spec.shape.rank == 0 for spec in specs):
    raise SettingError(
      f'are_logits=True: the model predicts {model.prediction_spec}, without '
      'an axis of classes. Pass are_logits=False.'
    )

  def predict(client: ClientContext) -> Any:
    shares = client.weight(CLIENT_VALUES, _SHARES)
    found = groups.predict_all(client, client.weights, batch_of(client).x)
    return tf.nest.map_structure(
      lambda *outputs: tf.cast(
        _mixed(tf.stack(outputs, -1), shares, are_logits), outputs[0].dtype
      ),
      *(predictions for predictions, _ in found),
    )

  return predict


def _mixed(values: tf.Tensor, shares: tf.Tensor, are_logits: bool) -> tf.Tensor:
  """Return the mixture of predictions `[..., K]`, or of their probabilities."""
  values = tf.cast(values, tf.float32)
  if not are_logits:
    return tf.reduce_sum(shares * values, -1)
  is_single = values.shape[-2] == 1  # The logit of the second of two classes.
  if is_single:
    values = tf.concat([tf.zeros_like(values), values], -2)
  of_each = tf.math.log(shares) + tf.nn.log_softmax(values, -2)
  found = tf.reduce_logsumexp(of_each, -1)
  return found[..., 1:] - found[..., :1] if is_single else found
