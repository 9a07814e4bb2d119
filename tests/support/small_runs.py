"""Runs of a second, what ends them in the middle, and how they are compared."""

from collections.abc import Iterator
import contextlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import tff_partial
from tff_partial import evaluation
from tff_partial import processes
from tff_partial.data import cohorts
from tff_partial.data import examples
from tff_partial.data import packing
from tff_partial.data import populations
from tff_partial.model import models
from tff_partial.training import programs

ITEMS = 7
ROUNDS = 7
SETTINGS = {'rounds': ROUNDS, 'clients_per_round': 4, 'evaluate_every': 3}


# ---- a small world -----------------------------------------------------------


def _build() -> tf.keras.Model:
  item = tf.keras.Input([], dtype=tf.int32)
  vector = tf.keras.layers.Embedding(ITEMS, 2, name='items')(item)
  rating = tf.keras.layers.Dense(1, use_bias=False, name='user')(vector)
  return tf.keras.Model(item, rating)


def build_model() -> models.PartialModel:
  """A matrix factorization whose user vectors are local."""
  return tff_partial.from_keras(
    _build,
    local='user',
    loss=tf.keras.losses.MeanSquaredError(),
    metrics=lambda: [tf.keras.metrics.MeanAbsoluteError(name='mae')],
  )


def pack(
  spec: examples.ExampleSpec, names: str, number: int, scale: float = 1.0
) -> populations.Population:
  """Clients whose ratings follow from vectors of items and users."""
  random = np.random.default_rng(5)
  vectors = random.normal(size=[ITEMS, 2])
  clients = {}
  for place in range(number):
    items = random.integers(0, ITEMS, 5 + place % 4).astype(np.int32)
    ratings = vectors[items] @ random.normal(1.0, 0.3, [2, 1]) * scale
    clients[f'{names} {place}'] = {'x': items, 'y': ratings.astype(np.float32)}
  return packing.pack(clients, spec)


class World:
  """A process, clients to train with, and clients to measure.

  Attributes:
    validation: An evaluation set, of other clients or of what these remember.
  """

  def __init__(
    self,
    process: processes.PartialProcess,
    measure: evaluation.Evaluation,
    remembering: bool = False,
  ):
    self.process = process
    self.clients = pack(process.example_spec, 'train', 12)
    evaluation_clients = self.clients
    if not remembering:
      evaluation_clients = pack(measure.example_spec, 'validation', 5)
    self.validation = programs.EvaluationSet(
      measure, evaluation_clients, remembering
    )

  def train(self, **settings: Any) -> programs.TrainingResult:
    """Trains with the usual settings, or with other ones."""
    settings = {
      'validation': self.validation,
      'clients': self.clients,
      **SETTINGS,
      **settings,
    }
    return programs.train(
      self.process, settings.pop('clients'), tensorboard=False, **settings
    )

  def measure(self, weights: Any, store: Any = None) -> dict[str, Any]:
    """Measures the validation set with some weights, and what is remembered."""
    return programs.evaluate(self.validation, weights, client_store=store)

  def killed(self, at: int, **settings: Any) -> None:
    """Trains until the cohort of a round is asked for, which ends the run."""
    with pytest.raises(Killed):
      self.train(clients=Spy(self.clients, at), **settings)


def reconstruction(update_epochs: int = 1, **options: Any) -> World:
  """Federated reconstruction of user vectors."""
  model, algorithms = build_model(), tff_partial.algorithms
  steps = tff_partial.Phase(optimizer=tff_partial.sgd(0.3), max_steps=2)
  return World(
    algorithms.build_fed_recon(
      model,
      reconstruct=steps,
      update=tff_partial.Phase(
        optimizer=tff_partial.sgd(0.5), epochs=update_epochs
      ),
      **options,
    ),
    algorithms.build_fed_recon_eval(model, personalise=steps),
  )


# ---- what ends a run ---------------------------------------------------------


class Killed(BaseException):
  """Nothing catches it, like SIGKILL."""


class Spy:
  """Clients that note who was asked for, and may end the run."""

  def __init__(self, clients: cohorts.ClientSource, ends_at: int = 0):
    self._clients = clients
    self._ends_at = ends_at
    self.example_spec = clients.example_spec
    self.client_ids = clients.client_ids
    self.cohorts: list[tuple[str, ...]] = []

  def fingerprint(self, sample=None):
    return self._clients.fingerprint(sample)

  def cohort(self, client_ids, seeds):
    self.cohorts.append(tuple(client_ids))
    if len(self.cohorts) == self._ends_at:
      raise Killed()
    return self._clients.cohort(client_ids, seeds)


def kill(
  owner: Any, name: str, at: int, monkeypatch: Any, *, before: bool
) -> None:
  """Ends the run in a call of a function, before or after it does its work."""
  real, calls = getattr(owner, name), []

  def wrapped(*arguments: Any, **options: Any) -> Any:
    calls.append(arguments)
    if len(calls) == at and before:
      raise Killed()
    result = real(*arguments, **options)
    if len(calls) == at:
      raise Killed()
    return result

  monkeypatch.setattr(owner, name, wrapped)


@contextlib.contextmanager
def killed(
  owner: Any, name: str, at: int, monkeypatch: Any, *, before: bool
) -> Iterator[None]:
  """Asserts that `kill` ends the run inside, and undoes it."""
  with monkeypatch.context() as patch:
    kill(owner, name, at, patch, before=before)
    with pytest.raises(Killed):
      yield


# ---- how runs are compared ---------------------------------------------------


def flat(structure: Any) -> list[bytes]:
  """Every number of a structure, bit by bit."""
  parts = tff.structure.flatten(
    tff.structure.from_container(structure, recursive=True)
  )
  return [np.asarray(part).tobytes() for part in parts]


def assert_same(
  result: programs.TrainingResult, other: programs.TrainingResult
) -> None:
  """Two runs ended with the same numbers, bit for bit."""
  for name in ('state', 'weights', 'best_weights'):
    assert flat(getattr(result, name)) == flat(getattr(other, name)), name
  for name in ('best_round', 'validation', 'best_validation', 'train'):
    # As texts, in which one NaN equals another.
    assert str(getattr(result, name)) == str(getattr(other, name)), name
  assert (result.rounds, result.diverged) == (other.rounds, other.diverged)
