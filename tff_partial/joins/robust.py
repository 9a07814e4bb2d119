"""Joins of updates that a few broken or hostile clients cannot move far.

A mean follows each client as far as it likes: one that sends a thousand times
its update backwards decides the round. These joins read all updates side by
side, and each client counts once, since a client may claim any weight.

What they cost: TFF has no `federated_collect`, so the server writes updates
into a buffer of `clients_per_round` times the model, and holds as much again to
join them; Krum in addition compares all pairs of updates. Clients send whole
tables, and the server sees each update: joins cannot be combined with secure
aggregation, nor with noise that is added to a sum. Local noise
(`dp.local_noise`) is possible, since it covers each update.
"""

import collections
from collections.abc import Callable
import math
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.arguments import checked_numbers
from tff_partial.errors import SettingError
from tff_partial.joins.row_aggregations import CollectRowsFactory
from tff_partial.joins.row_aggregations import IS_REAL
from tff_partial.joins.row_aggregations import ROWS

# Iterations of the geometric median, and nu of its paper.
_ITERATIONS, _LEAST_DISTANCE = 8, 1e-6

# Updates of the clients that count, float32 `[clients, size]`, or float64 if a
# part of them is, at least one -> the joined update, `[size]`.
Join = Callable[[tf.Tensor], tf.Tensor]


def coordinate_median(*, clients_per_round: int) -> 'RobustFactory':
  """Join updates by the median of each coordinate (Yin et al., ICML 2018).

  It withstands fewer than half of the clients. Of an even number, it is the
  mean of the middle two.

  Args:
    clients_per_round: The most clients of a round.

  Raises:
    SettingError: If it is no positive number.
  """
  return RobustFactory('coordinate_median', _middle, clients_per_round)


def _middle(updates: tf.Tensor) -> tf.Tensor:
  """Return the median of each coordinate of updates, `[clients, size]`."""
  number = tf.shape(updates)[0]
  ordered = tf.sort(updates, 0)
  return 0.5 * (ordered[(number - 1) // 2] + ordered[number // 2])


def trimmed_mean(*, share: float, clients_per_round: int) -> 'RobustFactory':
  """Join updates by the mean of each coordinate's middle (Yin et al., 2018).

  Args:
    share: The share of the clients that are left out at each end, rounded
      down; from 0, for the mean, to less than 0.5.
    clients_per_round: The most clients of a round.

  Raises:
    SettingError: If a number is out of range.
  """
  if not 0.0 <= share < 0.5:
    raise SettingError(
      f'trimmed_mean: share={share}: expected at least 0 and less than 0.5, '
      'the share to leave out at each end.'
    )

  def mean(updates: tf.Tensor) -> tf.Tensor:
    number = tf.shape(updates)[0]
    # Not below a whole number by rounding.
    cut = tf.cast(share * tf.cast(number, tf.float32) + 1e-4, tf.int32)
    cut = tf.minimum(cut, (number - 1) // 2)
    return tf.reduce_mean(tf.sort(updates, 0)[cut : number - cut], 0)

  return RobustFactory('trimmed_mean', mean, clients_per_round)


def krum(
  *, num_attackers: int, num_chosen: int = 1, clients_per_round: int
) -> 'RobustFactory':
  """Join updates by the one that is nearest to most others: Krum.

  Blanchard et al., NeurIPS 2017: a client's score is the sum of its squared
  distances to the `n - f - 2` nearest of the n clients. Krum takes the update
  of the best score, multi-Krum the mean of the `num_chosen` best.

  Args:
    num_attackers: f, the number of clients of a round to withstand; the paper
      wants `n >= 2 f + 3`. With fewer clients the score counts at least one.
    num_chosen: The number of updates to average; where fewer clients take part,
      at most all but `num_attackers`.
    clients_per_round: The most clients of a round.

  Raises:
    SettingError: If a number is out of range.
  """
  _check_whole(
    'krum',
    num_attackers=num_attackers,
    num_chosen=num_chosen,
    clients_per_round=clients_per_round,
  )
  if clients_per_round < 2 * num_attackers + 3 or num_attackers < 0:
    raise SettingError(
      f'krum: num_attackers={num_attackers} of {clients_per_round} clients per '
      'round: expected at least 0 attackers and 2 * num_attackers + 3 clients.'
    )
  if not 1 <= num_chosen <= clients_per_round:
    raise SettingError(
      f'krum: num_chosen={num_chosen}: expected from 1 to the '
      f'{clients_per_round} clients per round.'
    )

  def nearest(updates: tf.Tensor) -> tf.Tensor:
    number = tf.shape(updates)[0]
    squares = tf.map_fn(
      lambda update: tf.reduce_sum(
        tf.math.squared_difference(updates, update), -1
      ),
      updates,
    )
    # The nearest is the client itself, at 0.
    counted = tf.clip_by_value(number - num_attackers - 2, 1, number)
    scores = tf.reduce_sum(tf.sort(squares, -1)[:, : counted + 1], -1)
    chosen = tf.minimum(num_chosen, tf.maximum(number - num_attackers, 1))
    best = tf.argsort(scores, stable=True)[:chosen]
    return tf.reduce_mean(tf.gather(updates, best), 0)

  return RobustFactory('krum', nearest, clients_per_round)


def geometric_median(*, clients_per_round: int) -> 'RobustFactory':
  """Join updates by the point of least total distance to them: RFA.

  Pillutla et al., 2022, Algorithm 2: eight of Weiszfeld's iterations. It
  withstands fewer than half of the clients. Iterations begin at the median of
  each coordinate: from the mean, which one client moves as far as it likes, few
  of them do not come back.

  Args:
    clients_per_round: The most clients of a round.

  Raises:
    SettingError: If a number is out of range.
  """

  def median(updates: tf.Tensor) -> tf.Tensor:
    point = _middle(updates)
    for _ in range(_ITERATIONS):
      distances = tf.norm(updates - point, axis=-1)
      weights = 1.0 / tf.maximum(distances, _LEAST_DISTANCE)
      point = tf.linalg.matvec(updates, weights, transpose_a=True)
      point /= tf.reduce_sum(weights)
    return point

  return RobustFactory('geometric_median', median, clients_per_round)


def _check_whole(join: str, **settings: Any) -> None:
  """Refuse settings of a join that are no whole numbers."""
  for name, value in settings.items():
    wrong = checked_numbers.why_not_whole(value)
    if wrong:
      raise SettingError(f'{join}: {name}={value!r}: {wrong}.')


class RobustFactory(tff.aggregators.WeightedAggregationFactory):
  """Factory of aggregations that join all updates of a round side by side.

  Weights only say which clients count: those above zero. If none counts, the
  result is zero.

  Attributes:
    name: The join's name.
  """

  def __init__(self, name: str, join: Join, clients_per_round: int):
    """Store the join, its name, and the most clients of a round."""
    _check_whole(name, clients_per_round=clients_per_round)
    if clients_per_round < 1:
      raise SettingError(
        f'{name}: clients_per_round={clients_per_round}: expected the most '
        'clients of a round, a positive whole number.'
      )
    self.name = name
    self._join, self._capacity = join, clients_per_round

  def create(
    self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """Create the process that joins whole tables."""
    leaves = tff.structure.flatten(value_type)
    is_wide = any(tf.as_dtype(leaf.dtype) == tf.float64 for leaf in leaves)
    dtype = tf.float64 if is_wide else tf.float32

    @tff.tensorflow.computation(value_type, weight_type)
    def flatten(value: Any, weight: Any) -> Any:
      # In the order of the type; `tf.nest` would sort by name.
      named = tff.structure.from_container(value, recursive=True)
      leaves = [
        tf.reshape(tf.cast(leaf, dtype), [-1])
        for leaf in tff.structure.flatten(named)
      ]
      return collections.OrderedDict(
        {
          ROWS: tf.concat(leaves, 0)[tf.newaxis],
          IS_REAL: tf.reshape(weight > 0, [1]),
        }
      )

    rows = CollectRowsFactory(self._capacity).create(
      flatten.type_signature.result
    )

    @tff.tensorflow.computation(rows.next.type_signature.result.result.member)
    def join(collected: Any) -> Any:
      number, held = collected['num_sent'], collected[ROWS]
      too_many = tf.debugging.assert_less_equal(
        number,
        self._capacity,
        f'{self.name}: more clients took part than clients_per_round='
        f'{self._capacity}. Give the most clients of a round.',
      )
      with tf.control_dependencies([too_many] if too_many is not None else []):
        number = tf.identity(number)
      joined = tf.cond(
        number > 0,
        lambda: self._join(held[:number]),
        lambda: tf.zeros_like(held[0]),
      )
      parts = iter(tf.split(joined, [math.prod(leaf.shape) for leaf in leaves]))
      return tff.types.structure_from_tensor_type_tree(
        lambda leaf: tf.cast(tf.reshape(next(parts), leaf.shape), leaf.dtype),
        value_type,
      )

    @tff.federated_computation(
      rows.initialize.type_signature.result,
      tff.FederatedType(value_type, tff.CLIENTS),
      tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state: Any, value: Any, weight: Any) -> Any:
      output = rows.next(state, tff.federated_map(flatten, (value, weight)))
      return tff.templates.MeasuredProcessOutput(
        output.state,
        tff.federated_map(join, output.result),
        output.measurements,
      )

    return tff.templates.AggregationProcess(rows.initialize, next_fn)
