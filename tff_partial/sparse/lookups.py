"""Tables whose looked-up rows a client can train without the rest."""

import collections
from collections.abc import Callable, Mapping
import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial import contexts
from tff_partial import phases
from tff_partial import random_bits
from tff_partial import tiers
from tff_partial.arguments import optimizers
from tff_partial.model import models
from tff_partial.model import tracing
from tff_partial.sparse import rows

# Maps frozen weights and inputs to lookup ids.
Find = Callable[[Any, Any], rows.Lookups]

# Number of random examples that a model is tried on.
_TRIED = 8


class Tables:
  """The GLOBAL tables that a client can train by rows.

  A table is trained as a whole if the model also uses it otherwise, as in a
  regularizer; if an optimizer other than plain gradient descent, or a term,
  might move rows that no example looks up; if its ids do not follow from each
  example alone; or if clients read copies, or compute or overwrite something.
  """

  def __init__(self, model: models.PartialModel, work: phases.Work):
    """Find the tables that clients' work trains by rows."""
    self._specs = {
      name: spec
      for name, spec in model.specs(tiers.GLOBAL).items()
      if name in model.only_looked_up and _moves_by_rows(name, work)
    }
    self._find = _finder(model, self._specs) if self._specs else None

  @property
  def names(self) -> tuple[str, ...]:
    """The names of the tables' variables."""
    return tuple(self._specs) if self._find else ()

  def choose(
    self, frozen: tiers.NamedTensors, inputs: Any, count: tf.Tensor
  ) -> dict[str, rows.ChosenRows]:
    """Choose the rows of each table that a client's real examples look up."""
    if self._find is None:
      return {}
    return {
      name: rows.choose(ids, count, self._specs[name].shape[0])
      for name, ids in self._find(frozen, inputs).items()
    }

  def num_rows(
    self, frozen: tiers.NamedTensors, inputs: Any, count: Any
  ) -> dict[str, int]:
    """Count the rows of each table that a client's real examples look up."""
    return {
      name: len(np.unique(np.concatenate([np.ravel(i[:count]) for i in found])))
      for name, found in self._traced_find(frozen, inputs).items()
    }

  @functools.cached_property
  def _traced_find(self) -> Find:
    return tf.function(self._find, autograph=False, reduce_retracing=True)


class RowModel:
  """A client's model that reads some rows of tables instead of the tables.

  Attributes:
    weights: The weights to train: rows in place of tables.
    places: For each table and lookup, the indices of each example's rows; a
      field of the examples that `predict` reads.
  """

  def __init__(self, tables: Tables | None, context: contexts.ClientContext):
    """Choose the rows that the client's examples look up in the tables."""
    self._context = context
    self._chosen: dict[str, rows.ChosenRows] = {}
    if tables is not None:
      self._chosen = tables.choose(
        context.frozen, context.examples['x'], context.count
      )
    self._tables: tiers.NamedTensors = context.weights.get(
      tiers.GLOBAL, collections.OrderedDict()
    )
    self._rows = {
      name: chosen.of(self._tables[name])
      for name, chosen in self._chosen.items()
    }
    self.weights = _with(context.weights, self._rows)
    self.places = {n: chosen.places for n, chosen in self._chosen.items()}

  def predict(
    self,
    weights: tiers.Weights,
    batch: Mapping[str, Any],
    *,
    training: bool,
    seed: tf.Tensor,
  ) -> tuple[Any, Any, Any]:
    """Return the model's predictions for a batch, losses, and new states.

    Weights are rows in place of tables; examples have `places`.
    """
    stand_ins = {
      name: rows.Rows(
        name,
        self._tables[name].shape[0],
        weights[tiers.GLOBAL][name],
        tuple(found),
      )
      for name, found in batch['places'].items()
    }
    with rows.reading():
      return self._context.model.call(
        _with(weights, stand_ins),
        self._context.frozen,
        batch['x'],
        training=training,
        seed=seed,
      )

  def whole(
    self, context: contexts.ClientContext
  ) -> tuple[contexts.ClientContext, dict[str, rows.Change]]:
    """Return the trained context with whole tables, and the rows' changes."""
    after = context.weights.get(tiers.GLOBAL, self._tables)
    # A whole table is computed only if it is read.
    tables = {
      name: chosen.within(self._tables[name], after[name])
      for name, chosen in self._chosen.items()
    }
    received = {name: self._tables[name] for name in self._chosen}
    changes = {
      name: rows.Change(chosen.ids, self._rows[name] - after[name])
      for name, chosen in self._chosen.items()
    }
    context = context._replace(
      weights=_with(context.weights, tables),
      received=_with(context.received, received),
    )
    return context, changes


def _moves_by_rows(name: str, work: phases.Work) -> bool:
  """Return True if work moves only looked-up rows of a table."""
  active = [phase for phase in phases.all_phases(work) if phase.max_steps != 0]
  training = [
    phase
    for phase in active
    if tiers.GLOBAL in phase.train and phase.trains(name)
  ]
  return (
    bool(training)
    and not any(
      phase.terms or phase.read is not tiers.server_and_local_weights
      for phase in active
    )
    and not any(
      isinstance(part, contexts.Compute | contexts.OverwriteWeights)
      for part in work
    )
    and all(
      optimizers.is_plain_descent(phase.optimizer_of(tiers.GLOBAL))
      for phase in training
    )
  )


def _with(weights: tiers.Weights, tables: Mapping[str, Any]) -> tiers.Weights:
  """Return weights by tier with the tables replaced."""
  weights = collections.OrderedDict(weights)
  if tables:
    weights[tiers.GLOBAL] = collections.OrderedDict(
      weights[tiers.GLOBAL], **tables
    )
  return weights


def _finder(
  model: models.PartialModel, tables: Mapping[str, tf.TensorSpec]
) -> Find | None:
  """Build a function that finds ids, if each example determines its own."""

  def look_up(
    frozen: Any, inputs: Any, weights: Any, seed: Any, values: Any
  ) -> Any:
    stand_ins = {
      name: rows.Rows(name, spec.shape[0], values[name], ())
      for name, spec in tables.items()
    }
    found = []
    for training in (True, False):
      with rows.reading() as ids:
        model.predict(
          _with(weights, stand_ins),
          frozen,
          inputs,
          training=training,
          seed=seed,
        )
      found.append(ids)
    return found

  frozen = model.frozen_weights()
  specs = [
    tf.nest.map_structure(tf.TensorSpec.from_tensor, frozen),
    tf.nest.map_structure(
      lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype),
      model.example_spec['x'],
    ),
    collections.OrderedDict((tier, model.specs(tier)) for tier in model.tiers),
    random_bits.SEED_SPEC,
    {
      name: tf.TensorSpec([1, *spec.shape[1:]], spec.dtype)
      for name, spec in tables.items()
    },
  ]
  num_known = len(tf.nest.flatten(specs[:2]))
  try:
    traced = tracing.traced(look_up, *specs)
    if tracing.depends_on(traced.outputs, traced.inputs[num_known:]):
      return None
    find = tracing.without_assertions(traced, num_known)

    def find_both(frozen: Any, inputs: Any) -> Any:
      """Return ids in training, and in evaluation."""
      found = find(*tf.nest.flatten([frozen, inputs]))
      return tf.nest.pack_sequence_as(traced.structured_outputs, found)

    tried = tracing.traced(find_both, *specs[:2])
    if not _follows_from_examples(functools.partial(tried, frozen), specs[1]):
      return None
  except (AttributeError, TypeError, ValueError, tf.errors.OpError):
    return None  # A table has other uses, or not every example looks it up.
  return lambda frozen, inputs: find_both(frozen, inputs)[0]


def _follows_from_examples(
  find: Callable[[Any], Any], inputs_spec: Any
) -> bool:
  """Check that ids do not depend on the rest of the batch."""
  draw = np.random.default_rng(0)

  def drawn(spec: tf.TensorSpec) -> tf.Tensor:
    # Zeros and ones are ids in any table.
    shape = [_TRIED, *(2 if n is None else n for n in spec.shape[1:])]
    numbers = tf.constant(draw.integers(0, 2, shape))
    if spec.dtype == tf.string:
      return tf.strings.as_string(numbers)
    return tf.cast(numbers, spec.dtype)

  def alone(place: int) -> Any:
    own = slice(place, place + 1)
    return find(tf.nest.map_structure(lambda t: t[own], inputs))[0]

  inputs = tf.nest.map_structure(drawn, inputs_spec)
  training, measuring = find(inputs)
  one_by_one = tf.nest.map_structure(
    lambda *parts: tf.concat(parts, 0), *map(alone, range(_TRIED))
  )
  try:
    for other in (measuring, one_by_one):
      tf.nest.map_structure(np.testing.assert_array_equal, training, other)
  except AssertionError:
    return False
  return all(ids.shape[0] == _TRIED for ids in tf.nest.flatten(training))
