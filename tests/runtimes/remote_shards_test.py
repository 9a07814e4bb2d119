"""What goes to other processes and back; here they are in this process."""

import gc
import importlib.util
import itertools
import pickle

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import planted
from tests.support.computations import mapped
from tests.support.computations import summed
from tff_partial import algorithms
from tff_partial import Phase
from tff_partial import runtimes
from tff_partial import sgd
from tff_partial.model import models
from tff_partial.runtimes import errors
from tff_partial.runtimes.cohort_runtime import rounds
from tff_partial.runtimes.cohort_runtime.cohort import CohortRuntime
from tff_partial.runtimes.errors import CohortRuntimeError
from tff_partial.runtimes.program import serialized
from tff_partial.runtimes.ray_runtime import remote_shards


def _travel(value):
  return pickle.loads(pickle.dumps(value))


class _Crew:
  """Workers whose messages are pickled, though they never leave."""

  def __init__(self, workers: int, folder: str | None = None):
    self.arrays = remote_shards.RemoteArrays(lambda array: array.copy())
    self.workers = [
      remote_shards.ShardWorker(False, False, folder) for _ in range(workers)
    ]
    self.num_messages = self.num_bytes = self.num_learned = 0

  def start(self):
    pass

  def close(self):
    pass

  def run(self, computation, number, stage, shares, chooser):
    program = serialized.to_bytes(computation)
    key = str(hash(program))
    common = remote_shards.Common.of(stage, number)
    answers = []
    for worker, block in zip(
      itertools.cycle(self.workers),
      remote_shards.blocks(len(shares), len(self.workers)),
    ):
      if not worker.knows(key):
        worker.learn(key, program)
        self.num_learned += 1
      sent = [
        remote_shards.sent(shares[place](), stage.loop.program)
        for place in block
      ]
      message = pickle.dumps((common, sent, chooser.choices))
      answer = worker.run(
        key,
        *pickle.loads(message),
        fetch=lambda where: where,
        keys=self.arrays.keys(),
      )
      self.num_messages += 1
      self.num_bytes += len(message) + len(pickle.dumps(answer))
      answers.append(_travel(answer))
    return remote_shards.joined(stage, answers)


def _runtime(crew: _Crew) -> CohortRuntime:
  return CohortRuntime(
    jit=False, threads=None, strict=True, choices=None, workers=crew
  )


@pytest.fixture(scope='module', name='model')
def fixture_model() -> models.PartialModel:
  return planted.factorization(planted.build_tastes)


@pytest.fixture(scope='module', name='clients')
def fixture_clients():
  # Seven shards of two shapes, so that blocks end within a group.
  return planted.rate({f'client {i}': 3 + 9 * (i % 3 > 0) for i in range(150)})


def _train(process, clients, capacities=(4, 16)):
  state, kept, outputs = process.initialize(), None, []
  for number in range(2):
    cohort = planted.cohort_of(process, clients, number, capacities=capacities)
    output = planted.run(process, cohort, state, kept)
    state = output.state
    kept = None if process.is_stateless else output.client_states
    outputs.append(output)
  return [
    (
      planted.global_weights(process, output.state),
      planted.train_metrics(output),
      list(output.client_states),
    )
    for output in outputs
  ]


@pytest.mark.slow
@pytest.mark.parametrize('build', ['fed_recon', 'furl'])
def test_any_number_of_workers_comes_to_the_same_bits(model, clients, build):
  options = {
    'fed_recon': {
      'reconstruct': Phase(optimizer=sgd(0.1)),
      'update': Phase(optimizer=sgd(0.1)),
    },
    'furl': {'training': Phase(optimizer=sgd(0.1))},
  }[build]
  process = getattr(algorithms, f'build_{build}')(model, **options)
  with runtimes.cohort(jit=False):
    expected = _train(process, clients)
  for workers in (1, 2, 3, 8):
    with _runtime(_Crew(workers)):
      planted.assert_same(_train(process, clients), expected)


@pytest.mark.slow
def test_what_clients_remember_stays_in_files(
  model, clients, tmp_path, monkeypatch
):
  # As if it were much enough to be left there.
  monkeypatch.setattr(remote_shards, '_BYTES_OF_DEPOSIT', 1)
  process = algorithms.build_furl(model, training=Phase(optimizer=sgd(0.1)))
  with runtimes.cohort(jit=False):
    expected = _train(process, clients)
  sent, left = _Crew(2), _Crew(2, folder=str(tmp_path))
  with _runtime(sent):
    _train(process, clients)
  with _runtime(left):
    found = _train(process, clients)
  assert left.num_bytes < sent.num_bytes
  planted.assert_same(found, expected)
  # They were read in the end, and nothing names the files any more.
  gc.collect()
  assert not list(tmp_path.iterdir())


def test_what_an_earlier_loop_kept_goes_with_the_shards():
  at_clients = tff.FederatedType(np.float32, tff.CLIENTS)

  @tff.tensorflow.computation(np.float32)
  def shift(number):
    return number + tf.random.stateless_uniform([], [1, 2])

  @tff.tensorflow.computation(np.float32, np.float32)
  def subtract(number, mean):
    return number - mean

  @tff.federated_computation(at_clients)
  def spread(numbers):
    shifted = tff.federated_map(shift, numbers)
    mean = tff.federated_broadcast(tff.federated_mean(shifted))
    return (
      tff.federated_mean(tff.federated_map(subtract, (shifted, mean))),
      shifted,
    )

  numbers = np.arange(100, dtype=np.float32).tolist()
  with runtimes.cohort(jit=False):
    expected = spread(numbers)
  crew = _Crew(2)
  with _runtime(crew):
    found = spread(numbers)
  planted.assert_same(found[0], expected[0])
  planted.assert_same(list(found[1]), list(expected[1]))
  # Two loops of two blocks each.
  assert crew.num_messages == 4


def test_a_worker_keeps_the_programs_that_ran_last(monkeypatch):
  monkeypatch.setattr(rounds, 'MOST_PROGRAMS', 2)
  programs = {factor: planted.scaled_sum(factor) for factor in (1.0, 2.0, 3.0)}
  crew = _Crew(1)
  with _runtime(crew):
    for factor, sent in ((1, 1), (2, 2), (1, 2), (3, 3), (1, 3), (2, 4)):
      assert programs[factor]([1.0, 2.0]) == 3.0 * factor
      assert crew.num_learned == sent


def test_values_of_open_shapes_come_back():
  repeated = mapped(
    lambda row: tf.repeat(row, 1 + tf.size(row) % 3),
    tff.TensorType(np.int32, [None]),
  )
  rows = [np.arange(number % 5, dtype=np.int32) for number in range(70)]
  with _runtime(_Crew(3)):
    found = repeated(rows)
  for row, one in zip(rows, found, strict=True):
    np.testing.assert_array_equal(one, np.repeat(row, 1 + len(row) % 3))


def test_what_cannot_travel_is_run_here():
  total = summed(
    lambda numbers: numbers.reduce(np.int32(0), lambda a, b: a + b),
    tff.SequenceType(np.int32),
  )
  crew = _Crew(2)
  with _runtime(crew):
    assert total([[1, 2], [3], []] * 20) == 120
  assert crew.num_messages == 0


def test_without_ray_there_is_advice(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(CohortRuntimeError, match='pip install'):
    runtimes.ray()


def test_there_must_be_a_worker():
  with pytest.raises(ValueError, match='workers=0'):
    runtimes.ray(workers=0)
  with pytest.raises(ValueError, match='patience=nan'):
    runtimes.ray(patience=np.nan)


def test_errors_travel_with_all_that_they_know():
  error = errors.ClientComputationError(3, 10, 'a step', 'float32[]', 'no')
  again = _travel(error)
  assert type(again) is errors.ClientComputationError
  assert str(again) == str(error)
  assert (again.client, again.step, again.reason) == (3, 'a step', 'no')
