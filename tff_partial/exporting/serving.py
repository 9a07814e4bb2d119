"""A trained model with all its weights, and its signatures on a device."""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import re
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial import contexts
from tff_partial import phases
from tff_partial import tiers
from tff_partial.client import local_training
from tff_partial.data import examples
from tff_partial.data import lengths
from tff_partial.exporting.errors import ExportError
from tff_partial.model import models
from tff_partial.model import preprocessing
from tff_partial.model import tracing
from tff_partial.solvers import linear_systems

PREDICT, RECONSTRUCT = 'predict', 'reconstruct'
TRAIN, INFER, RESET, RESTORE = 'train', 'infer', 'reset', 'restore'
COUNT, WEIGHT = 'count', 'weight'

_FROZEN = 'frozen'

Tensors = Mapping[str, tf.Tensor]


class Fields:
  """Named inputs or outputs for a structure of tensors.

  Attributes:
    specs: Name to spec.
  """

  def __init__(self, structure: Any, path: str):
    """Name the tensors.

    Args:
      structure: Structure of specs.
      path: Name of the structure, and of a single tensor.
    """
    self._structure = structure
    flat = tf.nest.flatten(structure)
    places = tf.nest.pack_sequence_as(structure, list(range(len(flat))))
    paths = {place: name for name, place in examples.leaves(places, path)}
    names = names_of(paths[place] for place in range(len(flat)))
    self.specs = dict(zip(names, flat, strict=True))

  def packed(self, given: Tensors) -> Any:
    """Return the structure of tensors given by name."""
    flat = [given[name] for name in self.specs]
    return tf.nest.pack_sequence_as(self._structure, flat)

  def flat(self, structure: Any) -> dict[str, tf.Tensor]:
    """Return the tensors of a structure by name."""
    tf.nest.assert_same_structure(structure, self._structure)
    return dict(zip(self.specs, tf.nest.flatten(structure), strict=True))

  def batched(self, size: int | None) -> dict[str, tf.TensorSpec]:
    """Return specs of `size` examples, or of any number if None."""
    return {
      name: tf.TensorSpec([size, *spec.shape], spec.dtype)
      for name, spec in self.specs.items()
    }


def names_of(paths: Iterable[str]) -> list[str]:
  """Return distinct names of letters, digits and underscores for paths."""
  names: list[str] = []
  for path in paths:
    name = re.sub(r'\W+', '_', path).strip('_')
    while name in names:
      name += '_'
    names.append(name)
  return names


class _NoServer:
  """What a device has in place of the server's state."""

  def __getitem__(self, name: str) -> Any:
    raise ExportError(
      f'reconstruct: clients of the process read {name!r} of the state that '
      'the server sends them, which a device does not have. Save the Keras '
      'model of one client, which `tff_partial.personalise` makes, or give '
      'phases.'
    )


class Serving(tf.Module):
  """A model with the weights of all tiers, one user's as its state.

  Attributes:
    variable_of: Name of an input or output to its local variable.
  """

  def __init__(
    self,
    model: models.PartialModel,
    values: Mapping[str, np.ndarray],
    work: Sequence[phases.Phase],
    lifted: Mapping[str, preprocessing.Lifted],
    *,
    seed: np.ndarray,
    num_support: int,
    num_predicted: int | None,
    weighted: bool,
  ):
    """Create the variables.

    Args:
      model: The model.
      values: Name to value of each variable; for local ones, the initial value.
      work: The phases that train local variables.
      lifted: The layers that stood first and are to be part of it, by input.
      seed: int32 `[2]`, seed of all random draws in training.
      num_support: Largest number of examples to train on.
      num_predicted: Number of examples to predict for; None for any number.
      weighted: True if examples have weights.
    """
    super().__init__()
    if weighted and not work:
      raise ExportError(
        'weighted=True: devices train nothing that weights of examples could '
        'count in. Leave it out.'
      )
    self._model = model
    self._work = [
      dataclasses.replace(p, weights_fn=self._read_here) for p in work
    ]
    self._seed = seed
    self._num_support = num_support
    self._num_predicted = num_predicted
    self._weighted = weighted
    local = model.specs(tiers.LOCAL)
    self.variable_of = dict(
      zip(names_of(f'local_{name}' for name in local), local, strict=True)
    )
    self._first = {name: values[name] for name in local}
    self._held = {
      name: tf.Variable(value, trainable=False, name=name)
      for name, value in values.items()
    }
    self._lifted = tuple(lifted.items())
    self._layers = [each.layer for each in lifted.values()]  # With tables.
    inputs = model.example_spec['x']
    self._x = Fields(
      preprocessing.changed(inputs, lifted, lambda layer, _: layer.raw), 'x'
    )
    self._y = Fields(model.example_spec['y'], 'y')
    self._predictions = Fields(model.prediction_spec, 'predictions')

  def signatures(self) -> dict[str, Any]:
    """Trace the signatures for a device and return them by name."""
    local = {
      name: self._model.specs(tiers.LOCAL)[variable]
      for name, variable in self.variable_of.items()
    }
    asked = self._x.batched(self._num_predicted)
    made = {
      PREDICT: self._traced(
        lambda given: self._predict(self._local_of(given), given),
        {**asked, **local},
      )
    }
    if not local:
      return made
    support = {
      **self._x.batched(self._num_support),
      **self._y.batched(self._num_support),
      COUNT: tf.TensorSpec([], tf.int32),
    }
    if self._weighted:
      weight = self._model.example_spec['weight']
      support[WEIGHT] = tf.TensorSpec(
        [self._num_support, *weight.shape], weight.dtype
      )
    # Traced once for both.
    steps = self._traced(self._reconstruct, {**support, **local})
    if self._work:
      made[RECONSTRUCT] = self._traced(
        lambda given: steps(*given.values(), *self._first_tensors().values()),
        support,
      )
      made[TRAIN] = self._traced(
        lambda given: self._keep(
          self._local_of(steps(*given.values(), *self._state().values()))
        ),
        support,
      )
    made[INFER] = self._traced(
      lambda given: self._predict(self._state(), given), asked
    )
    made[RESET] = self._traced(
      lambda given: self._keep(self._first_tensors()), {}
    )
    made[RESTORE] = self._traced(
      lambda given: self._keep(self._local_of(given)), local
    )
    return made

  def _traced(
    self,
    function: Callable[[dict[str, tf.Tensor]], Any],
    specs: Mapping[str, tf.TensorSpec],
  ) -> Any:
    names = list(specs)

    def call(*tensors: tf.Tensor) -> Any:
      with linear_systems.for_devices():
        return function(dict(zip(names, tensors, strict=True)))

    return tracing.traced(
      call,
      *(tf.TensorSpec(s.shape, s.dtype, name) for name, s in specs.items()),
    )

  def _first_tensors(self) -> dict[str, tf.Tensor]:
    return {name: tf.constant(value) for name, value in self._first.items()}

  def _local_of(self, given: Tensors) -> dict[str, tf.Tensor]:
    return {
      variable: given[name] for name, variable in self.variable_of.items()
    }

  def _state(self) -> dict[str, tf.Tensor]:
    return {name: self._held[name].read_value() for name in self._first}

  def _keep(self, local: Tensors) -> dict[str, tf.Tensor]:
    """Make weights the state and return them."""
    for name, tensor in local.items():
      self._held[name].assign(tensor)
    return self._named(local)

  def _named(self, local: Tensors) -> dict[str, tf.Tensor]:
    return {
      name: tf.identity(local[variable])
      for name, variable in self.variable_of.items()
    }

  def _read_here(self, weights: tiers.Weights) -> tiers.Weights:
    """Return weights, reading those that are not local at the call.

    If a loop captured them from outside, TFLite would write them twice.
    """
    here, frozen = self._weights(weights[tiers.LOCAL])
    return collections.OrderedDict(here, **{_FROZEN: frozen})

  def _weights(self, local: Tensors) -> tuple[tiers.Weights, Any]:
    """Return weights by tier, and the frozen ones."""
    held = {
      name: variable.read_value()
      for name, variable in self._held.items()
      if name not in self._first
    }
    held.update(local)
    model = self._model
    weights = tiers.mapped(
      lambda _, name, spec: held.pop(name),
      {tier: model.specs(tier) for tier in model.tiers},
    )
    return weights, collections.OrderedDict(held)

  def _predict(self, local: Tensors, given: Tensors) -> dict[str, tf.Tensor]:
    weights, frozen = self._weights(local)
    predictions, _ = self._model.predict(
      weights,
      frozen,
      self._inputs(given),
      training=False,
      seed=tf.constant(self._seed),
    )
    return self._predictions.flat(
      tf.nest.map_structure(tf.identity, predictions)
    )

  def _inputs(self, given: Tensors) -> Any:
    """Return the inputs of the trained part."""
    return preprocessing.changed(
      self._x.packed(given),
      dict(self._lifted),
      lambda layer, tensor: layer.layer(tensor),
    )

  def _reconstruct(self, given: Tensors) -> dict[str, tf.Tensor]:
    """Train local weights as a client does in the simulation."""
    weights, frozen = self._weights(self._local_of(given))
    specs, inputs = self._model.example_spec, self._inputs(given)
    weight = given.get(WEIGHT)
    if weight is None:
      pairs = zip(
        tf.nest.flatten(inputs), tf.nest.flatten(specs['x']), strict=True
      )
      steps = [tf.shape(x)[1] for x, spec in pairs if lengths.is_open(spec)]
      shape = [steps[0] if n is None else n for n in specs['weight'].shape]
      weight = tf.ones([self._num_support, *shape], specs['weight'].dtype)
    context = contexts.ClientContext(
      self._model,
      weights,
      weights,
      frozen,
      collections.OrderedDict(x=inputs, y=self._y.packed(given), weight=weight),
      # A count that is too large means all examples.
      tf.clip_by_value(given[COUNT], 0, self._num_support),
      tf.constant(self._seed),
      server=_NoServer(),
    )
    done = local_training.run(self._work, context).weights[tiers.LOCAL]
    # A client whose weights are not finite keeps those that it had. TFLite has
    # no operation `IsFinite`.
    are_finite = [tf.abs(t) <= t.dtype.max for t in done.values()]
    is_finite = tf.reduce_all([tf.reduce_all(each) for each in are_finite])
    before = weights[tiers.LOCAL]
    return self._named(
      {n: tf.where(is_finite, t, before[n]) for n, t in done.items()}
    )
