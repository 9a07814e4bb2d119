"""Aggregators that give user-level differential privacy.

`private_mean` clips each client's update and adds noise once, at the server, to
the sum; the server is trusted with the updates. docs/privacy.md says what that
protects, and `privacy_plans` finds the noise that an epsilon requires.

Every client counts once. Weights by number of examples would let one client
move the sum by more than the clip, so these aggregators are unweighted; TFF
drops the weights of a process that uses them.
"""

import collections
from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff
import tensorflow_privacy as tfp

from tff_partial import aggregators
from tff_partial.dp import clipping as clipping_lib
from tff_partial.dp import dp_queries
from tff_partial.dp import private_rows
from tff_partial.dp.clipping import WHOLE
from tff_partial.dp.mechanisms import CENTRAL
from tff_partial.dp.mechanisms import Mechanism
from tff_partial.dp.mechanisms import PrivateTypeError
from tff_partial.errors import PrivacyError

# Suffix of the names of exact measurements.
NOT_PRIVATE = '_not_private'


class _UpdateParts:
  """Queries of an update: one of the whole, or one for each part."""

  def __init__(self, queries: Mapping[str, dp_queries.PrivateSumQuery]):
    self.queries = queries

  def split(self, structure: Any) -> Any:
    """Return the parts of a structure, by name."""
    return {WHOLE: structure} if WHOLE in self.queries else structure

  def join(self, parts: Mapping[str, Any]) -> Any:
    """Join parts to a structure."""
    return parts.get(WHOLE, parts)

  @property
  def query(self) -> tfp.SumAggregationDPQuery:
    """The query of the whole structure."""
    if WHOLE in self.queries:
      return self.queries[WHOLE]
    return private_rows.NestedSumQuery(collections.OrderedDict(self.queries))

  def are_clipped(self, params: Any, value: Any) -> Any:
    """Return whether a client's parts are clipped, which is not private."""
    params, value = self.split(params), self.split(value)
    clipped = collections.OrderedDict(
      (part, tf.cast(query.is_clipped(params[part], value[part]), tf.int32))
      for part, query in self.queries.items()
    )
    return clipped, tf.constant(1)

  def measure(self, divisor: float, before: Any, after: Any, total: Any) -> Any:
    """Measure a round from values that are already private."""
    before, after = self.split(before), self.split(after)
    total = self.split(total)
    measured = collections.OrderedDict(
      (part, query.measure(before[part], after[part], total[part]))
      for part, query in self.queries.items()
    )
    for one in measured.values():
      one['noise_stddev'] /= divisor
    return self.join(measured)


@dataclasses.dataclass(frozen=True)
class PrivateFactory(
  aggregators.RowAggregationFactory,
  tff.aggregators.UnweightedAggregationFactory,
):
  """The mean of clipped updates with central differential privacy.

  The sum is divided by the expected number of clients, not by the actual one,
  which is a secret if clients are sampled independently. An argument that is
  impossible is refused with a `PrivacyError`.

  Attributes:
    clipping: Clipping of an update: joint, or by part with the names of tiers.
    noise_multiplier: Standard deviation of the noise in clips: of the sum,
      before it is divided. If several parts or counts are noised, it is their
      joint cost: each gets more noise. Zero for no noise.
    clients_per_round: Expected number of clients; the actual one is a secret.
    noise_seed: Makes a simulation with reproducible noise. By default each
      process has a secret seed from the operating system.
    diagnostics: True for exact measurements, which are not private; their names
      end in `not_private`.
  """

  clipping: clipping_lib.Clippings
  _: dataclasses.KW_ONLY
  noise_multiplier: float
  clients_per_round: float
  noise_seed: int | None = None
  diagnostics: bool = False

  def __post_init__(self) -> None:
    clipping_lib.check_positive(
      self.noise_multiplier, 'noise_multiplier', also_zero=True
    )
    clipping_lib.check_positive(self.clients_per_round, 'clients_per_round')
    trees = {
      how.rounds_per_tree if isinstance(how, clipping_lib.TreeNoise) else None
      for how in clipping_lib.parts_of(self.clipping).values()
    }
    if len(trees) > 1:
      raise PrivacyError(
        'Either all parts have TreeNoise, with trees of the same number of '
        f'rounds, or none has, found {self.clipping}.'
      )
    largest = clipping_lib.largest_noise_multiplier(
      self.clipping, self.clients_per_round
    )
    if self.noise_multiplier >= largest:
      raise PrivacyError(
        f'A noise multiplier of {self.noise_multiplier:.4g} is out of reach: '
        'the counts of clipped clients leave room for less than '
        f'{largest:.4g}. Give AdaptiveClip a larger `count_stddev`, have more '
        'clients in a round, or use FixedClip.'
      )

  @property
  def mechanism(self) -> Mechanism:
    """The mechanism, for the accountant."""
    return Mechanism(
      CENTRAL,
      self.clipping,
      self.noise_multiplier,
      self.clients_per_round,
      self.noise_seed is not None,
    )

  def _parts(self, specs: Any) -> _UpdateParts:
    """Make the queries, with new secrets each time."""
    clipping = clipping_lib.parts_of(self.clipping)
    if not isinstance(self.clipping, Mapping):
      specs = {WHOLE: specs}
    share = 1.0 / len(clipping)  # See `clipping.largest_noise_multiplier`.
    return _UpdateParts(
      {
        part: clipping[part].query(
          clipping_lib.Noise(
            self.noise_multiplier / math.sqrt(share),
            private_rows.seed_maker(self.noise_seed, part),
            spec,
            self.clients_per_round,
          )
        )
        for part, spec in specs.items()
      }
    )

  def _specs(self, value_type: tff.Type) -> Any:
    """Return the specs of a value; refuse one that cannot be clipped."""
    try:
      specs = tff.types.type_to_tf_tensor_specs(value_type)
    except (TypeError, ValueError) as error:
      raise PrivateTypeError(
        f'Only tensors can be clipped, found {value_type}.'
      ) from error
    for spec in tf.nest.flatten(specs):
      if not spec.dtype.is_floating or not spec.shape.is_fully_defined():
        raise PrivateTypeError(
          'Only floating-point numbers of known shape can be clipped, found '
          f'{spec.dtype.name}{spec.shape} in {value_type}.'
        )
    if isinstance(self.clipping, Mapping):
      found = sorted(specs) if isinstance(specs, Mapping) else [str(value_type)]
      if found != sorted(self.clipping):
        raise PrivateTypeError(
          f'The clipping is given for {sorted(self.clipping)}, but clients '
          f'send {found}.'
        )
    return specs

  def create(self, value_type: Any) -> tff.templates.AggregationProcess:
    """Make the process for values of a type, floating-point tensors.

    If the clipping is given by part, its names are at the top of the type.

    Raises:
      PrivateTypeError: If such values cannot be clipped.
    """
    return self._process(value_type, None)

  def create_by_rows(
    self,
    value_type: tff.Type,
    weight_type: tff.Type,
    ids_type: tff.Type,
    result_type: tff.Type,
  ) -> tff.templates.AggregationProcess:
    """Make the process for rows of some tables; all rows get noise.

    Raises:
      PrivateTypeError: If such values cannot be clipped.
    """
    pair_type = tff.to_type(
      collections.OrderedDict(value=value_type, ids=ids_type)
    )
    process = self._process(pair_type, result_type)
    weight_type = tff.to_type(
      collections.OrderedDict(weight=weight_type, ids=ids_type)
    )

    @tff.tensorflow.computation(value_type, weight_type)
    def pair(value: Any, weight: Any) -> Any:
      return collections.OrderedDict(value=value, ids=weight['ids'])

    @tff.federated_computation(
      process.initialize.type_signature.result,
      tff.FederatedType(value_type, tff.CLIENTS),
      tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state: Any, value: Any, weight: Any) -> Any:
      return process.next(state, tff.federated_map(pair, (value, weight)))

    return tff.templates.AggregationProcess(process.initialize, next_fn)

  def _process(
    self, value_type: Any, table_type: tff.Type | None
  ) -> tff.templates.AggregationProcess:
    """Make the process for values or, with `table_type`, for rows and ids."""
    specs = self._specs(value_type if table_type is None else table_type)
    parts = self._parts(specs)
    query, total = parts.query, None
    if table_type is not None:
      query = private_rows.RowsQuery(query, specs)
      total = private_rows.RowSumFactory(query)
    process = tff.aggregators.DifferentiallyPrivateFactory(query, total).create(
      value_type
    )
    state_type = process.initialize.type_signature.result.member
    query_type = state_type.query_state
    sum_type = process.next.type_signature.result.result.member

    @tff.tensorflow.computation(query_type, query_type, sum_type)
    def measure(before: Any, after: Any, total: Any) -> Any:
      return parts.measure(self.clients_per_round, before, after, total)

    @tff.tensorflow.computation(sum_type)
    def divide(total: Any) -> Any:
      return tf.nest.map_structure(
        lambda leaf, spec: tf.cast(
          leaf / float(self.clients_per_round), spec.dtype
        ),
        total,
        specs,
      )

    diagnose = _diagnosing(
      query,
      parts,
      (query_type, value_type, measure.type_signature.result),
      distinct_in=None if table_type is None else specs,
    )

    @tff.federated_computation(
      process.initialize.type_signature.result,
      tff.FederatedType(value_type, tff.CLIENTS),
    )
    def next_fn(state: Any, values: Any) -> Any:
      output = process.next(state, values)
      measured = tff.federated_map(
        measure, (state.query_state, output.state.query_state, output.result)
      )
      if self.diagnostics:
        measured = diagnose(state.query_state, values, measured)
      return tff.templates.MeasuredProcessOutput(
        output.state, tff.federated_map(divide, output.result), measured
      )

    return tff.templates.AggregationProcess(process.initialize, next_fn)


def _diagnosing(
  query: tfp.SumAggregationDPQuery,
  parts: _UpdateParts,
  types: tuple[tff.Type, Any, tff.Type],
  *,
  distinct_in: Any,
) -> Callable[[Any, Any, Any], Any]:
  """Return what adds the exact share of clipped clients to measurements.

  Args:
    query: The query of the whole update.
    parts: The queries of its parts.
    types: Types of the query's state, of an update, and of the measurements.
    distinct_in: Specs of whole tables, if clients send rows of them.
  """
  query_type, value_type, measured_type = types

  @tff.tensorflow.computation(query_type)
  def params_of(state: Any) -> Any:
    return query.derive_sample_params(state)

  @tff.tensorflow.computation(params_of.type_signature.result, value_type)
  def are_clipped(params: Any, value: Any) -> Any:
    if distinct_in is not None:
      value = private_rows.with_distinct_rows(value, distinct_in)
    return parts.are_clipped(params, value)

  @tff.tensorflow.computation(measured_type, are_clipped.type_signature.result)
  def with_shares(measured: Any, counts: Any) -> Any:
    clipped, clients = counts
    by_part = parts.split(measured)
    for part, number in clipped.items():
      by_part[part][f'share_clipped{NOT_PRIVATE}'] = tf.cast(
        tf.math.divide_no_nan(
          tf.cast(number, tf.double), tf.cast(clients, tf.double)
        ),
        tf.float32,
      )
    return parts.join(by_part)

  def diagnose(state: Any, values: Any, measured: Any) -> Any:
    params = tff.federated_broadcast(tff.federated_map(params_of, state))
    counts = tff.federated_sum(tff.federated_map(are_clipped, (params, values)))
    return tff.federated_map(with_shares, (measured, counts))

  return diagnose


# The name by which aggregators are made.
private_mean = PrivateFactory
