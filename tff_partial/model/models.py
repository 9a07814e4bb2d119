"""Partially local models: pure functions over named weights in three tiers.

`from_keras` takes any Keras model and a rule that selects its local variables.
The result has no variables: it is a function from weights to predictions.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import copy
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tff_partial import random_bits
from tff_partial import tiers as tiers_lib
from tff_partial.data import examples as examples_lib
from tff_partial.data import id_ranges
from tff_partial.model import class_weights
from tff_partial.model import client_tables
from tff_partial.model import keras_analysis
from tff_partial.model import keras_filling
from tff_partial.model import keras_functions
from tff_partial.model import keras_metrics
from tff_partial.model import keras_refusals
from tff_partial.model import table_ids
from tff_partial.model import tracing
from tff_partial.model.keras_variables import ModelError
from tff_partial.model.losses import aligned
from tff_partial.model.losses import classes
from tff_partial.model.losses import is_of_keras
from tff_partial.model.losses import LossFn
from tff_partial.model.losses import LossValue

# A batch size that no axis of an example has.
_BATCH = 1_000_003


class Functions(Protocol):
  """A Keras model as pure functions of its variables' values.

  Attributes:
    spec: Its variables, layers, inputs and outputs.
  """

  spec: keras_analysis.KerasSpec

  def call(
    self,
    tensors: dict[str, tf.Tensor],
    inputs: Any,
    *,
    training: bool,
    seed: tf.Tensor,
  ) -> tuple[Any, list[tf.Tensor]]:
    """Compute predictions and layers' losses: see `PartialModel.predict`."""

  def filled(self, values: Mapping[str, Any]) -> tf.keras.Model:
    """Make a Keras model with a value for each variable, by its name."""


class PartialModel:
  """A model with a shared part and a part that stays with each client.

  Attributes:
    build: Makes the Keras model.
    variables: All its variables, in order of creation.
    tier_of: Variable name to tier.
    num_groups: Number of copies of the GROUP variables at the server.
    client_tables: The tables that are sized per client.
    example_spec: The fields of an example that the model reads: x, y, weight.
    prediction_spec: Specs of one example's prediction.
    metrics: Keras metrics as pure functions.
    given_values: First values that were given rather than drawn, by name.
    is_regularized: True if layers add losses of weights.
    only_looked_up: Names of the trainable tables that the model uses only for
      row lookups.
    seed: Draws the first values of the global weights.
  """

  def __init__(
    self,
    build: Callable[[], tf.keras.Model],
    functions: Functions,
    tier_of: Mapping[str, str],
    *,
    num_groups: int,
    loss: LossFn | tf.keras.losses.Loss,
    class_weight: Mapping[int, float] | None,
    metrics: keras_metrics.Metrics,
    labels: tf.TensorSpec,
    weights: tf.TensorSpec,
    initial_values: Mapping[str, np.ndarray],
    initial_copies: Sequence[Mapping[str, np.ndarray]] = (),
    seed: int,
  ):
    """See `from_keras`."""
    spec = functions.spec
    self.build = build
    self.num_groups = num_groups
    self._initial_copies = initial_copies
    self.prediction_spec = spec.outputs
    self.example_spec = examples_lib.ExampleSpec(
      [('x', spec.inputs), ('y', labels), ('weight', weights)]
    )
    with self._explaining():
      self.metrics = keras_metrics.PureMetrics(
        metrics, labels, spec.outputs, weights
      )
    self.seed = seed
    self._loss = loss
    # Spec of the mask over an example's steps, if a layer sets one.
    self._mask: tf.TensorSpec | None = None
    self._class_weights = None
    if class_weight is not None:
      self._class_weights = class_weights.ClassWeights(
        class_weight, labels, spec.outputs
      )
    ids = self._set_functions(functions, tier_of, initial_values)
    weighted = self._class_weights.ids if self._class_weights else {}
    self.example_spec.ids = {
      **ids,
      **weighted,
      **classes(labels, spec.outputs, loss),
    }

  def _set_functions(
    self,
    functions: Functions,
    tier_of: Mapping[str, str],
    given_values: Mapping[str, np.ndarray],
  ) -> id_ranges.Ids:
    """Set functions and variables; return the inputs that are row ids."""
    self._functions = functions
    self.variables = functions.spec.variables
    self.tier_of = dict(tier_of)
    self.given_values = dict(given_values)
    self.client_tables = client_tables.ClientTables(
      {
        v.name: v.draw_rows
        for v in self.variables
        if v.is_client_sized and v.draw_rows is not None
      }
    )
    self.only_looked_up, ids = self._check_by_tracing()
    return ids

  def with_functions(
    self,
    wrap: Callable[[Functions], Functions],
    tier_of: Mapping[str, str],
    given_values: Mapping[str, np.ndarray],
  ) -> 'PartialModel':
    """Make the same model with other variables, for the same examples.

    Args:
      wrap: From the model's functions to those of the new one, with the same
        inputs and outputs.
      tier_of: Variable name to tier, for all variables.
      given_values: First values that are not drawn, by name.
    """
    model = copy.copy(self)
    model._set_functions(wrap(self._functions), tier_of, given_values)
    return model

  def __repr__(self) -> str:
    """Return a line for each variable by tier, and one for each field."""
    loss = getattr(self._loss, '__name__', type(self._loss).__name__)
    lines = [f'PartialModel with the loss {loss}']
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
    copies = [
      self.initial_weights(tier, random_bits.fold_in(seed, f'group {group}'))
      for group in range(self.num_groups)
    ]
    for copy_of_group, given in zip(copies, self._initial_copies, strict=False):
      copy_of_group.update(
        (name, tf.constant(given[name])) for name in copy_of_group
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
    """Compute predictions and the layers' regularization losses.

    Args:
      weights: Tier to its trainable weights.
      frozen: Weights that are never trained.
      inputs: A batch of inputs, `[batch, ...]`.
      training: True if layers such as dropout behave as in training.
      seed: int32 `[2]`, for the draws of such layers.
    """
    tensors = dict(frozen)
    for named in weights.values():
      tensors.update(named)
    return self._functions.call(tensors, inputs, training=training, seed=seed)

  def loss(
    self,
    labels: Any,
    predictions: Any,
    weight: tf.Tensor,
    is_real: tf.Tensor,
    regularization: Sequence[tf.Tensor] = (),
    of: LossFn | tf.keras.losses.Loss | None = None,
  ) -> LossValue:
    """Compute the loss as Keras would on the real examples alone.

    Args:
      labels: `[batch, ...]`.
      predictions: `[batch, ...]`.
      weight: float32 `[batch, ...]`, the examples' weights.
      is_real: bool `[batch]`; false for padding.
      regularization: Terms to add to the objective.
      of: Another loss instead of the model's own.
    """
    of = of or self._loss
    of_labels, mask = labels, keras_functions.mask_of(predictions)
    is_number = tf.is_tensor(predictions) and predictions.shape.rank == 1
    if is_number or is_of_keras(of):
      has_steps = weight.shape.rank > 1 or mask is not None
      labels, predictions = aligned(labels, predictions, has_steps)
    losses = getattr(of, 'call', of)(labels, predictions)
    masks = {
      'The mask of predictions': mask,
      'The mask of losses': keras_functions.mask_of(losses),
    }
    losses = tf.cast(losses, tf.float32)
    if losses.shape.rank == 0:
      raise ModelError(
        'The loss function must return one loss per example, it returned a '
        'scalar. Leave the averaging to the training.'
      )
    rank = losses.shape.rank
    expand = keras_metrics.expand
    real = tf.cast(expand(is_real, rank, 'The padding'), tf.float32)
    for what, mask in masks.items():
      if mask is not None:
        real = real * tf.cast(expand(mask, rank, what), tf.float32)
    real = real * tf.ones_like(losses)
    weight = expand(weight, rank, 'The weight of examples')
    if self._class_weights is not None:
      weight *= self._class_weights.of(of_labels, rank)
    # Padding repeats a real example, so its loss is finite if the example's is.
    total = tf.reduce_sum(losses * weight * real)
    num_elements = tf.reduce_sum(real)
    if self.sums(of):
      objective = total
    else:
      objective = total / tf.maximum(num_elements, 1.0)
    penalty = tf.constant(0.0)
    for term in regularization:
      term = tf.cast(tf.reduce_sum(term), tf.float32)
      objective, penalty = objective + term, penalty + term
    return LossValue(objective, total, num_elements, penalty)

  def sums(self, of: LossFn | tf.keras.losses.Loss | None = None) -> bool:
    """Return True if the objective is the sum of losses, not their mean.

    Args:
      of: Another loss instead of the model's own.
    """
    reduction = getattr(of or self._loss, 'reduction', None)
    return bool(reduction == tf.keras.losses.Reduction.SUM)

  @contextlib.contextmanager
  def _explaining(self) -> Iterator[None]:
    """Explain errors of a loss or metric by the specs of its arguments."""
    try:
      yield
    except ModelError:
      raise
    except (ValueError, TypeError, tf.errors.OpError) as error:
      raise ModelError(
        'The loss or a metric cannot be computed from labels '
        f'{self.example_spec["y"]} and predictions {self.prediction_spec}: '
        f'{tracing.reason(error)} Pass the spec of one label with '
        '`labels=tf.TensorSpec(...)` if the one assumed here is wrong.'
      ) from error

  def check_loss(self, of: LossFn | tf.keras.losses.Loss | None = None) -> None:
    """Check that losses and metrics compare an example with its own label.

    They are traced with a batch size that no other axis has: labels that would
    broadcast over the batch then fail, or the result has two axes of that size.

    Args:
      of: Another loss instead of the model's own.

    Raises:
      ModelError: If labels and predictions do not match.
    """
    specs = (
      *(self.example_spec['y'], self.prediction_spec),
      *(self.example_spec['weight'], tf.TensorSpec([], tf.bool)),
    )
    with tf.__internal__.FuncGraph('batch').as_default() as graph:
      labels, predictions, weight, is_real = tf.nest.map_structure(
        lambda spec: tracing.placeholder(spec, _BATCH), specs
      )
      if self._mask is not None:
        predictions._keras_mask = tracing.placeholder(self._mask, _BATCH)
      try:
        self.loss(labels, predictions, weight, is_real, of=of)
        self.metrics.update(
          self.metrics.initial_state(), labels, predictions, weight
        )
      except ModelError:
        raise
      except (ValueError, TypeError, tf.errors.OpError) as error:
        reason = tracing.reason(error).replace(str(_BATCH), 'batch')
        raise self._mixing(reason) from error
    for operation in graph.get_operations():
      if tracing.broadcasts_over(operation, _BATCH):
        raise self._mixing(f'{operation.type} broadcasts.')

  def _mixing(self, reason: str) -> ModelError:
    return ModelError(
      'The loss or a metric would compare labels with the predictions of other '
      f'examples of the batch: one label is {self.example_spec["y"]} and one '
      f'prediction {self.prediction_spec}. {reason} Give both the same shape, '
      'with `labels=tf.TensorSpec(...)` or in the function.'
    )

  def _check_by_tracing(self) -> tuple[tuple[str, ...], id_ranges.Ids]:
    """Trace the model once, so that errors are raised now.

    Returns:
      Names of the variables that the model uses only for row lookups, and the
      inputs that are row ids.
    """
    with tf.__internal__.FuncGraph('check').as_default() as graph:
      batch = examples_lib.map_fields(tracing.placeholder, self.example_spec)
      seed = tf.compat.v1.placeholder(tf.int32, [2])
      weights = {t: self.initial_weights(t, seed) for t in self.tiers}
      frozen = self.frozen_weights()
      with keras_refusals.explaining_tensors():
        predictions, regularization = self.predict(
          weights, frozen, batch['x'], training=True, seed=seed
        )
      is_real = tf.compat.v1.placeholder(tf.bool, [None])
      with self._explaining():
        self.loss(batch['y'], predictions, batch['weight'], is_real)
        self.metrics.update(
          self.metrics.initial_state(),
          batch['y'],
          predictions,
          batch['weight'],
        )
      if tracing.depends_on(regularization, tf.nest.flatten(batch['x'])):
        raise ModelError(
          'A loss that a layer adds with `add_loss` depends on its inputs, '
          'and so on padded examples. Add losses of weights only, or compute '
          'the term in the loss function.'
        )
    mask = keras_functions.mask_of(predictions)
    if mask is not None:
      self._mask = tf.TensorSpec(mask.shape[1:], mask.dtype)
    self.is_regularized = bool(regularization)
    self.check_loss()
    tracing.refuse_hidden_draws(graph)
    if any(outside.dtype == tf.resource for outside, _ in graph.captures):
      raise ModelError(
        'The model reads a variable or a table that is none of its own. Make '
        'it inside the callable given to `from_keras`, as an attribute of the '
        'layer that reads it, or read a constant.'
      )
    only_looked_up = tuple(
      name
      for named in weights.values()
      for name, tensor in named.items()
      if {operation.type for operation in tensor.consumers()} == {'GatherV2'}
    )
    tables = collections.ChainMap(frozen, *weights.values())
    inputs = dict(examples_lib.leaves(batch['x'], 'x'))
    local = self.specs(tiers_lib.LOCAL)
    ids = table_ids.find(tables, inputs, local)
    self.client_tables.check(only_looked_up, ids)
    return only_looked_up, ids

  def to_keras(self, *weights: Any) -> tf.keras.Model:
    """Make a Keras model from named weights, for example a client's own.

    Args:
      *weights: The server's weights, `ModelWeights`, and mappings from variable
        name to value, such as a client's local weights; later ones override.
        Frozen weights that are missing keep their values.

    Raises:
      ModelError: If a variable has no value or the wrong shape, or no variable
        has a value's name.
    """
    values: dict[str, Any] = {}
    for given in weights:
      for named in keras_filling.named_weights(given):
        values.update(named)
    names = [v.name for v in self.variables]
    unknown = [name for name in values if name not in names]
    if unknown:
      raise ModelError(f'The model has no variables {unknown}, but {names}.')
    for name, tensor in self.frozen_weights().items():
      values.setdefault(name, tensor)
    missing = [name for name in names if name not in values]
    if missing:
      own = [n for n in missing if self.tier_of[n] == tiers_lib.LOCAL]
      remedy = ''
      if own:
        remedy = (
          f' Clients have {own}: `tff_partial.personalise` makes the model of '
          'one.'
        )
      raise ModelError(
        f'There are no values for the variables {missing}.{remedy}'
      )
    return self._functions.filled(values)


def check(model: Any) -> None:
  """Check that a model was made by `from_keras`.

  Raises:
    ModelError: If it was not.
  """
  if not isinstance(model, PartialModel):
    raise ModelError(
      f'Expected a model of `tff_partial.from_keras`, found a '
      f'{type(model).__name__}. Wrap what builds it: '
      '`model = tff_partial.from_keras(build, loss=..., local=...)`.'
    )
