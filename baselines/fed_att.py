"""FedAtt (Ji et al., IJCNN 2019): attention to clients that moved far.

For each variable l (a layer, in the paper) and each client k of the cohort, the
server computes the distance s_k = ||w - w_k||_2 from its weights w to the
client's w_k, the attention alpha = softmax(s) over the clients, and moves by
epsilon * sum_k alpha_k (w - w_k). So clients that moved farther count more.

The server needs only sums: each client sends its move times exp(s_k), and
exp(s_k), and the server moves by the quotient of the sums. As an exponential
may be too large for a float, all clients subtract the same number from s_k,
which does not change the quotient: the attention-weighted mean distance of the
previous round, which the server sends. The difference is clipped to +-60, so
that clients so far from the previous round count equally in one round; in the
first round, these are distances above 60.

Deviations: the norm of a matrix is that of all its elements, where the authors'
code uses the largest singular value. Their noise for privacy is left out, as it
has no clipping and so no guarantee; clients may clip and noise what they send
by `postprocess_update`, and attention then depends on what they send. Clients
train epochs on batches as `training` says. As in the paper, their numbers of
examples do not matter; with a `client_weighting` other than UNIFORM, attention
is multiplied by weights. Local variables, if any, stay at clients, as in
`build_furl`. All clients get the same attention to moving averages.
"""

import collections
from collections.abc import Collection
import dataclasses
import math
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial import aggregators
from tff_partial import tiers
from tff_partial.composition import Aggregation
from tff_partial.composition import with_equal_weights
from tff_partial.errors import SettingError
from tff_partial.model import models
from tff_partial.phases import changed
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training

# Maximum exponent; 10**5 examples times a move then remain finite floats.
_FARTHEST = 60.0
# Key of what clients send in addition to the tiers that they trained.
_ATTENTION = 'attention'


def build_fed_att(
  model: models.PartialModel,
  *,
  server_learning_rate: float = 1.0,
  training: Phase = Phase(),
  aggregation: Aggregation = Aggregation(),
) -> PartialProcess:
  """Build FedAtt: train all variables, with attention at the server.

  Args:
    model: The model; its local variables, if any, are trained and remembered.
    server_learning_rate: epsilon of the paper, the server's step size.
    training: How a client trains: optimizer, or one for each tier, batches,
      epochs.
    aggregation: How the server averages clients' messages; by default clients
      are weighted only by attention.

  Example:
    >>> process = baselines.build_fed_att(whole, server_learning_rate=1.0)

  Raises:
    SettingError, CompositionError, PhaseError: If the arguments do not fit
      together.
  """
  if not 0.0 < server_learning_rate < math.inf:
    raise SettingError(
      f'server_learning_rate={server_learning_rate}: the server follows by a '
      'positive, finite number.'
    )
  aggregation = with_equal_weights(aggregation)
  mean = aggregation.aggregator or aggregators.MeanFactory()
  return partial_training.build_simultaneous(
    model,
    training=changed(training),
    aggregation=dataclasses.replace(
      aggregation, aggregator=AttentiveFactory(mean, model.state)
    ),
    server_optimizer=sgd(server_learning_rate),
  )


build_fed_att_eval = partial_training.build_evaluation


class AttentiveFactory(aggregators.WeightedFactory):
  """Factory of means with attention, a softmax of distances by variable.

  It wraps another mean, which aggregates moves and attentions.

  Attributes:
    mechanism: The mean's privacy mechanism, or None; it adds no noise.
  """

  def __init__(self, mean: aggregators.Factory, states: Collection[str] = ()):
    """Wrap a mean, or a sum; one that adds noise is refused.

    All clients get the same attention to `states`, variables that layers
    change: a pooled variance has the weights of its mean.
    """
    self._states = states
    self.mechanism = getattr(mean, 'mechanism', None)
    if self.mechanism is not None and self.mechanism.noise_multiplier:
      raise SettingError(
        'FedAtt divides by the sum of attentions, which a private aggregator '
        'would noise, so that the quotient may be anything. Let clients add '
        'noise (postprocess_update), or use FedAvg.'
      )
    self._mean = aggregators.as_weighted(mean)

  def create(
    self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """Create the process, for a mapping of tiers to named tensors."""

    @tff.tensorflow.computation
    def no_distance() -> Any:
      return tff.types.structure_from_tensor_type_tree(
        lambda leaf: tf.zeros([]), value_type
      )

    mean_type = no_distance.type_signature.result

    @tff.tensorflow.computation(value_type, weight_type, mean_type)
    def attend(moved: Any, weight: Any, before: Any) -> Any:
      return _attended(moved, weight, before, self._states)

    attended = attend.type_signature.result
    process = self._mean.create(attended, weight_type)
    joined_type = process.next.type_signature.result.result.member

    @tff.tensorflow.computation(joined_type, mean_type)
    def divide(joined: Any, before: Any) -> Any:
      return _divided(joined, before)

    @tff.federated_computation
    def initialize() -> Any:
      return tff.federated_zip(
        collections.OrderedDict(
          mean=process.initialize(),
          distances=tff.federated_eval(no_distance, tff.SERVER),
        )
      )

    @tff.federated_computation(
      initialize.type_signature.result,
      tff.FederatedType(value_type, tff.CLIENTS),
      tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state: Any, value: Any, weight: Any) -> Any:
      before = tff.federated_broadcast(state['distances'])
      output = process.next(
        state['mean'],
        tff.federated_map(attend, (value, weight, before)),
        weight,
      )
      divided = tff.federated_map(divide, (output.result, state['distances']))
      return tff.templates.MeasuredProcessOutput(
        tff.federated_zip(
          collections.OrderedDict(mean=output.state, distances=divided[1])
        ),
        divided[0],
        output.measurements,
      )

    return tff.templates.AggregationProcess(initialize, next_fn)


def _attended(
  moved: Any, weight: tf.Tensor, before: Any, states: Collection[str]
) -> Any:
  """Return a client's message: moves times attention, exp(distance - before).

  Beside them by variable name the attention, and it times the distance, `[2]`;
  all are zero if the client's weight is.
  """
  distances = tiers.mapped(
    lambda tier, name, leaf: (
      tf.cast(tf.norm(leaf), tf.float32) * float(name not in states)
    ),
    moved,
  )
  attention = tf.nest.map_structure(
    lambda distance, less: tf.where(
      weight > 0,
      tf.exp(tf.clip_by_value(distance - less, -_FARTHEST, _FARTHEST)),
      0.0,
    ),
    distances,
    before,
  )
  sent = tf.nest.map_structure(
    lambda leaf, share: leaf * tf.cast(share, leaf.dtype), moved, attention
  )
  sent[_ATTENTION] = collections.OrderedDict(
    (name, tf.stack([share, share * distances[tier][name]]))
    for tier, named in attention.items()
    for name, share in named.items()
  )
  return sent


def _divided(joined: Any, before: Any) -> tuple[Any, Any]:
  """Return the server's moves and new distances, or the old if none came."""
  moved: Any = collections.OrderedDict()
  distances: Any = collections.OrderedDict()
  for tier, named in before.items():
    moved[tier] = collections.OrderedDict()
    distances[tier] = collections.OrderedDict()
    for name, less in named.items():
      total, weighted = tf.unstack(joined[_ATTENTION][name])
      leaf = joined[tier][name]
      moved[tier][name] = tf.math.divide_no_nan(
        leaf, tf.cast(total, leaf.dtype)
      )
      distances[tier][name] = tf.where(total > 0, weighted / total, less)
  return moved, distances
