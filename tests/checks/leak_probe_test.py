"""Random tastes rank as by chance, but for a protocol that leaks."""

import pytest
import tensorflow as tf

from tff_partial import algorithms
from tff_partial import from_keras
from tff_partial import Phase
from tff_partial import sgd
from tff_partial.checks import leak_probe
from tff_partial.checks import split_personalization
from tff_partial.data import splits
from tff_partial.templates import implicit_factors
from tff_partial.templates import ranking

_ITEMS, _SPLIT = 120, splits.by_mark()


def _probe(process, evaluation, num_users: int, rounds: int):
  exam = ranking.build_ranking_eval(evaluation, _ITEMS, split=_SPLIT)
  sizes = {'num_users': num_users, 'rounds': rounds}
  return leak_probe.probe_leak(process, exam, _ITEMS, chance=0.1, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize('told', [False, True])
def test_only_what_was_held_out_tells_of_random_tastes(told) -> None:
  """An evaluation whose clients solve for all of their items is told."""
  model = implicit_factors.build_model(_ITEMS, 32)
  known = splits.Split(splits.everything(), _SPLIT.query) if told else _SPLIT
  evaluation = algorithms.build_fed_ials_eval(model, split=known)
  probe = _probe(algorithms.build_fed_ials(model), evaluation, 200, 3)
  assert probe.leaks == told
  assert probe.hit_rate > 0.3 if told else abs(probe.hit_rate - 0.1) < 0.08


def _factors() -> tf.keras.Model:
  item = tf.keras.Input([], dtype=tf.int32)
  vector = tf.keras.layers.Embedding(_ITEMS, 4, 'normal')(item)
  return tf.keras.Model(item, tf.keras.layers.Dense(1, name='own')(vector))


@pytest.mark.slow
def test_what_diverges_is_not_probed() -> None:
  model = from_keras(_factors, local='own', loss='mse')
  steps = Phase(optimizer=sgd(1e30), batch_size=4)
  evaluation = algorithms.build_fed_recon_eval(
    model, split=_SPLIT, personalise=steps
  )
  process = algorithms.build_fed_recon(model, reconstruct=steps)
  with pytest.raises(split_personalization.CheckError, match='not finite'):
    _probe(process, evaluation, 10, 1)
