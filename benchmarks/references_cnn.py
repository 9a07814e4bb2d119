"""Rounds of a small CNN on MNIST by several methods: ours against PFLlib.

20 clients, all in each round, batches of 10 in a new order each epoch; two
convolutions (5x5x32, 5x5x64), each with a 2x2 pool, dense 512, dense 10. Both
sides have one thread on the same core and take turns. During a round ours
measures its loss; PFLlib measures nothing.

  python -m benchmarks.references_cnn --sources=DIR --python=PYTHON

where DIR holds a checkout of PFLlib, and PYTHON belongs to an environment with
the packages of tests/references/requirements.txt.
"""

import contextlib
import os
import pathlib
import statistics
import sys
from typing import Any

import numpy as np

from benchmarks import measuring
from benchmarks import mnist_cnn

METHODS = ('FedAvg', 'FedPer', 'FedRep', 'FedProx', 'SCAFFOLD', 'Ditto')
OURS, PFLLIB = 'ours', 'PFLlib'
CLIENTS, BATCH_SIZE, RATE, PENALTY = 20, 10, 0.005, 0.1
# Its servers run one round more than requested, and require two.
_PFLLIB_ROUNDS = 2


def _examples(number: int) -> tuple[np.ndarray, np.ndarray]:
  """Return images in [0, 1] and labels by client, `[20, number, ...]`."""
  x, y, source = mnist_cnn.images(CLIENTS * number)
  measuring.say(f'{source}: {len(x)} images.')
  shape = (CLIENTS, number)
  return ((x / np.float32(255)).reshape(*shape, 28, 28, 1), y.reshape(shape))


# ---- ours --------------------------------------------------------------------


def _build_network() -> Any:
  import tensorflow as tf

  layers = tf.keras.layers
  return tf.keras.Sequential(
    [
      layers.InputLayer([28, 28, 1]),
      layers.Conv2D(32, 5, activation='relu'),
      layers.MaxPool2D(2),
      layers.Conv2D(64, 5, activation='relu'),
      layers.MaxPool2D(2),
      layers.Flatten(),
      layers.Dense(512, activation='relu'),
      layers.Dense(10, name='head'),
    ]
  )


def _our_process(method: str) -> Any:
  import tensorflow as tf

  from baselines.fed_prox import build_fed_prox
  from baselines.scaffold import build_scaffold
  import tff_partial
  from tff_partial import algorithms

  model = tff_partial.from_keras(
    _build_network,
    local='head' if method in ('FedPer', 'FedRep') else None,
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
  )
  training = tff_partial.Phase(
    optimizer=tff_partial.sgd(RATE), batch_size=BATCH_SIZE, shuffle=True
  )
  builders = {
    'FedAvg': lambda: algorithms.build_fed_avg(model, training=training),
    'FedPer': lambda: algorithms.build_fed_per(model, training=training),
    'FedRep': lambda: algorithms.build_fed_rep(
      model, head=training, representation=training
    ),
    'FedProx': lambda: build_fed_prox(
      model, penalty=PENALTY, training=training
    ),
    'SCAFFOLD': lambda: build_scaffold(
      model, num_clients=CLIENTS, training=training
    ),
    'Ditto': lambda: algorithms.build_ditto(
      model, penalty=PENALTY, training=training, personal=training
    ),
  }
  return builders[method]()


class _Memory:
  """Client states in memory, with the interface that `Run` requires."""

  def __init__(self, first: list[Any]):
    self._kept = first

  def read(self, ids: Any) -> list[Any]:
    return [self._kept[int(one)] for one in ids]

  def write(self, ids: Any, states: Any) -> None:
    for one, state in zip(ids, states, strict=True):
      self._kept[int(one)] = state


def _our_round(
  options: Any, stack: contextlib.ExitStack
) -> measuring.Candidate:
  import tensorflow as tf

  tf.config.threading.set_intra_op_parallelism_threads(1)
  tf.config.threading.set_inter_op_parallelism_threads(1)
  import tff_partial
  from tff_partial import runtimes

  process = _our_process(options.method)
  x, y = _examples(options.examples)
  clients = tff_partial.pack(
    {str(i): {'x': x[i], 'y': y[i]} for i in range(CLIENTS)},
    process.example_spec,
  )
  context = stack.enter_context(runtimes.cohort())
  first = [
    process.initialize_client(np.array([0, i], np.int32))
    for i in range(CLIENTS)
  ]
  run = measuring.Run(process, clients, CLIENTS, context, store=_Memory(first))
  return measuring.timed(run.step)


# ---- PFLlib ------------------------------------------------------------------


def _their_round(
  options: Any, stack: contextlib.ExitStack
) -> measuring.Candidate:
  import torch

  torch.set_num_threads(1)
  from tests.references import pfllib
  from tests.references import problem

  x, y = _examples(options.examples)
  pfllib.prepare(
    pathlib.Path(options.sources).resolve() / PFLLIB,
    [
      [
        (torch.from_numpy(image[None, :, :, 0]), torch.tensor(int(label)))
        for image, label in zip(*of_one, strict=True)
      ]
      for of_one in zip(x, y, strict=True)
    ],
  )
  from flcore.trainmodel import models

  network = models.FedAvgCNN(in_features=1, num_classes=10, dim=1024)
  head, network.fc = network.fc, torch.nn.Identity()
  server = pfllib.make_server(
    options.method,
    pfllib.network(network, head),
    pfllib.arguments(
      problem.Settings(
        batch_size=BATCH_SIZE,
        epochs=1,
        rate=RATE,
        personal_epochs=1,
        penalty=PENALTY,
        server_rate=1.0,
      ),
      global_rounds=_PFLLIB_ROUNDS - 1,
      join_ratio=1.0,
      num_classes=10,
      num_clients=CLIENTS,
    ),
  )
  return measuring.timed(server.train, parts=_PFLLIB_ROUNDS)


# ---- both --------------------------------------------------------------------


def serve(options: Any) -> None:
  """Run rounds of one side for the comparing process."""
  # Before anything starts threads: the same single core for both.
  os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
  make = {OURS: _our_round, PFLLIB: _their_round}[options.worker]

  def prepare() -> measuring.Answers:
    turn = make(options, stack)
    return {'turn': lambda: {'seconds': turn()}}

  with contextlib.ExitStack() as stack:
    measuring.serve(prepare)


def compare(options: Any) -> None:
  """Time rounds of each method in turn."""
  measuring.begin('MNIST, 20 clients of a small CNN, one thread: a round')
  source = pathlib.Path(options.sources).resolve() / PFLLIB
  if not options.sources or not source.is_dir():
    measuring.say(
      f'Skipped: --sources={options.sources} holds no PFLlib, a checkout of '
      'github.com/TsingZ0/PFLlib.'
    )
    return
  for method in options.methods:
    measuring.say(f'-- {method}')
    shared = [
      f'--method={method}',
      f'--examples={options.examples}',
      f'--sources={options.sources}',
    ]
    with contextlib.ExitStack() as stack:
      candidates = {}
      for name, python in ((OURS, sys.executable), (PFLLIB, options.python)):
        worker = measuring.Worker(
          'benchmarks.references_cnn',
          f'--worker={name}',
          *shared,
          python=python,
        )
        stack.callback(worker.close)
        worker.ask('ready')
        candidates[name] = worker.turn
      seconds = measuring.take_turns(
        candidates, repetitions=options.repetitions, warm_up=options.warm_up
      )
    ratios = [
      theirs / mine
      for theirs, mine in zip(seconds[PFLLIB], seconds[OURS], strict=True)
    ]
    measuring.say(
      f'  {PFLLIB} / {OURS}: {statistics.median(ratios):.3g} '
      f'({min(ratios):.3g} to {max(ratios):.3g})'
    )


def main() -> None:
  """Read the arguments and compare, or serve one side."""
  parser = measuring.parser(__doc__)
  add = parser.add_argument
  add('--sources', default='', help='the folder with a checkout of PFLlib')
  add('--python', default=sys.executable, help='the Python that has PyTorch')
  add('--methods', nargs='+', choices=METHODS, default=METHODS, help='which')
  add('--examples', type=int, default=300, help='images of a client')
  add('--repetitions', type=int, default=7, help='turns of each that count')
  add('--warm_up', type=int, default=2, help='turns of each before')
  add('--worker', choices=[OURS, PFLLIB], help='serve another process')
  add('--method', choices=METHODS, help='what to serve')
  options = parser.parse_args()
  if options.worker:
    serve(options)
  compare(options)


if __name__ == '__main__':
  main()
