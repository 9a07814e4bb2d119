"""Messages of clients, and their new state, after their work in a round."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial import groups
from tff_partial import random_bits
from tff_partial import tiers
from tff_partial.client import client_metrics
from tff_partial.client import client_work
from tff_partial.client import local_training
from tff_partial.client import work as work_lib
from tff_partial.client.descent import are_finite
from tff_partial.client_statistics import Join
from tff_partial.client_statistics import Statistic
from tff_partial.contexts import Outcome

ClientWeighting: TypeAlias = tff.learning.ClientWeighting
# (the update, by tier or statistic, the client's seed for it) -> what it sends
# instead.
PostprocessUpdate: TypeAlias = Callable[[Any, tf.Tensor], Any]
# A client's result -> its weight, zero or more.
ClientWeightFn: TypeAlias = Callable[[local_training.ClientResult], tf.Tensor]


def sending_seed(seed: tf.Tensor) -> tf.Tensor:
  """Return `postprocess_update`'s seed, int32 `[2]`, from a client's seed."""
  return random_bits.fold_in(seed, 'sending')


class ClientUpdate(NamedTuple):
  """What a client computes in a round: what it sends, and its new state.

  Attributes:
    update: Tier to the client's update, named tensors; and the statistics that
      are joined with it, by name.
    ids: Tier and name to the ids of the rows that are in `update` instead of a
      whole table.
    weight: The weight of the update.
    kept: The client's new state.
    statistics: Other statistics, by name.
    group: The client's group, int32.
    metrics: States of metrics.
  """

  update: Any
  ids: Any
  weight: Any
  kept: Any
  statistics: Any
  group: Any
  metrics: Any


class ClientUpdateSpec(NamedTuple):
  """Settings of what a client sends.

  Attributes:
    tiers: The tiers whose updates are sent.
    weighting: How clients are weighted, None by their examples.
    by_rows: True to send only rows of tables of which only these are trained.
    postprocess_update: Transforms a client's update before it is sent, or None.
    statistics: What is sent besides the update.
  """

  tiers: Sequence[str]
  weighting: ClientWeighting | ClientWeightFn | None
  by_rows: bool
  postprocess_update: PostprocessUpdate | None
  statistics: Sequence[Statistic]


def client_update(
  work: client_work.ClientWork,
  spec: ClientUpdateSpec,
  shared: Any,
  frozen: Any,
  kept: Any,
  client: Any,
  sent: Mapping[str, Any],
) -> ClientUpdate:
  """Let one client work in a round; see `ClientWork.computation`."""
  with work.begin(shared, frozen, kept, client, sent) as context:
    result = local_training.run(
      work.work, context, work.tables, sent.get('round')
    )
    result, weight = _weighed(result, spec.weighting)
    weight = zero_unless(result.is_finite & result.is_measured)(weight)
    known = result.context._replace(
      outcome=Outcome(result.num_examples, result.num_steps, weight)
    )
    said = [
      (statistic, statistic.summarize(known))
      for statistic in spec.statistics
      if not statistic.after_update
    ]
    is_finite = result.is_finite & are_finite([value for _, value in said])
    result = result._replace(is_finite=is_finite)
    weight = zero_unless(is_finite)(weight)
    zero_unless_counted = zero_unless(is_finite & (weight > 0.0))
    update, ids = _update(work, spec, result, shared)
    statistics = collections.OrderedDict()
    for statistic, value in said:
      value = zero_unless_counted(value)
      if statistic.join is Join.WITH_UPDATE:
        update[statistic.name] = value
      else:
        statistics[statistic.name] = value
    if spec.postprocess_update is not None and update:
      update = spec.postprocess_update(update, sending_seed(known.seed))
    mechanism = getattr(spec.postprocess_update, 'mechanism', None)
    if mechanism is not None and mechanism.noise_multiplier:
      # The weight must not reveal if the client had examples either.
      weight = tf.ones([])
    return ClientUpdate(
      update,
      ids,
      weight,
      _keep_old_state_if_not_finite(
        result.is_finite, work.keep_as_before(known), work.keep(known)
      ),
      statistics,
      result.group,
      client_metrics.unfinalized_metrics(result),
    )


def _update(
  work: client_work.ClientWork,
  spec: ClientUpdateSpec,
  result: local_training.ClientResult,
  shared: Any,
) -> tuple[Any, Any]:
  """Return a client's update, and the ids of the rows in it."""
  zero_unless_finite = zero_unless(result.is_finite)
  update: Any = collections.OrderedDict()
  ids: Any = collections.OrderedDict()
  for tier in spec.tiers:
    received = shared[tier]
    is_one_copy = tier == tiers.GROUP and not work_lib.holds_all_copies(
      work.work
    )
    if is_one_copy:
      received = groups.copy_of(received, result.group)
    moved = zero_unless_finite(tiers.delta(received, result.weights[tier]))
    for variance, mean in work.model.variances.items():
      if variance in moved:
        # Moved around the mean that the server has: see `JoinUpdates`.
        moved[variance] -= tf.square(moved[mean])
    if is_one_copy:
      moved = groups.scatter_to_groups(
        moved, result.group, work.model.num_groups
      )
    changes = result.changes if tier == tiers.GLOBAL else {}
    for name, change in zero_unless_finite(changes).items():
      if spec.by_rows:
        moved[name] = change.values
        ids.setdefault(tier, collections.OrderedDict())[name] = change.ids
      else:
        moved[name] = change.added_to(tf.zeros_like(shared[tier][name]))
    update[tier] = moved
  return update, ids


def second_pass(
  statistic: Statistic, work: client_work.ClientWork, sent: Mapping[str, Any]
) -> tff.Computation:
  """Make `(new ModelWeights, C, D, further values -> summary)`.

  The further values are `sent`, and the client's `group` and `weight`.
  """

  def summarize(
    shared: Any, frozen: Any, kept: Any, client: Any, beside: Any
  ) -> Any:
    with work.begin(shared, frozen, kept, client, beside) as known:
      weight = beside['weight']
      known = known._replace(
        group=beside['group'], outcome=Outcome(tf.constant(0), {}, weight)
      )
      value = statistic.summarize(known)
      return zero_unless((weight > 0) & are_finite(value))(value)

  beside = {
    **sent,
    'group': tf.TensorSpec([], tf.int32),
    'weight': tf.TensorSpec([], tf.float32),
  }
  return work.computation(summarize, beside)


def zero_unless(condition: tf.Tensor) -> Callable[[Any], Any]:
  """Return a function that replaces tensors by zeros unless `condition`."""
  return lambda structure: tf.nest.map_structure(
    lambda t: tf.where(condition, t, tf.zeros_like(t)), structure
  )


def _keep_old_state_if_not_finite(
  is_finite: tf.Tensor, kept: Any, new: Any
) -> Any:
  """Return a client's new state, or its old one if its work failed."""
  try:
    return tf.nest.map_structure(
      lambda old, new: tf.where(is_finite, new, old), kept, new
    )
  except (TypeError, ValueError) as error:
    raise client_work.CompositionError(
      f'A round takes client states {kept} and returns {new}. What a client '
      'state keeps must look like what it makes first.'
    ) from error


def _weighed(
  result: local_training.ClientResult,
  client_weighting: ClientWeighting | ClientWeightFn | None,
) -> tuple[local_training.ClientResult, tf.Tensor]:
  """Compute a client's weight.

  Returns:
    The client's result, which is not finite if its weight is negative or not
    finite, and the weight, float32.
  """
  if client_weighting in (None, ClientWeighting.NUM_EXAMPLES):
    return result, tf.cast(result.num_examples, tf.float32)
  if client_weighting is ClientWeighting.UNIFORM:
    return result, tf.cast(result.num_examples > 0, tf.float32)
  if not callable(client_weighting):
    raise client_work.CompositionError(
      f'client_weighting={client_weighting!r}: give a `ClientWeighting`, or a '
      "function from a client's result to its weight."
    )
  weight = tf.convert_to_tensor(client_weighting(result))
  if weight.shape.rank != 0 or not (
    weight.dtype.is_floating or weight.dtype.is_integer
  ):
    raise client_work.CompositionError(
      'client_weighting: a client has one number for a weight, found '
      f'{weight.dtype.name}{weight.shape}.'
    )
  weight = tf.cast(weight, tf.float32)
  can_weigh = tf.logical_and(tf.math.is_finite(weight), weight >= 0.0)
  is_finite = tf.logical_and(result.is_finite, can_weigh)
  return result._replace(is_finite=is_finite), weight
