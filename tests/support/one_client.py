"""One client's phases, run outside of any round."""

import collections
import types
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial import contexts
from tff_partial import phases
from tff_partial import tiers
from tff_partial.client import client_metrics
from tff_partial.client import client_work
from tff_partial.client import local_training
from tff_partial.client import work as work_lib
from tff_partial.model import models
from tff_partial.model import tracing
from tff_partial.phases import Phase
from tff_partial.sparse import lookups

SEED = np.array([8, 9], np.int32)


def _pad(array: np.ndarray, capacity: int) -> np.ndarray:
  missing = capacity - len(array)
  return np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))


class Client:
  """Runs phases on one client, traced once for all sizes."""

  def __init__(
    self,
    model: models.PartialModel,
    *work: Phase | phases.Interleaved,
    jit: bool = False,
    tables: lookups.Tables | None = None,
  ):
    self.model = model
    self._has_copy = work_lib.needs_personal_copy(work)
    self._spec = client_work.example_spec_of(model, work)

    def run(weights, examples, count, seed):
      frozen = model.frozen_weights()
      context = contexts.ClientContext(
        model, weights, weights, frozen, examples, count, seed
      )
      done = local_training.run(work, context, tables)
      known = {**done._asdict(), 'weights': done.weights, 'group': done.group}
      del known['context']
      return known

    example_specs = tf.nest.map_structure(
      lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), self._spec
    )
    weight_specs = collections.OrderedDict(
      (tier, model.specs(tier)) for tier in model.tiers
    )
    if self._has_copy:
      weight_specs[tiers.PERSONAL] = model.specs(tiers.GLOBAL)
    traced = tracing.traced(
      run,
      weight_specs,
      example_specs,
      tf.TensorSpec([], tf.int32),
      tf.TensorSpec([2], tf.int32),
    )
    if jit:
      traced = tf.function(traced, jit_compile=True, autograph=False)
    self.traced = traced

  def first_weights(self) -> tiers.Weights:
    """First values; a copy of the global weights has others than they."""
    first = collections.OrderedDict(
      (tier, self.model.initial_weights(tier, SEED))
      for tier in self.model.tiers
    )
    if self._has_copy:
      first[tiers.PERSONAL] = self.model.initial_weights(tiers.GLOBAL, SEED + 1)
    return first

  def arguments(
    self,
    fields: dict[str, Any],
    capacity: int | None = None,
    seed: np.ndarray = SEED,
    weights: tiers.Weights | None = None,
  ) -> list[Any]:
    """What is traced is called with: examples are padded to a capacity."""
    count = len(fields['y'])
    fields = {'weight': np.ones([count], np.float32), **fields}
    examples = collections.OrderedDict(
      (
        name,
        tf.nest.map_structure(
          lambda array: tf.constant(_pad(array, capacity or count)),
          fields[name],
        ),
      )
      for name in self._spec
    )
    weights = weights or self.first_weights()
    return [weights, examples, tf.constant(count), tf.constant(seed)]

  def __call__(self, *given: Any, **options: Any) -> Any:
    done = self.traced(*self.arguments(*given, **options))
    return types.SimpleNamespace(
      **tf.nest.map_structure(lambda t: t.numpy(), done)
    )

  def measure(self, done: Any) -> dict[str, float]:
    """The metrics of what was done."""
    states = client_metrics.unfinalized_metrics(done)
    finalizers = client_metrics.metric_finalizers(self.model)
    return {
      name: finalize(states[name]).numpy()
      for name, finalize in finalizers.items()
    }
