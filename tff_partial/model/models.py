"""Partially local models: pure functions over named weights in three tiers.

`from_keras` takes any Keras model and a rule that selects its local variables.
The result has no variables: it is a function from weights to predictions.
"""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
import copy
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial import random_bits
from tff_partial import tiers as tiers_lib
from tff_partial.arguments import checked_numbers
from tff_partial.arguments import spelling
from tff_partial.data import examples as examples_lib
from tff_partial.data import id_ranges
from tff_partial.model import client_tables
from tff_partial.model import keras_analysis
from tff_partial.model import keras_filling
from tff_partial.model import keras_metrics
from tff_partial.model import loss_scaling
from tff_partial.model import losses
from tff_partial.model import open_lengths
from tff_partial.model import preprocessing
from tff_partial.model import seeded_draws
from tff_partial.model import states
from tff_partial.model import traced_checks
from tff_partial.model.keras_variables import ModelError
from tff_partial.model.losses import classes
from tff_partial.model.losses import LossFn
from tff_partial.model.losses import LossValue


class PartialModel:
  """A model with a shared part and a part that stays with each client.

  Attributes:
    build: Makes the Keras model that is trained.
    spec: All its variables and layers, and one example's inputs and outputs.
    variables: All its variables, in order of creation.
    tier_of: Variable name to tier.
    num_groups: Number of copies of the GROUP variables at the server.
    client_tables: The tables that are sized per client.
    example_spec: The fields of an example that the model reads: x, y, weight.
    prediction_spec: Specs of one example's prediction.
    replaced_spec: Specs of what a phase's `predict_fn` returns in its place.
    compared: Returns the part of that which the loss compares with labels.
    metrics: Keras metrics as pure functions.
    loss_function: The loss, a function or a Keras loss.
    given_values: First values that were given rather than drawn, by name.
    is_regularized: True if layers add losses of weights.
    only_looked_up: Names of the trainable tables of which only rows are read.
    state: Names of the variables that layers change and no gradients move.
    variances: Name of each moving variance to that of its moving mean.
    seed: Draws the first values of the global weights.
  """

  def __init__(
    self,
    build: preprocessing.Lifting,
    functions: states.ModelFunctions,
    tier_of: Mapping[str, str],
    *,
    num_groups: int,
    loss: LossFn | tf.keras.losses.Loss,
    class_weight: Mapping[int, float] | None,
    metrics: keras_metrics.Metrics,
    labels: tf.TensorSpec,
    weights: tf.TensorSpec,
    initial_values: Sequence[Mapping[str, np.ndarray]],
    seed: int,
  ):
    """See `from_keras`."""
    self.spec = spec = functions.spec
    self.build = build
    self._functions = functions
    # From the values of `variables` to those of the Keras model's.
    self._compute: Callable[[dict[str, Any]], dict[str, Any]] = dict
    self.num_groups = num_groups
    self._initial_values = initial_values
    self.prediction_spec = spec.outputs
    self.example_spec = examples_lib.ExampleSpec(
      [('x', spec.inputs), ('y', labels), ('weight', weights)],
      lifted=build.layers,
    )
    with traced_checks.explaining(self):
      self.metrics = keras_metrics.PureMetrics(
        metrics, labels, spec.outputs, weights, getattr(loss, 'places', None)
      )
    checked_numbers.check_whole(ModelError, seed=seed)
    self.seed = seed
    self.loss_function = loss
    # What a measured phase's `predict_fn` returns, and the part of it that the
    # loss compares with labels.
    self.replaced_spec = spec.outputs
    self.compared: Callable[[Any], Any] = lambda predictions: predictions
    self._class_weights = None
    if class_weight is not None:
      self._class_weights = losses.ClassWeights(
        class_weight, labels, spec.outputs
      )
    ids = self._set_variables(spec.variables, tier_of, initial_values[0])
    weighted = self._class_weights.ids if self._class_weights else {}
    self.example_spec.ids = {
      **ids,
      **weighted,
      **classes(labels, spec.outputs, loss),
    }
    open_lengths.check(self, functions)

  def _set_variables(
    self,
    variables: Sequence[keras_analysis.VariableSpec],
    tier_of: Mapping[str, str],
    given_values: Mapping[str, np.ndarray],
  ) -> id_ranges.Ids:
    """Set the variables; return the inputs that are row ids."""
    self.variables = tuple(variables)
    self.spec = self.spec._replace(variables=self.variables)
    self.tier_of = dict(tier_of)
    self.state = frozenset(v.name for v in self.variables if v.is_state)
    self.variances = states.variances(self.state, tier_of)
    self.given_values = dict(given_values)
    sized = [v for v in self.variables if v.is_client_sized]
    self.client_tables = client_tables.ClientTables(
      {v.name: v.draw_rows for v in sized if v.draw_rows is not None}
    )
    self.only_looked_up, ids, self._mask, self.is_regularized = (
      traced_checks.trace(self)
    )
    self.check_loss()
    self.client_tables.check(self.only_looked_up, ids)
    return ids

  def with_variables(
    self,
    variables: Sequence[keras_analysis.VariableSpec],
    compute: Callable[[dict[str, Any]], dict[str, Any]],
    tier_of: Mapping[str, str],
    given_values: Mapping[str, np.ndarray],
  ) -> 'PartialModel':
    """Make the same model with other variables, for the same examples.

    Args:
      variables: Those from which this model's are computed.
      compute: From their values to those of this model's variables, by name; of
        tensors and of arrays. It may change the mapping that it is given.
      tier_of: Variable name to tier, for all variables.
      given_values: First values that are not drawn, by name.
    """
    model = copy.copy(self)
    model._compute = lambda values: self._compute(compute(values))
    model._set_variables(variables, tier_of, given_values)
    return model

  def with_replaced_predictions(
    self,
    spec: Any,
    compared: Callable[[Any], Any],
    metrics: keras_metrics.Metrics,
  ) -> 'PartialModel':
    """Make the model of an evaluation whose `predict_fn` replaces predictions.

    Args:
      spec: Specs of what `predict_fn` returns for one example.
      compared: Returns the part of it that the loss compares with labels: a
        prediction of this model.
      metrics: Metrics of labels and what `predict_fn` returns.
    """
    model = copy.copy(self)
    model.replaced_spec = spec
    model.compared = compared
    model.metrics = keras_metrics.PureMetrics(
      metrics, self.example_spec['y'], spec, self.example_spec['weight']
    )
    return model

  def __repr__(self) -> str:
    """Return a line for each variable by tier, and one for each field."""
    loss = self.loss_function
    said = getattr(loss, '__name__', type(loss).__name__)
    lines = [f'PartialModel with the loss {said}']
    if self._class_weights is not None:
      lines[0] += f', class weights {self._class_weights.values}'
    if self.metrics.names:
      lines[0] += f' and the metrics {", ".join(self.metrics.names)}'
    parts = {
      tier: (f' ({self.num_groups} copies)' if tier == tiers_lib.GROUP else '')
      for tier in self.tiers
    }
    frozen = [v for v in self.variables if not v.trainable]
    for tier, note in parts.items():
      lines += keras_analysis.described(f'{tier}{note}', self.trainable(tier))
    if frozen:
      lines += keras_analysis.described('never trained', frozen)
    lines += [f'  {line}' for line in repr(self.example_spec).split('\n')]
    return '\n'.join(lines)

  @property
  def tiers(self) -> tuple[str, ...]:
    """The tiers that hold trainable variables."""
    held = {self.tier_of[v.name] for v in self.variables if v.trainable}
    return tuple(tier for tier in tiers_lib.TIERS if tier in held)

  def trainable(self, tier: str) -> tuple[keras_analysis.VariableSpec, ...]:
    """Return the trainable variables of a tier."""
    return tuple(
      v for v in self.variables if v.trainable and self.tier_of[v.name] == tier
    )

  def specs(self, tier: str) -> collections.OrderedDict[str, tf.TensorSpec]:
    """Return specs of the trainable weights of a tier, by name."""
    return collections.OrderedDict(
      (v.name, tf.TensorSpec(v.shape, v.dtype)) for v in self.trainable(tier)
    )

  def initial_weights(self, tier: str, seed: Any) -> tiers_lib.NamedTensors:
    """Draw the first values of a tier's trainable weights.

    A table sized per client has no rows yet: `client_tables` draws those that
    the client's data require.

    Args:
      tier: The tier.
      seed: int32 `[2]`; each variable's draw depends only on it and on the
        variable's place in the model.
    """
    return self._first_values(self.trainable(tier), seed)

  def specs_at_server(
    self, tier: str
  ) -> collections.OrderedDict[str, tf.TensorSpec]:
    """Return specs of a tier's trainable weights at the server.

    Those of GROUP are `[num_groups, ...]`.
    """
    copies = [self.num_groups] if tier == tiers_lib.GROUP else []
    return collections.OrderedDict(
      (name, tf.TensorSpec([*copies, *spec.shape], spec.dtype))
      for name, spec in self.specs(tier).items()
    )

  def initial_weights_at_server(
    self, tier: str, seed: Any
  ) -> tiers_lib.NamedTensors:
    """Draw a tier's first values at the server, each copy separately."""
    if tier != tiers_lib.GROUP:
      return self.initial_weights(tier, seed)
    copies = seeded_draws.of_copies(
      self.num_groups, lambda own: self.initial_weights(tier, own), seed
    )
    if len(self._initial_values) > 1:
      for copy_of_group, given in zip(
        copies, self._initial_values, strict=True
      ):
        copy_of_group.update(
          (n, tf.constant(given[n])) for n in copy_of_group if n in given
        )
    return tf.nest.map_structure(lambda *rows: tf.stack(rows), *copies)

  def frozen_weights(self) -> tiers_lib.NamedTensors:
    """Return the values of all variables that are never trained."""
    frozen = [v for v in self.variables if not v.trainable]
    return self._first_values(frozen, random_bits.derive(self.seed, 'frozen'))

  def _first_values(
    self, variables: Iterable[keras_analysis.VariableSpec], seed: Any
  ) -> tiers_lib.NamedTensors:
    place = {v.name: i for i, v in enumerate(self.variables)}

    def first(v: keras_analysis.VariableSpec) -> tf.Tensor:
      if v.name in self.given_values:
        return tf.constant(self.given_values[v.name])
      own_seed = random_bits.fold_in(seed, place[v.name])
      if v.is_client_sized and v.draw_rows is not None:
        # A zero that is not static: the type leaves the number of rows open.
        return v.draw_rows(own_seed, tf.bitwise.bitwise_and(own_seed[0], 0))
      return v.initialize(own_seed)

    return collections.OrderedDict((v.name, first(v)) for v in variables)

  def predict(
    self,
    weights: Mapping[str, tiers_lib.NamedTensors],
    frozen: Mapping[str, tf.Tensor],
    inputs: Any,
    *,
    training: bool,
    seed: Any,
  ) -> tuple[Any, list[tf.Tensor]]:
    """Compute predictions and the layers' regularization losses: see `call`."""
    return self.call(weights, frozen, inputs, training=training, seed=seed)[:2]

  def call(
    self,
    weights: Mapping[str, tiers_lib.NamedTensors],
    frozen: Mapping[str, tf.Tensor],
    inputs: Any,
    *,
    training: bool,
    seed: Any,
  ) -> tuple[Any, list[tf.Tensor], dict[str, tf.Tensor]]:
    """Compute predictions, the layers' regularization losses and new states.

    States are the variables that layers change in training, by name; none where
    `training` is false.

    Args:
      weights: Tier to its trainable weights.
      frozen: Weights that are never trained.
      inputs: A batch of inputs, `[batch, ...]`.
      training: True if layers such as dropout behave as in training.
      seed: int32 `[2]`, for the draws of such layers.

    Raises:
      ModelError: If two tiers have a weight of the same name.
    """
    read: dict[str, tf.Tensor] = {}
    for tier, named in weights.items():
      if twice := read.keys() & named.keys():
        raise ModelError(
          f'The model is given {min(twice)!r} twice, last as {tier!r}. Let a '
          '`weights_fn` begin with `tiers.server_and_local_weights`, which '
          "leaves out the client's own copy of the global weights."
        )
      read.update(named)
    # Gradients inside the model are at its loss scale.
    scale = self.spec.loss_scale
    computed = self._compute(loss_scaling.scaled({**frozen, **read}, 1 / scale))
    outputs, added, new = self._functions.call(
      computed, inputs, training=training, seed=seed
    )
    return *loss_scaling.scaled((outputs, added), scale), new

  def loss(
    self,
    labels: Any,
    predictions: Any,
    weight: tf.Tensor,
    is_real: tf.Tensor,
    regularization: Sequence[tf.Tensor] = (),
    of: LossFn | tf.keras.losses.Loss | None = None,
  ) -> LossValue:
    """Compute the loss of a batch, or another one, `of`: see `value_of`."""
    return losses.value_of(
      losses.as_loss(of or self.loss_function),
      *(labels, predictions, weight, is_real, regularization),
      self._class_weights,
    )

  def sums(self, of: LossFn | tf.keras.losses.Loss | None = None) -> bool:
    """Return True if the objective is the sum of losses, not their mean."""
    return losses.is_summed(of or self.loss_function)

  def check_loss(self, of: LossFn | tf.keras.losses.Loss | None = None) -> None:
    """Check that a loss compares an example with its own label.

    Args:
      of: Another loss instead of the model's own.

    Raises:
      ModelError: If labels and predictions do not match.
    """
    traced_checks.check_loss(self, of, self._mask)

  def to_keras(self, *weights: Any) -> tf.keras.Model:
    """Make a whole Keras model from named weights, such as a client's own.

    Args:
      *weights: The server's weights, `ModelWeights`, and mappings from variable
        name to value, such as a client's local weights; later ones override.
        Frozen weights that are missing keep their values.

    Raises:
      ModelError: If a variable has no value or the wrong shape, or no variable
        has a value's name.
    """
    values = keras_filling.values_of_all(
      weights,
      [v.name for v in self.variables],
      self.frozen_weights(),
      list(self.specs(tiers_lib.LOCAL)),
    )
    arrays = {
      v.name: keras_filling.checked(v, values[v.name]) for v in self.variables
    }
    return preprocessing.whole(self._functions.filled(self._compute(arrays)))


def check(model: Any) -> None:
  """Check that a model was made by `from_keras`."""
  expected = 'one of `tff_partial.from_keras(build, loss=..., local=...)`'
  spelling.check_kind('model', model, PartialModel, expected, ModelError)
