"""Methods of TensorFlow Federated, the package that is installed."""

from collections.abc import Collection
import functools
import pathlib
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tests.references import ours
from tests.references import problem
from tests.references import table

_RECONSTRUCTION = tff.learning.models.ReconstructionModel
_SPEC = (
  tf.TensorSpec([None, problem.NUM_INPUTS], tf.float32),
  tf.TensorSpec([None], tf.int32),
)


def prepare(source: pathlib.Path) -> None:
  """Has TFF run what follows by its own native context."""
  tff.backends.native.set_sync_local_cpp_execution_context()


def _keras_model() -> tf.keras.Model:
  model = ours.build_keras_model()
  return tf.keras.Model(model.inputs, model.output['logits'])


def _loss() -> Any:
  return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _fed_avg(settings: problem.Settings) -> Any:
  return tff.learning.algorithms.build_weighted_fed_avg(
    lambda: tff.learning.models.from_keras_model(
      _keras_model(), loss=_loss(), input_spec=_SPEC
    ),
    tff.learning.optimizers.build_sgdm(settings.rate),
    tff.learning.optimizers.build_sgdm(1.0),
  )


def _fed_recon(settings: problem.Settings) -> Any:
  def model_fn() -> Any:
    model = _keras_model()
    local = [model.get_layer('head')]
    return _RECONSTRUCTION.from_keras_model_and_layers(
      model,
      global_layers=[layer for layer in model.layers if layer not in local],
      local_layers=local,
      input_spec=_SPEC,
    )

  return tff.learning.algorithms.build_fed_recon(
    model_fn,
    loss_fn=_loss,
    metrics_fn=list,
    reconstruction_optimizer_fn=tff.learning.optimizers.build_sgdm(
      settings.personal_rate
    ),
    client_optimizer_fn=tff.learning.optimizers.build_sgdm(settings.rate),
    server_optimizer_fn=tff.learning.optimizers.build_sgdm(1.0),
    dataset_split_fn=_RECONSTRUCTION.build_dataset_split_fn(
      recon_epochs=settings.personal_epochs,
      post_recon_epochs=settings.epochs,
      split_dataset=True,
    ),
  )


def run(
  comparison: table.Comparison, left_in: Collection[str]
) -> problem.Arrays:
  """Trains as TFF does.

  Returns:
    The server's weights at the end.
  """
  settings = comparison.settings
  is_fed_avg = comparison.method == 'FedAvg'
  process = (_fed_avg if is_fed_avg else _fed_recon)(settings)

  @functools.cache
  def data_set(name: str) -> tf.data.Dataset:
    fields = problem.clients()[name]
    batches = tf.data.Dataset.from_tensor_slices(
      (fields['x'], fields['y'])
    ).batch(settings.batch_size)
    return batches.repeat(settings.epochs) if is_fed_avg else batches

  state = process.initialize()
  for cohort in problem.ROUNDS:
    state = process.next(state, [data_set(name) for name in cohort]).state
  weights = process.get_model_weights(state).trainable
  names = (*problem.BASE, *problem.HEAD)[: len(weights)]
  return problem.named(problem.SERVER, dict(zip(names, weights, strict=True)))
