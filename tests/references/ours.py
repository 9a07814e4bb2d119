"""The same methods by this project."""

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

import baselines
from tests.references import problem
from tests.references import table
from tests.support import planted
from tff_partial import algorithms
from tff_partial import Phase
from tff_partial import runtimes
from tff_partial import sgd
from tff_partial import tiers
from tff_partial.data import splits
from tff_partial.model import keras_models
from tff_partial.model import models

_BASE, _HEAD = 'base', 'head'
# Which layer stays with clients.
_LOCAL = {
  'FedPer': _HEAD,
  'FedRep': _HEAD,
  'FedBABU': _HEAD,
  'FedAlt': _HEAD,
  'FedSim': _HEAD,
  'FedRecon': _HEAD,
  'LG-FedAvg': _BASE,
}


def build_keras_model() -> tf.keras.Model:
  """Builds the model; its outputs are the features and the logits."""
  first = problem.first_weights()

  def layer(name: str, units: int, activation: str | None) -> Any:
    return tf.keras.layers.Dense(
      units,
      activation,
      kernel_initializer=tf.constant_initializer(first[f'{name}/kernel']),
      bias_initializer=tf.constant_initializer(first[f'{name}/bias']),
      name=name,
    )

  inputs = tf.keras.Input([problem.NUM_INPUTS])
  features = layer(_BASE, problem.NUM_FEATURES, 'tanh')(inputs)
  logits = layer(_HEAD, problem.NUM_CLASSES, None)(features)
  return tf.keras.Model(inputs, {'features': features, 'logits': logits})


def _model(method: str) -> models.PartialModel:
  return keras_models.from_keras(
    build_keras_model,
    local=_LOCAL.get(method),
    loss=lambda labels, outputs: tf.nn.sparse_softmax_cross_entropy_with_logits(
      labels, outputs['logits']
    ),
    labels=tf.TensorSpec([], tf.int32),
  )


def _process(method: str, settings: problem.Settings) -> Any:
  """Builds the process of a method."""
  model = _model(method)

  def phase(rate: float = settings.rate, **others: Any) -> Phase:
    return Phase(
      **{
        'optimizer': sgd(rate),
        'batch_size': settings.batch_size,
        'epochs': settings.epochs,
        **others,
      }
    )

  training = phase()
  personal = phase(epochs=settings.personal_epochs)
  penalty = settings.penalty
  builders: Mapping[str, Callable[[], Any]] = {
    'FedAvg': lambda: algorithms.build_fed_avg(model, training=training),
    'FedPer': lambda: algorithms.build_fed_per(model, training=training),
    'FedRep': lambda: algorithms.build_fed_rep(
      model, head=personal, representation=training
    ),
    'FedBABU': lambda: algorithms.build_fed_babu(model, training=training),
    'LG-FedAvg': lambda: algorithms.build_lg_fed_avg(model, training=training),
    'FedProx': lambda: baselines.build_fed_prox(
      model, penalty=penalty, training=training
    ),
    'SCAFFOLD': lambda: baselines.build_scaffold(
      model,
      num_clients=len(problem.NAMES),
      training=training,
      server_optimizer=sgd(settings.server_rate),
    ),
    'Ditto': lambda: algorithms.build_ditto(
      model, penalty=penalty, training=training, personal=personal
    ),
    'FedAlt': lambda: algorithms.build_fed_alt(
      model, personal=training, shared=training
    ),
    'FedSim': lambda: algorithms.build_fed_sim(model, training=training),
    'FedRecon': lambda: algorithms.build_fed_recon(
      model,
      split=splits.alternating(settings.batch_size),
      reconstruct=phase(
        settings.personal_rate, epochs=settings.personal_epochs
      ),
      update=training,
    ),
    'FedAtt': lambda: baselines.build_fed_att(
      model, server_learning_rate=settings.server_rate, training=training
    ),
    'APFL': lambda: algorithms.build_apfl(
      model,
      mixture=settings.mixture,
      mixture_learning_rate=settings.rate,
      training=training,
    ),
    'pFedMe': lambda: algorithms.build_p_fed_me(
      model,
      penalty=penalty,
      personal=phase(settings.personal_rate, steps_per_batch=settings.repeats),
      client_learning_rate=settings.rate,
      mixing=settings.server_rate,
    ),
    'FedProto': lambda: baselines.build_fed_proto(
      model,
      num_classes=problem.NUM_CLASSES,
      features=lambda outputs: outputs['features'],
      penalty=penalty,
      training=training,
    ),
  }
  return builders[method]()


def run(comparison: table.Comparison) -> problem.Arrays:
  """Trains, and returns what the server and the clients have at the end."""
  method = comparison.method
  process = _process(method, comparison.settings)
  with runtimes.cohort(jit=False):
    state, remembered = planted.trained(
      process,
      problem.clients(),
      problem.ROUNDS,
      capacities=[max(problem.SIZES.values())],
    )
  at_server = state.client_work.get('server', {})
  if method == 'FedProto':
    shared = {'prototypes': at_server['prototypes']}
  else:
    shared = planted.global_weights(process, state)
  found = problem.named(problem.SERVER, shared)
  if method == 'SCAFFOLD':
    for name, controls in {problem.SERVER: at_server, **remembered}.items():
      found |= problem.named(f'{name} control', controls)
    return found
  for name, kept in remembered.items():
    # A whole model and numbers, or what is local in it.
    parts = (
      kept[t] for t in (tiers.PERSONAL, tiers.CLIENT_VALUES) if t in kept
    )
    own = {n: v for part in parts for n, v in part.items()}
    found |= problem.named(name, own or kept)
  return found
