"""Low-rank adapters of a transformer for users of another corpus than its own.

python -m benchmarks.adapters DATA FILE METHOD RANK ROUNDS SEED [NOISE]

The file, `.weights.h5`, keeps weights that were trained centrally on all of
DATA/subreddit; if it is missing, they are trained first. Users of
DATA/lean_chat adapt them, and a third of those that did not take part is
measured on its newer sentences after three passes over its older ones. The rate
in training is the best of two, and then that of the passes of three, on
validation users and in vocabulary. The last figure has a cache of the user's
n-grams on top. With NOISE, the noise multiplier, 100 clients a round take two
steps each.
"""

from collections.abc import Callable
import dataclasses
import functools
import pathlib
import sys
from typing import Any

import tensorflow as tf

from baselines import ngram_cache
from benchmarks import measuring
from tasks.next_word import clients as clients_lib
from tasks.next_word import corpora
from tasks.next_word import metrics
from tasks.next_word import task as task_lib
from tasks.next_word.options import NextWordOptions
from tasks.next_word.options import NextWordSizes
from tasks.next_word.sentences import Limits
from tasks.task import NOBODY
from tasks.task import TEST
from tasks.task import TRAIN
from tasks.task import VALIDATION
import tff_partial
from tff_partial import algorithms
from tff_partial import Phase
from tff_partial import sgd
from tff_partial.analysis.communication import communication
from tff_partial.dp import clipping
from tff_partial.dp import privacy

LIMITS = Limits(min_sentences=2, max_sentences=128)
OPTIONS = NextWordOptions(sizes=NextWordSizes('transformer', embedding=64))
# A rate to begin with, and factors of it. Where A and B move together, larger
# ones diverge.
RATES = {'all': 0.3, 'ffa': 2.0, 'fed_sa': 0.5, 'two': 0.5, 'fed_recon': 0.5}
TRAINING, PASSES = (0.5, 2.0), (0.3, 3.0)
OWN = {'a': 'local', 'b': 'local', 'name': 'own'}
ADAPTERS: dict[str, list[dict[str, Any]]] = {
  'all': [],
  'ffa': [{'a': 'frozen'}],
  'fed_sa': [{'b': 'local'}],
  'two': [{}, OWN],
  'fed_recon': [{'b': 'local'}],
}


def pretrain(data: str, task: task_lib.NextWord, path: str) -> None:
  """Train centrally on the other corpus, in the words of this one."""
  posts = corpora.load('subreddit', data, LIMITS)
  rows = task.words.encode(*posts.between(0, len(posts)), OPTIONS.max_tokens)
  model = task.model_with(NOBODY)
  trained = model.build()
  trained.compile(tf.keras.optimizers.Adam(2e-3), model.loss_function)
  trained.fit(rows[:, :-1], rows[:, 1:], batch_size=64, epochs=2, verbose=2)
  trained.save_weights(path)


def adapted(
  task: task_lib.NextWord, path: str, method: str, rank: int
) -> tff_partial.PartialModel:
  """Make the pretrained model with the adapters of a method."""
  plain = task.model_with(NOBODY)
  model = tff_partial.from_keras(
    plain.build,
    loss=plain.loss_function,
    metrics=lambda: metrics.build_metrics(task.words.tokens),
    labels=plain.example_spec['y'],
    initial_weights=path,
    seed=plain.seed,
  )
  for choice in ADAPTERS[method]:
    model = tff_partial.add_lora(model, rank, where='.*kernel', **choice)
  return model


def process_of(
  model: tff_partial.PartialModel, method: str, rate: float, noise: list[str]
) -> tff_partial.processes.PartialProcess:
  """Build the training of a method; with noise, it takes two steps."""
  phase = Phase(optimizer=sgd(rate), batch_size=16)
  if method == 'fed_recon':
    return algorithms.build_fed_recon(model, reconstruct=phase, update=phase)
  if not noise:
    return algorithms.build_fed_per(model, training=phase)
  mean = privacy.private_mean(
    clipping.AdaptiveClip(0.1),
    noise_multiplier=float(noise[0]),
    clients_per_round=100,
    noise_seed=0,
  )
  return algorithms.build_fed_per(
    model,
    training=Phase(
      optimizer=sgd(rate), batch_size=16, max_steps=2, shuffle=True
    ),
    aggregation=tff_partial.Aggregation(
      mean, client_weighting=tff_partial.ClientWeighting.UNIFORM
    ),
  )


def main(data: str, path: str, method: str, *numbers: str) -> None:
  """Measure a method at one rank."""
  rank, rounds, seed = map(int, numbers[:3])
  noise = list(numbers[3:])
  cohort = 100 if noise else 16
  chats = corpora.load('lean_chat', data, LIMITS)
  task = task_lib.NextWord(chats, OPTIONS, seed)
  if not pathlib.Path(path).exists():
    pretrain(data, task, path)
  model = adapted(task, path, method, rank)
  first = RATES[method]
  authors = clients_lib.Authors(
    chats,
    task.words,
    {
      name: dataclasses.replace(
        part,
        users=part.users[::3],
        older=part.older[::3],
        newer=part.newer[::3],
      )
      for name, part in task.parts.items()
    },
  )

  def measured(part: str, rate: float, weights: Any, cache: str = '') -> float:
    build: Callable[..., Any] = algorithms.build_fine_tuning_eval
    passes = 'personalise'
    if 'local' in model.tiers:
      build = algorithms.build_fed_per_eval
    elif cache:
      passes = 'tune'
    if cache:
      build = functools.partial(
        ngram_cache.build_ngram_cache_eval, targets=task.targets, mixing=0.1
      )
    phase = Phase(optimizer=sgd(rate), batch_size=16, epochs=3)
    tests = build(model, **{passes: phase})
    clients = authors.clients(part, tests.example_spec)
    found = tff_partial.evaluate(
      tff_partial.EvaluationSet(tests, clients), weights
    )
    score = float(found['accuracy_in_vocabulary'])
    measuring.say(f'{method} {rank} {part} {rate}{cache}: {score:.4f}')
    return score

  tried = []
  for rate in (first * factor for factor in TRAINING):
    process = process_of(model, method, rate, noise)
    trained = tff_partial.train(
      process,
      task.clients(TRAIN, process.example_spec),
      rounds=rounds,
      clients_per_round=cohort,
      seed=seed,
      privacy='unaccounted' if noise else None,
    )
    score = measured(VALIDATION, first, trained.weights)
    tried.append((score, rate, first, trained.weights))
  best = max(tried, key=lambda t: t[0])
  for own in (first * factor for factor in PASSES):
    score = measured(VALIDATION, own, best[3])
    best = max(best, (score, best[1], own, best[3]), key=lambda t: t[0])
  counted = communication(process, ())
  each = counted['download_bytes'] + counted['upload_bytes']
  measuring.say(
    f'rates {best[1:3]}; {counted}; {each * rounds * cohort / 1e6:.2f} MB'
  )
  for own in (0.0, best[2]):
    measured(TEST, own, best[3])
  measured(TEST, best[2], best[3], ', and a cache of n-grams')


if __name__ == '__main__':
  with tff_partial.runtimes.cohort(jit=True):
    main(*sys.argv[1:])
