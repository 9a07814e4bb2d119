"""One client's personal model after training."""

import collections
from collections.abc import Mapping, Sequence
import functools
from typing import Any, TypeAlias

from absl import logging
import numpy as np
import tensorflow as tf

from tff_partial import contexts
from tff_partial import evaluation as evaluation_lib
from tff_partial import groups
from tff_partial import phases
from tff_partial import processes
from tff_partial import runtimes
from tff_partial import tiers
from tff_partial.client import client_work
from tff_partial.client import work as work_lib
from tff_partial.data import cohorts
from tff_partial.data import examples
from tff_partial.data import vocabulary_checks
from tff_partial.model import models
from tff_partial.templates import rating_intervals
from tff_partial.templates import rating_posteriors
from tff_partial.training import calibration as calibration_lib
from tff_partial.training import results
from tff_partial.training import sampling
from tff_partial.training.client_store import state_codec
from tff_partial.training.errors import ProgramError

# Result of `train` or `load`.
Trained: TypeAlias = results.TrainingResult | results.Saved


@runtimes.ours()
def personalise(
  trained: Trained,
  clients: cohorts.ClientSource,
  client_id: str,
  *,
  evaluation: evaluation_lib.Evaluation | None = None,
  seed: int = 0,
) -> tf.keras.Model:
  """Make a client's personal model after the best round.

  A client that took part in training has its stored weights. Others, those
  whose losses or weights were never finite, and all clients of algorithms
  without client states train their own weights as in a round, but on all their
  examples, while the shared weights stay fixed:

      result = tff_partial.train(process, clients, ...)
      keras_model = tff_partial.personalise(result, clients, 'ann')
      keras_model.predict(items)

  Args:
    trained: The result of `train` or `load`.
    clients: A source that has the client.
    client_id: The client.
    evaluation: Evaluation by which the client personalises instead.
    seed: The client's draws follow from it and its id, as in `evaluate`.

  Raises:
    ClientDataError: If there is no such client, or its examples do not match
      those of the process.
    VocabularyError: If the clients are not encoded as those of training.
    ProgramError: If the process trains no weights of the client's own,
      and no evaluation is given; or if the client took part, and the evaluation
      takes another state than it remembers.
  """
  evaluation, kept, client = _at_client(
    trained, clients, client_id, evaluation, seed
  )
  return model_of(
    evaluation, trained.best_weights, kept, client, trained.best_server_state
  )


def _at_client(
  trained: Trained,
  clients: cohorts.ClientSource,
  client_id: str,
  evaluation: evaluation_lib.Evaluation | None,
  seed: int,
) -> tuple[evaluation_lib.Evaluation, Any, Mapping[str, Any]]:
  """Return a client's evaluation, its state and its value."""
  cohorts.check(clients, (evaluation or trained.process).example_spec)
  vocabulary_checks.check_alike(trained, clients)
  if not isinstance(client_id, str) and client_id not in clients.client_ids:
    client_id = str(client_id)  # Most sources have string ids.
  seeds = sampling.client_seeds([client_id], seed, 'evaluation')
  cohort = clients.cohort([client_id], seeds)
  if not len(cohort):
    raise examples.ClientDataError(f'There are no examples of {client_id!r}.')
  store = trained.best_client_store
  has_learned = store is not None and store.has_learned(client_id)
  if evaluation is None:
    evaluation = _at_home(trained.process, trained.rounds, has_learned)
  kept: Sequence[Any] = state_codec.first_states(
    evaluation.initialize_client, seeds
  )
  kind = evaluation.initialize_client.type_signature.result
  if store is not None and client_work.serves(store.type, kind):
    kept = store.read_as([client_id], kind)
  elif store is not None and has_learned and not processes.is_nothing(kind):
    raise ProgramError(
      f'{client_id!r} comes with what it remembers from training, '
      f'{store.type}, but the evaluation takes {kind}. Build the evaluation '
      'with the client state of the process.'
    )
  return evaluation, kept[0], cohort[0]


class Predictor:
  """Predictor for one client after another, without tracing for each.

      predictor = Predictor(result, clients)
      for client_id in clients.client_ids:
        scores = predictor.predict(client_id, items)

  Its predictions are those of the models of `personalise`.
  """

  def __init__(
    self,
    trained: Trained,
    clients: cohorts.ClientSource,
    *,
    evaluation: evaluation_lib.Evaluation | None = None,
    seed: int = 0,
  ):
    """Take the arguments that all clients have in common.

    See `personalise`.
    """
    self._trained = trained
    self._clients = clients
    self._evaluation = evaluation
    self._seed = seed
    self._predict: dict[models.PartialModel, Any] = {}

  def interval(
    self,
    client_id: str,
    inputs: Any,
    level: float = 0.8,
    *,
    calibration: calibration_lib.Calibration | None = None,
  ) -> tuple[np.ndarray, np.ndarray]:
    """Predict intervals that contain a client's labels with a probability.

    Args:
      client_id: The client.
      inputs: Inputs of the model, `[batch, ...]`.
      level: The probability, more than 0 and less than 1.
      calibration: What `calibrate` learned; by default errors are taken to be
        normally distributed.

    Returns:
      The lower and the upper ends, `[batch]`.

    Raises:
      ClientDataError: As for `personalise`.
      ProgramError: If the model predicts no variances, or the level is not
        possible; and as for `personalise`.
    """
    if not 0 < level < 1:
      raise ProgramError(
        f'interval: level={level}: expected a probability between 0 and 1.'
      )
    found = self.predict(client_id, inputs)
    if not (isinstance(found, Mapping) and rating_posteriors.VARIANCE in found):
      raise ProgramError(
        'interval: the model predicts no variances. Train one of '
        '`algorithms.build_fed_als`.'
      )
    center = np.asarray(found[rating_posteriors.RATING])
    variance = np.asarray(found[rating_posteriors.VARIANCE])
    half = rating_intervals.half_width(variance, level)
    if calibration is not None:
      half = calibration.quantile(level) * variance**0.5
    return center - half, center + half

  @runtimes.ours()
  def predict(self, client_id: str, inputs: Any) -> Any:
    """Predict as a client's personal model does.

    Args:
      client_id: The client.
      inputs: Inputs of the model, `[batch, ...]`.

    Raises:
      ClientDataError: As for `personalise`; or if the model cannot read the
        inputs.
      ProgramError: As for `personalise`.
    """
    evaluation, kept, client = _at_client(
      self._trained, self._clients, client_id, self._evaluation, self._seed
    )
    model, spec = evaluation.model, evaluation.model.example_spec
    fields = examples.check_fields(
      {'x': inputs},
      examples.ExampleSpec({'x': spec['x']}, spec.ids, spec.lifted),
      'The inputs to predict for',
    )
    weights = results.weights_of(model, self._trained.best_weights)
    own = _own_weights(
      evaluation, weights, kept, client, self._trained.best_server_state
    )
    of_tiers = tiers.mapped(
      lambda _, name, spec: own[name], {t: model.specs(t) for t in model.tiers}
    )
    if model not in self._predict:
      self._predict[model] = tf.function(model.predict, autograph=False)
    predictions, _ = self._predict[model](
      of_tiers,
      weights.non_trainable,
      fields['x'],
      training=False,
      seed=tf.zeros([2], tf.int32),
    )
    return tf.nest.map_structure(np.asarray, predictions)


def model_of(
  evaluation: evaluation_lib.Evaluation,
  weights: Any,
  kept: Any,
  client: Mapping[str, Any],
  server_state: Any = None,
) -> tf.keras.Model:
  """Personalise a client as in an evaluation, and return its model.

  Fields of `client` that the evaluation does not read are left out.
  """
  weights = results.weights_of(evaluation.model, weights)
  own = _own_weights(evaluation, weights, kept, client, server_state)
  return evaluation.model.to_keras(weights.non_trainable, own)


def _own_weights(
  evaluation: evaluation_lib.Evaluation,
  weights: Any,
  kept: Any,
  client: Mapping[str, Any],
  server_state: Any,
) -> dict[str, Any]:
  """Return the weights that a client uses after personalising, by name."""
  if work_lib.holds_all_copies(evaluation.parts.work):
    raise ProgramError(
      'Clients predict by the copies of all groups, which are not one Keras '
      'model. Measure them with `evaluate`.'
    )
  *_, last = phases.all_phases(evaluation.parts.work)
  model = evaluation.model
  if last.predict_fn and model.replaced_spec is model.prediction_spec:
    raise ProgramError(
      'Clients predict also by what the model does not hold, such as a memory '
      'of their examples or prototypes. Measure them with `evaluate`.'
    )
  value = collections.OrderedDict(client)
  value['examples'] = collections.OrderedDict(
    (name, client['examples'][name]) for name in evaluation.example_spec
  )
  beside = evaluation.beside(server_state)
  own = dict(evaluation.personalise(weights, kept, value, *beside))
  if not all(np.isfinite(tensor).all() for tensor in own.values()):
    logging.warning(
      'The weights that the client trained are not finite, and so are its '
      'predictions. Try a smaller learning rate.'
    )
  for name, is_real in client.get('rows', {}).items():
    own[name] = np.asarray(own[name])[is_real]  # Without padding.
  return own


@functools.lru_cache(maxsize=8)
def _at_home(
  process: processes.PartialProcess, rounds: int, has_learned: bool
) -> evaluation_lib.Evaluation:
  """Build an evaluation of a process's work on the client's own weights.

  Args:
    process: The process.
    rounds: Number of rounds done, for epochs that depend on it.
    has_learned: True if the client has stored weights that it trained; then it
      only chooses its group.
  """
  work = process.work
  phases_of = work_lib.personal_phases
  own = phases_of(work.work, process.model, rounds) if work is not None else []
  if not own or work is None:
    raise ProgramError(
      "The process trains nothing that is a client's own, so that clients "
      'would have the same model, `model.to_keras(result.best_weights)`, '
      'unless they keep one all the same, as in MR-MTL. Pass `evaluation=`: '
      'that of the algorithm, or for instance one of fine-tuning.'
    )
  # A copy that is neither kept nor measured is an intermediate step.
  keeps_copy = tiers.PERSONAL in work.remembered_names
  weights_fn: tiers.WeightsFn = tiers.server_and_local_weights
  for phase in phases.all_phases(work.work):
    if phase.measured or (keeps_copy and tiers.PERSONAL in phase.train):
      if phase.read is not tiers.server_and_local_weights:
        weights_fn = phase.read
  if has_learned:
    own = [
      part for part in own if isinstance(part, groups.Assign | contexts.Compute)
    ]
  return evaluation_lib.build_evaluation(
    process.model,
    work=[*own, phases.Phase(train=(), weights_fn=weights_fn, measured=True)],
    client_state=work.client_state,
    server_state=process.server_state,
  )
