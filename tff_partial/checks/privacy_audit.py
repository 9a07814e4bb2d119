"""Attacks with canaries that test a claimed epsilon.

A canary is a client that sends one number, as large as it can, in an element
that no other client uses. An observer of the releases guesses from that element
whether the canary took part. If the guesses are better than an epsilon allows,
the claim is wrong. An attack gives a lower bound; a failed one proves nothing.

`Canaries` are included in a whole training run, each by an independent coin,
and one run suffices for a bound: Steinke, Nasr and Jagielski 2023, "Privacy
Auditing with One (1) Training Run", theorem 5.2. `tasks.audit` applies it to
any recipe.
"""

import collections
from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial import aggregators
from tff_partial import random_bits
from tff_partial.checks.audit_bounds import FEWEST_GUESSES
from tff_partial.data import cohorts
from tff_partial.dp import mechanisms
from tff_partial.errors import PrivacyError
from tff_partial.exchange import messages

# Larger than any clip.
_LOUD = 1e6


class TooManyCanariesError(PrivacyError):
  """Raised for more canaries than a run can include.

  Attributes:
    largest: The largest possible number.
  """

  def __init__(self, number: int, largest: int, why: str):
    super().__init__(
      f'{number} canaries are too many: {why}. Give {max(largest, 0)} or fewer.'
    )
    self.largest = largest


# ---- in one training run -----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Canaries:
  """Clients that are each present or absent, by an independent coin.

  They learn nothing: each sends one element of the update as large as it can,
  and the other clients leave these elements at zero. Build a process with
  `postprocess_update` and `watched`, and train it with `among` as its clients;
  `scores` are in its final state.

  Attributes:
    number: Number of canaries.
    seed: Seed of the coins and of the choice of elements.
  """

  number: int
  seed: int

  def __post_init__(self) -> None:
    if self.number < FEWEST_GUESSES:
      raise PrivacyError(
        f'{self.number} canaries prove nothing: give {FEWEST_GUESSES} or more.'
      )

  @functools.cached_property
  def present(self) -> np.ndarray:
    """True for canaries that are present, bool `[number]`."""
    draw = random_bits.generator(self.seed, 'canaries', 'coins')
    return draw.integers(0, 2, self.number).astype(bool)

  @functools.cached_property
  def ids(self) -> tuple[str, ...]:
    """Their ids as clients."""
    return tuple(f'canary {place}' for place in range(self.number))

  @functools.cached_property
  def seeds(self) -> np.ndarray:
    """Their seeds in every round, int32 `[number, 2]`."""
    return random_bits.derive_each((self.seed, 'canary'), self.ids)

  @functools.cached_property
  def sending_seeds(self) -> np.ndarray:
    """The seeds with which they send, which identify them when they do."""
    with tf.init_scope():
      to_sending = tf.function(
        lambda seeds: tf.map_fn(messages.sending_seed, seeds)
      )
      return to_sending(tf.constant(self.seeds)).numpy()

  def among(self, clients: cohorts.ClientSource) -> cohorts.ClientSource:
    """Add the canaries that are present to the clients of a run."""
    return _WithCanaries(clients, self)

  def postprocess_update(
    self, then: messages.PostprocessUpdate | None = None
  ) -> messages.PostprocessUpdate:
    """Return the clients' work before sending, with canaries among them.

    Args:
      then: Their work without canaries, such as adding noise.
    """
    return _Sending(self, then)

  def watched(
    self, aggregator: aggregators.Factory
  ) -> aggregators.WeightedFactory:
    """Return the same aggregation, which also sums the canaries' releases."""
    return _WatchedFactory(self, aggregator)

  def scores(self, state: Any) -> np.ndarray:
    """Return the sums of the releases of each canary's element, after a run."""
    return np.asarray(state.aggregator['scores'])

  def check_delta(self, num_clients: int, delta: float) -> None:
    """Check that delta stays below 1 / population with the canaries.

    Args:
      num_clients: Number of other clients.
      delta: The delta of the guarantee.
    """
    largest = math.ceil(1.0 / delta) - 1 - num_clients
    if 0 <= largest < self.number:
      raise TooManyCanariesError(
        self.number,
        largest,
        f'they count as clients, of whom there are {num_clients} beside them, '
        f'and delta, {delta:g}, must be below 1 / population',
      )

  def places(self, sizes: Sequence[int]) -> np.ndarray:
    """Return the index of each canary's element, int32 `[number]`.

    Args:
      sizes: Number of elements of each tensor of the update.

    Raises:
      TooManyCanariesError: If there are more canaries than elements.
    """
    if self.number > sum(sizes):
      raise TooManyCanariesError(
        self.number,
        sum(sizes),
        f'each needs an element of the update, which has {sum(sizes)}',
      )
    draw = random_bits.generator(self.seed, 'canaries', 'places')
    return draw.permutation(sum(sizes))[: self.number].astype(np.int32)


@dataclasses.dataclass(frozen=True)
class _WithCanaries:
  """Clients with canaries among them; a `ClientSource`."""

  clients: cohorts.ClientSource
  canaries: Canaries

  @property
  def example_spec(self) -> Any:
    return self.clients.example_spec

  @functools.cached_property
  def client_ids(self) -> tuple[str, ...]:
    return (*self.clients.client_ids, *self.canaries.ids)

  def fingerprint(self, sample: int | None = None) -> str:
    return f'{self.clients.fingerprint(sample)} with {self.canaries}'

  @functools.cached_property
  def _place_of(self) -> dict[str, int]:
    return {canary: place for place, canary in enumerate(self.canaries.ids)}

  def cohort(
    self, client_ids: Sequence[str], seeds: np.ndarray
  ) -> cohorts.Cohort:
    # A canary gets some client's examples, which do not matter.
    stand_in = self.clients.client_ids[0]
    coming, examined, drawn = [], [], []
    for client, seed in zip(client_ids, seeds, strict=True):
      place = self._place_of.get(client)
      if place is None or self.canaries.present[place]:
        coming.append(client)
        examined.append(client if place is None else stand_in)
        drawn.append(seed if place is None else self.canaries.seeds[place])
    found = self.clients.cohort(
      examined, np.array(drawn, np.int32).reshape([-1, 2])
    )
    return cohorts.Cohort(coming, found.groups)


@dataclasses.dataclass(frozen=True)
class _Sending:
  """Update hook that lets canaries send; see `Canaries.postprocess_update`."""

  canaries: Canaries
  then: messages.PostprocessUpdate | None

  @property
  def mechanism(self) -> mechanisms.Mechanism | None:
    """The mechanism of `then`."""
    return getattr(self.then, 'mechanism', None)

  def __call__(self, update: Any, seed: tf.Tensor) -> Any:
    leaves = tf.nest.flatten(update)
    sizes = [leaf.shape.num_elements() for leaf in leaves]
    places = self.canaries.places(sizes)
    is_own = tf.reduce_all(tf.equal(self.canaries.sending_seeds, seed), -1)
    loud = tf.scatter_nd(
      places[:, np.newaxis], _LOUD * tf.cast(is_own, tf.float32), [sum(sizes)]
    )
    # Only canaries send these elements.
    is_free = np.ones([sum(sizes)], np.float32)
    is_free[places] = 0.0
    is_canary = tf.reduce_any(is_own)
    sent = []
    for leaf, own, free in zip(
      leaves,
      tf.split(loud, sizes),
      np.split(is_free, np.cumsum(sizes)[:-1]),
      strict=True,
    ):
      own, free = (
        tf.cast(tf.reshape(part, leaf.shape), leaf.dtype)
        for part in (own, free)
      )
      sent.append(tf.where(is_canary, own, leaf * free))
    update = tf.nest.pack_sequence_as(update, sent)
    return update if self.then is None else self.then(update, seed)


class _WatchedFactory(tff.aggregators.WeightedAggregationFactory):
  """Aggregation that sums canaries' releases; see `Canaries.watched`."""

  def __init__(self, canaries: Canaries, aggregator: aggregators.Factory):
    self._canaries = canaries
    self._aggregator = aggregators.as_weighted(aggregator)
    self.mechanism = getattr(aggregator, 'mechanism', None)

  def create(
    self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    process = self._aggregator.create(value_type, weight_type)
    specs = tf.nest.flatten(tff.types.type_to_tf_tensor_specs(value_type))
    places = self._canaries.places([s.shape.num_elements() for s in specs])
    result_type = process.next.type_signature.result.result.member

    @tff.tensorflow.computation
    def zeros() -> Any:
      return tf.zeros([self._canaries.number])

    @tff.tensorflow.computation(zeros.type_signature.result, result_type)
    def add(scores: Any, result: Any) -> Any:
      flat = [
        tf.cast(tf.reshape(leaf, [-1]), tf.float32)
        for leaf in tf.nest.flatten(result)
      ]
      return scores + tf.gather(tf.concat(flat, 0), places)

    @tff.federated_computation
    def initialize() -> Any:
      return tff.federated_zip(
        collections.OrderedDict(
          inner=process.initialize(),
          scores=tff.federated_eval(zeros, tff.SERVER),
        )
      )

    @tff.federated_computation(
      initialize.type_signature.result,
      tff.FederatedType(value_type, tff.CLIENTS),
      tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state: Any, value: Any, weight: Any) -> Any:
      output = process.next(state['inner'], value, weight)
      scores = tff.federated_map(add, (state['scores'], output.result))
      return tff.templates.MeasuredProcessOutput(
        tff.federated_zip(
          collections.OrderedDict(inner=output.state, scores=scores)
        ),
        output.result,
        output.measurements,
      )

    return tff.templates.AggregationProcess(initialize, next_fn)
