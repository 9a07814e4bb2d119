"""Selection of a round's clients, on a model of one number.

A client's label is its target t, the model predicts w, and the loss is (w - t)
squared. A step of a half goes to the mean of the targets of those that train.
"""

import numpy as np
import pytest
import tensorflow as tf

import tff_partial
from tff_partial import algorithms
from tff_partial import layers
from tff_partial import Phase
from tff_partial import sgd
from tff_partial.training.client_selection import Draw
from tff_partial.training.client_selection import HighestLoss
from tff_partial.training.errors import ProgramError

TARGETS = {f'c{number}': float(number) for number in range(8)}


def _build() -> tf.keras.Model:
  x = tf.keras.Input([1])
  return tf.keras.Model(x, layers.PrivateVector(1, initializer='zeros')(x))


@pytest.fixture(scope='module', name='made')
def fixture_made():
  model = tff_partial.from_keras(_build, loss='mse')
  process = algorithms.build_fed_avg(
    model, training=Phase(optimizer=sgd(0.5), batch_size=None)
  )
  evaluation = algorithms.build_fed_avg_eval(model)
  clients = tff_partial.pack(
    {
      name: {'x': np.zeros([1, 1], 'f4'), 'y': np.full([1, 1], target, 'f4')}
      for name, target in TARGETS.items()
    },
    process.example_spec,
  )
  return process, evaluation, clients


def _train(made, select, rounds: int = 3, **options):
  process, _, clients = made
  options = {'oversample': 2.0, 'clients_per_round': 2, 'seed': 3, **options}
  with tff_partial.runtimes.cohort(jit=False):
    return tff_partial.train(
      process, clients, rounds=rounds, select_clients=select, **options
    )


def _weight(result) -> float:
  (weight,) = result.weights.trainable[tff_partial.tiers.GLOBAL].values()
  return float(np.squeeze(weight))


@pytest.mark.slow
def test_power_of_choice_takes_the_clients_of_highest_loss(made):
  drawn = []

  def note(draw):
    chosen = HighestLoss(made[1])(draw)
    drawn.append(
      (draw.client_ids, chosen, [row['loss'] for row in draw.history])
    )
    return chosen

  result = _train(made, note)
  weight, losses = 0.0, []
  for candidates, chosen, known in drawn:
    loss = {c: (weight - TARGETS[c]) ** 2 for c in candidates}
    assert len(candidates) == 4
    assert chosen == sorted(candidates, key=lambda c: -loss[c])[:2]
    np.testing.assert_allclose(known, losses, rtol=1e-6)
    losses.append(np.mean([loss[c] for c in chosen]))
    weight = np.mean([TARGETS[c] for c in chosen])
  assert len(drawn) == 3
  np.testing.assert_allclose(_weight(result), weight, rtol=1e-6)
  assert _weight(_train(made, HighestLoss(made[1]))) == _weight(result)


def _at_random(draw):
  return list(draw.generator.choice(draw.client_ids, 2, replace=False))


@pytest.mark.slow
def test_a_run_that_goes_on_selects_the_same_clients(made, tmp_path):
  whole = _train(made, _at_random, 6)
  options = {'output_dir': tmp_path, 'evaluate_every': 1}
  _train(made, _at_random, 3, **options)
  assert _weight(_train(made, _at_random, 6, **options)) == _weight(whole)
  with pytest.raises(
    ProgramError, match='select_clients: they were _at_random and'
  ):
    _train(made, HighestLoss(made[1]), 7, **options)


@pytest.mark.slow
def test_the_first_of_the_draw_are_those_that_take_part_otherwise(made):
  first = _train(made, lambda draw: draw.client_ids[: draw.clients_per_round])
  assert _weight(first) == _weight(_train(made, None))


def test_without_a_finite_loss_the_first_of_the_draw_are_taken(made):
  def draw(measured):
    return Draw(1, 'abc', 2, np.random.default_rng(), [], lambda _: measured)

  assert HighestLoss(made[1])(draw({})) == ['a', 'b']
  assert HighestLoss(made[1])(draw({'loss': {'c': 1.0}})) == ['c', 'a']
  # Such as an area under a curve of examples of one class.
  undefined = draw({'loss': {'a': np.nan, 'b': 0.5, 'c': 0.9}})
  assert HighestLoss(made[1])(undefined) == ['c', 'b']
  with pytest.raises(ProgramError, match="no metric 'mae'. .* one of .'loss'"):
    HighestLoss(made[1], 'mae')(draw({'loss': {'a': 1.0}}))


def _build_own() -> tf.keras.Model:
  x = tf.keras.Input([1])
  shared = tf.keras.layers.Dense(1, use_bias=False)(x)  # Nothing, of zeros.
  own = layers.PrivateVector(1, initializer='zeros', name='own')(x)
  return tf.keras.Model(x, shared + own)


@pytest.mark.slow
def test_candidates_are_measured_with_what_they_remember(made):
  model = tff_partial.from_keras(_build_own, local='own', loss='mse')
  process = algorithms.build_furl(
    model, training=Phase(optimizer=sgd(0.5), batch_size=None)
  )
  evaluation, measured = algorithms.build_furl_eval(model), []

  def note(draw):
    measured.append(draw.measure(evaluation)['loss'])
    return draw.client_ids

  options = {'clients_per_round': len(TARGETS), 'oversample': 1.0}
  _train((process, None, made[2]), note, rounds=2, **options)
  # A step of a half brings each client to its target.
  assert measured[0] == {c: target**2 for c, target in TARGETS.items()}
  assert measured[1] == dict.fromkeys(TARGETS, 0.0)


@pytest.mark.slow
def test_candidates_are_measured_with_the_state_of_the_server(made):
  def level(model):
    return {'level': tf.constant(1.0)}

  process, _, clients = made
  evaluation = tff_partial.evaluation.build_evaluation(
    process.model, work=[Phase(train=(), measured=True)], server_state=level
  )
  process = tff_partial.compose(
    process.model, work=[Phase(measured=True)], server_state=level
  )
  result = _train((process, None, clients), HighestLoss(evaluation), rounds=1)
  assert result.rounds == 1


@pytest.mark.parametrize(
  ('select', 'message'),
  [
    (
      lambda draw: ['nobody'],
      "'nobody' was not drawn for round 1.* `oversample`",
    ),
    (lambda draw: draw.client_ids, 'expected from 1 to 2 clients, each once'),
    (lambda draw: [], '0 clients in 0 places for round 1'),
    (lambda draw: [draw.client_ids[0]] * 2, '1 clients in 2 places'),
  ],
)
def test_an_impossible_selection_is_refused(made, select, message):
  with pytest.raises(ProgramError, match=message):
    _train(made, select)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (
      lambda evaluation: {'validation': evaluation},
      'expected clients and how they are measured, .*found a Evaluation',
    ),
    (lambda _: {'select': 'loss'}, "select: expected `Selection.'loss'."),
    (lambda _: {'stop': 3}, 'stop: expected `StoppingRule.*, found a int'),
  ],
)
def test_arguments_of_other_kinds_are_named(made, options, message):
  process, evaluation, clients = made
  rest = {'rounds': 1, 'clients_per_round': 1, **options(evaluation)}
  with pytest.raises(ProgramError, match=message):
    tff_partial.train(process, clients, **rest)


@pytest.mark.parametrize('part', [0, 1])
def test_what_measures_nothing_is_refused_when_a_set_is_made(made, part):
  given = (made[0], made[1].model)[part]
  kind = type(given).__name__
  with pytest.raises(
    ProgramError,
    match=f'an evaluation, such as .*build_fed_recon_eval.* found a {kind}',
  ):
    tff_partial.EvaluationSet(given, made[2])
