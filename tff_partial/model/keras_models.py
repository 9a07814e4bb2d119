"""Keras models as partial models."""

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tff_partial import tiers as tiers_lib
from tff_partial.arguments import checked_numbers
from tff_partial.arguments import spelling
from tff_partial.data import examples as examples_lib
from tff_partial.model import keras_3
from tff_partial.model import keras_3_models
from tff_partial.model import keras_analysis
from tff_partial.model import keras_functions
from tff_partial.model import keras_metrics
from tff_partial.model import keras_variables
from tff_partial.model import outputs
from tff_partial.model import preprocessing
from tff_partial.model import pretrained
from tff_partial.model import states
from tff_partial.model.keras_refusals import refuse_no_specs
from tff_partial.model.keras_variables import ModelError
from tff_partial.model.losses import assumed_labels
from tff_partial.model.models import PartialModel
from tff_partial.model.selectors import assign_tiers
from tff_partial.model.selectors import Selectors
from tff_partial.model.selectors import with_client_sizes


def from_keras(
  build: Callable[[], tf.keras.Model],
  *,
  loss: Any,
  loss_weights: Any = None,
  local: Selectors = None,
  client_sized: Selectors = None,
  group: Selectors = None,
  num_groups: int = 0,
  state: states.State = None,
  class_weight: Mapping[int, float] | None = None,
  metrics: keras_metrics.Metrics = (),
  inputs: Any = None,
  labels: tf.TensorSpec | None = None,
  weights: tf.TensorSpec = examples_lib.WEIGHT_SPEC,
  initial_weights: Any = None,
  seed: int = 0,
) -> PartialModel:
  """Take a Keras model apart into weights of three tiers and pure functions.

  Losses that layers add for weights count in every phase; a `train_step` does
  not. Dropout draws from the client's seed. Lookups of an input are lifted off.

  Args:
    build: Makes the model, of `tf.keras` or of Keras 3 with TensorFlow as its
      backend. It is called several times, under today's dtype policy, and makes
      the same variables in the same order, all of them inside the call.
    loss: A Keras loss or its name, or a function of labels and predictions that
      returns one loss per example; or a mapping or list of them by output. Each
      is averaged over a batch, or summed if it has Keras's reduction SUM.
    loss_weights: Weights of the outputs' losses, in the same form.
    local: Variables that never leave the client: a layer or its name, a regular
      expression over names of layers and variables, a predicate over
      `VariableSpec`, or a list of them. Nothing is local by default.
    client_sized: Local tables with a row for each id of a client's examples,
      from 0. The builder's number of rows only affects how rows are drawn.
    group: Variables with a copy for each of `num_groups` sub-populations.
    num_groups: Number of sub-populations.
    state: Treatment of moving averages and other variables that layers change
      in training: 'averaged', 'local' (the default for local layers) or
      'frozen'; or a mapping of these to what selects variables.
    class_weight: Weights of classes in the loss, as in Keras's `fit`, for all
      classes from 0 on. Metrics do not include them.
    metrics: A list of Keras metrics, their names, or functions of labels and
      predictions; or a mapping of lists by output; or a callable that makes it.
    inputs: Specs of one example's input, for models that do not declare it.
    labels: Spec of one example's label. By default that of a prediction, or an
      integer without the last axis if the loss is a sparse one.
    weights: Spec of one example's weight; `[time]` if steps are weighted, and
      `[outputs with a loss]` if outputs are.
    initial_weights: A trained Keras model, or a backbone of the model, or its
      path (see docs/adapters.md); or one for each sub-population.
    seed: Draws the first values of the global weights.

  Raises:
    ModelError: If the model is no pure function of its weights and examples, or
      a selector matches nothing, everything, or not all layers of a variable.
  """
  refuse_no_specs(inputs=inputs, labels=labels, weights=weights)
  rest = preprocessing.Lifting(_checked_builder(build), inputs)
  spec, in_keras_3 = _analysed(rest, inputs, client_sized)
  tier_of = _tiers(spec, local, group, num_groups)
  spec = with_client_sizes(spec, tier_of, client_sized)
  plain = in_keras_3 or keras_functions.Keras2Functions(rest, spec)
  functions, tier_of = states.treat(plain, tier_of, state)
  loss = outputs.as_loss(loss, loss_weights, weights)
  first = pretrained.values_of(spec, rest, initial_weights, num_groups)
  return PartialModel(
    rest,
    functions,
    tier_of,
    num_groups=num_groups,
    loss=loss,
    class_weight=class_weight,
    metrics=metrics,
    labels=assumed_labels(spec.outputs, loss, labels),
    weights=weights,
    initial_values=first,
    seed=seed,
  )


def _checked_builder(build: Any) -> Callable[[], Any]:
  """Return the builder under today's dtype policy; refuse a model."""
  if isinstance(build, tf.keras.Model) or keras_3.is_model(build):
    raise ModelError(
      'Pass a callable that makes the Keras model, not the model: '
      '`from_keras(lambda: tf.keras.Sequential(...), ...)`. If it is trained '
      'already, pass it as `initial_weights` besides; make a functional one '
      'again by `lambda: tf.keras.models.clone_model(model)`.'
    )
  expected = 'a callable, `lambda: tf.keras.Sequential(...)`'
  spelling.check_kind('build', build, Callable, expected, ModelError)
  return keras_variables.keeping_policy(build)


def _tiers(
  spec: keras_analysis.KerasSpec,
  local: Selectors,
  group: Selectors,
  num_groups: int,
) -> dict[str, str]:
  """Return the tier of each variable."""
  checked_numbers.check_whole(ModelError, 0, num_groups=num_groups)
  tier_of = assign_tiers(spec, {tiers_lib.GROUP: group, tiers_lib.LOCAL: local})
  if (num_groups > 0) != (tiers_lib.GROUP in tier_of.values()):
    raise ModelError(
      f'group={group!r}, num_groups={num_groups}: sub-populations need both '
      'variables of their own and a number, at least 1.'
    )
  return tier_of


def _analysed(
  build: Callable[[], Any], inputs: Any, client_sized: Selectors
) -> tuple[keras_analysis.KerasSpec, keras_3_models.Keras3Functions | None]:
  """Return a model's spec, and its functions if it is a Keras 3 model."""
  try:
    return keras_analysis.analyse(build, inputs), None
  except Exception:
    # A Keras 3 model is not a model of `tf.keras`.
    if not keras_3.makes_model(build):
      raise
  functions = keras_3_models.Keras3Functions(build, inputs)
  if client_sized is not None:
    raise ModelError(
      f'client_sized={client_sized!r}: a table of the size of each client '
      'needs a model of `tf.keras`; this one is of Keras 3.'
    )
  return functions.spec, functions
