"""Tree aggregation (DP-FTRL) with reproducible noise.

Sums are computed as in `dp_queries`; the tree is tensorflow-privacy's. Kairouz
et al. 2021, "Practical and Private (Deep) Learning without Sampling or
Shuffling"; Honaker 2015 for the estimate.
"""

import math
from typing import Any, NamedTuple

import dp_accounting
import numpy as np
import tensorflow as tf
import tensorflow_privacy as tfp

from tff_partial import random_bits
from tff_partial.dp import dp_queries


class _NodeState(NamedTuple):
  """The next node of a tree: the seed, int32 `[2]`, and its number."""

  seed: tf.Tensor
  node: tf.Tensor


class _TreeNoise(tfp.tree_aggregation.ValueGenerator):
  """Noise for the nodes of a tree, float32, in clips."""

  def __init__(
    self, specs: Any, noise_multiplier: float, seed: dp_queries.MakeSeed
  ):
    self._specs, self._make_seed = specs, seed
    self._noise_multiplier = noise_multiplier

  def initialize(self) -> _NodeState:
    return _NodeState(self._make_seed(), tf.constant(0))

  def next(self, state: _NodeState) -> tuple[Any, _NodeState]:
    seed = random_bits.fold_in(state.seed, state.node)
    noise = tf.nest.map_structure(
      lambda leaf: tf.cast(self._noise_multiplier * leaf, tf.float32),
      dp_queries.structure_of_noise(seed, self._specs),
    )
    return noise, state._replace(node=state.node + 1)


class TreeState(NamedTuple):
  """The state of `TreeResidualSumQuery`.

  Attributes:
    tree: State of `tfp.tree_aggregation.EfficientTreeAggregator`, with the
      seed.
    previous: Noise of the cumulative sum so far.
    round: Number of rounds in the current tree so far.
    clip: The largest L2 norm of a record.
  """

  tree: Any
  previous: Any
  round: tf.Tensor
  clip: tf.Tensor


class TreeResidualSumQuery(dp_queries.PrivateSumQuery):
  """Tree aggregation (DP-FTRL): `tfp.TreeResidualSumQuery` with seeds.

  The noise of the sum of all rounds so far grows with the logarithm of their
  number; a round's noise is the difference between successive cumulative sums.
  """

  def __init__(
    self,
    clip: float,
    noise_multiplier: float,
    seed: dp_queries.MakeSeed,
    *,
    specs: Any,
    rounds_per_tree: int,
  ):
    """Store the parameters; the noise multiplier is that of a node."""
    super().__init__(clip, noise_multiplier, seed)
    self._specs, self._rounds = specs, rounds_per_tree
    self._tree = tfp.tree_aggregation.EfficientTreeAggregator(
      _TreeNoise(specs, noise_multiplier, seed)
    )

  def _zeros(self) -> Any:
    return tf.nest.map_structure(lambda s: tf.zeros(s.shape), self._specs)

  def initial_global_state(self) -> TreeState:
    """Make the seed and the first node."""
    return TreeState(
      self._tree.init_state(),
      self._zeros(),
      tf.constant(0),
      tf.constant(self._clip, tf.float32),
    )

  def get_noised_result(
    self, sample_state: Any, global_state: TreeState
  ) -> tuple[Any, TreeState, dp_accounting.DpEvent]:
    """Add the growth of the tree's noise; start a new tree when due."""
    noise, tree = self._tree.get_cumsum_and_update(global_state.tree)
    in_clips = tf.nest.map_structure(
      lambda total, new, old: dp_queries.on_grid(
        total + tf.cast(new, tf.double) - tf.cast(old, tf.double),
        self.noise_multiplier,
      ),
      dp_queries.from_units(sample_state),
      noise,
      global_state.previous,
    )
    round_number = global_state.round + 1
    tree, noise, round_number = tf.cond(
      tf.equal(round_number, self._rounds),
      lambda: (self._tree.reset_state(tree), self._zeros(), tf.constant(0)),
      lambda: (tree, noise, round_number),
    )
    after = TreeState(tree, noise, round_number, global_state.clip)
    # The cost depends on the tree's other rounds; see `samplings.OncePerTree`.
    event = dp_accounting.UnsupportedDpEvent()
    return dp_queries.in_sizes_of(in_clips, global_state.clip), after, event

  def _stddev(self, state: TreeState) -> tf.Tensor:
    factors = tf.constant(residual_stddevs(self._rounds), tf.float32)
    number = state.round + 1
    # The lowest set bit gives the level of the tree that is completed.
    lowest = tf.bitwise.bitwise_and(number, -number)
    level = tf.reduce_sum(
      tf.cast(tf.greater(lowest, 2 ** np.arange(31, dtype=np.int32)), tf.int32)
    )
    return super()._stddev(state) * factors[level]


def residual_stddevs(rounds: int) -> list[float]:
  """Return standard deviations of a round's noise, by level, in a node's.

  A round completes a level of the tree: round `t`, counted from 1, completes
  the level of the lowest set bit of `t`. In Honaker's estimate a node of level
  `k` has the weight `1 / (2 - 2**-k)` and is half the sum of both below it,
  plus its own noise. So its noise has the variance `2 - 2**-k`, and contains
  that of the left nodes under it, which the previous cumulative sum also had.

  Args:
    rounds: Number of rounds of a tree.
  """
  variances = [2.0 - 2.0**-level for level in range(rounds.bit_length())]
  stddevs = []
  for level, variance in enumerate(variances):
    fresh, changed = variance, 0.0
    for left in range(level):
      part = 2.0 ** (left - level)
      fresh -= part**2 * variances[left]
      change = part / variance - 1.0 / variances[left]
      changed += change**2 * variances[left]
    stddevs.append(math.sqrt(fresh / variance**2 + changed))
  return stddevs
