"""What optimizers keep from round to round, and how their rates follow it."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import planted
from tff_partial import algorithms
from tff_partial import client_state
from tff_partial import client_statistics
from tff_partial import composition
from tff_partial import evaluation
from tff_partial import phases
from tff_partial import processes
from tff_partial import tiers
from tff_partial.client import client_batches
from tff_partial.client import client_work
from tff_partial.client import optimizer_slots
from tff_partial.client import work as work_lib
from tff_partial.data import splits
from tff_partial.phases import Phase
from tff_partial.phases import sgd

optimizers = tff.learning.optimizers
_OWN = 'user/vector'
_RATE, _STEPS = 0.1, 5


def _clients() -> dict[str, planted.Fields]:
  return planted.rate({'ann': 6, 'bob': 9})


def _process(
  optimizer: phases.Optimizer,
  train: tuple[str, ...] = (tiers.LOCAL,),
  memory: client_state.ClientState = client_state.persist_local,
  **settings: Any,
) -> processes.PartialProcess:
  """Clients take some steps on all of their examples in each round."""
  phase = Phase(
    train,
    optimizer=optimizer,
    measured=True,
    **{'batch_size': 10, 'epochs': _STEPS, **settings},
  )
  return composition.compose(
    planted.factorization(), work=[phase], client_state=memory
  )


def _train(process: processes.PartialProcess, rounds: int) -> Any:
  """The server's state, and what the clients remember after some rounds."""
  cohort = planted.cohort_of(process, _clients(), 'seed')
  state, kept = process.initialize(), planted.first_states(process, cohort)
  for _ in range(rounds):
    output = process.next(state, kept, cohort)
    state, kept = output.state, list(output.client_states)
  return state, kept


def _vectors(kept: list[Any]) -> list[np.ndarray]:
  """The clients' vectors, whether optimizers keep something beside or not."""
  return [state.get(optimizer_slots.HELD, state)[_OWN] for state in kept]


def _adam_by_hand(process: processes.PartialProcess, steps: int) -> Any:
  """The vectors after some steps of Adam, as TFF's docstring prints it."""
  table = planted.global_weights(process, process.initialize())
  (table,) = table.values()
  cohort = planted.cohort_of(process, _clients(), 'seed')
  found = []
  for fields, first in zip(
    _clients().values(),
    _vectors(planted.first_states(process, cohort)),
    strict=True,
  ):
    x, y = np.float64(table[fields['x']]), fields['y']
    vector, mean, square = np.float64(first), 0.0, 0.0
    for step in range(1, steps + 1):
      slope = 2.0 * (x @ vector - y) @ x / len(y)
      mean = 0.9 * mean + 0.1 * slope
      square = 0.999 * square + 0.001 * slope**2
      rate = _RATE * np.sqrt(1.0 - 0.999**step) / (1.0 - 0.9**step)
      vector = vector - rate * mean / (np.sqrt(square) + 1e-7)
    found.append(vector)
  return found


@pytest.mark.slow
@pytest.mark.parametrize('runtime', planted.RUNTIMES)
def test_two_rounds_of_five_steps_of_adam_are_ten(runtime):
  process = _process(optimizers.build_adam(_RATE), slots='kept')
  with planted.RUNTIMES[runtime]():
    _, kept = _train(process, 2)
  planted.assert_close(_vectors(kept), _adam_by_hand(process, 10), 1e-5)
  for state in kept:
    assert state['slots']['phase_0_0'][tiers.LOCAL]['step'] == 10


@pytest.mark.slow
def test_of_weights_of_the_server_nothing_stays():
  adam = optimizers.build_adam(_RATE)
  both = Phase(optimizer=adam, slots='kept')
  model = planted.factorization()
  process = algorithms.build_furl(model, training=both)
  _, kept = _train(process, 2)
  # One step a round, and none of the table's moments.
  for state in kept:
    assert list(state['slots']['phase_0_0']) == [tiers.LOCAL]
    assert state['slots']['phase_0_0'][tiers.LOCAL]['step'] == 2
  # In a first round nothing was kept yet.
  states = [
    _train(algorithms.build_furl(model, training=training), 1)[0]
    for training in (both, Phase(optimizer=adam))
  ]
  planted.assert_same(*(planted.global_weights(process, s) for s in states))


@pytest.mark.slow
def test_phases_keep_apart_what_each_of_them_has():
  adam = optimizers.build_adam(_RATE)
  own = Phase((tiers.PERSONAL,), optimizer=adam, slots='kept')
  process = composition.compose(
    planted.factorization(local=None),
    client_state=client_state.persist_personal,
    work=[
      Phase(measured=True),
      phases.Interleaved((Phase(), own)),
      Phase((tiers.PERSONAL,), optimizer=sgd(0.1)),
      own,
    ],
  )
  _, kept = _train(process, 3)
  for state in kept:
    slots = state['slots']
    assert list(slots) == ['phase_1_1', 'phase_3_0']
    assert [slots[name][tiers.PERSONAL]['step'] for name in slots] == [3, 3]
    one, other = (slots[name][tiers.PERSONAL]['accumulator'] for name in slots)
    assert any((one[name] != other[name]).any() for name in one)


@pytest.mark.slow
def test_a_client_whose_round_failed_keeps_what_it_had():
  # The third round's rate is no number; the client had taken its steps by then.
  process = _process(
    optimizers.build_adam(_RATE),
    slots='kept',
    rate_factor=lambda done: tf.where(done < 2, 1.0, np.nan),
  )
  planted.assert_same(_train(process, 3)[1], _train(process, 2)[1])


@pytest.mark.slow
def test_what_is_kept_takes_steps_at_the_rate_of_the_phase():
  first, idle = (
    _process(optimizers.build_adam(rate), slots='kept') for rate in (_RATE, 0.0)
  )
  state, kept = _train(first, 1)
  cohort = planted.cohort_of(idle, _clients(), 'seed')
  output = planted.run(idle, cohort, state, kept)
  planted.assert_same(_vectors(list(output.client_states)), _vectors(kept))


# ---- schedules ---------------------------------------------------------------


@pytest.mark.slow
def test_a_rate_may_follow_the_rounds():
  following = _process(
    sgd(_RATE),
    train=(tiers.GLOBAL, tiers.LOCAL),
    rate_factor=lambda done: 0.5 ** tf.cast(done, tf.float32),
  )
  cohort = planted.cohort_of(following, _clients(), 'seed')
  state, kept = following.initialize(), planted.first_states(following, cohort)
  for rate in (_RATE, _RATE / 2, _RATE / 4):
    fixed = _process(sgd(rate), train=(tiers.GLOBAL, tiers.LOCAL))
    wanted = planted.run(fixed, cohort, state, kept)
    output = planted.run(following, cohort, state, kept)
    planted.assert_same(
      planted.global_weights(following, output.state),
      planted.global_weights(fixed, wanted.state),
    )
    planted.assert_same(list(output.client_states), list(wanted.client_states))
    state, kept = output.state, list(output.client_states)


def test_a_round_without_epochs_has_no_step():
  phase = Phase((tiers.LOCAL,), epochs=lambda done: 1 - done)
  (own,) = work_lib.personal_phases([phase], planted.factorization(), 3)
  assert own.max_steps == 0
  for done, number in ((0, 1), (1, 0), (3, 0)):
    batches = client_batches.Batches(
      phase,
      {'weight': tf.ones([5])},
      splits.Chosen(tf.range(5), tf.constant(5)),
      tf.zeros([2], tf.int32),
      tf.constant(done),
    )
    assert batches.number == number


@pytest.mark.slow
def test_a_rate_that_follows_the_rounds_is_of_the_first_one():
  # 1, 1/2, 1/4 of it, and not 1, 1/2, 1/8: the kept rate is not multiplied.
  process = _process(
    optimizers.build_adam(_RATE),
    slots='kept',
    rate_factor=lambda done: 0.5 ** tf.cast(done, tf.float32),
  )
  for rounds, factor in ((1, 1.0), (2, 0.5), (3, 0.25)):
    for state in _train(process, rounds)[1]:
      held = state['slots']['phase_0_0'][tiers.LOCAL]
      assert held['learning_rate'] == np.float32(_RATE) * np.float32(factor)


def _falling(step: tf.Tensor) -> tf.Tensor:
  return _RATE / (1.0 + tf.cast(step, tf.float32))


def _descended(process: processes.PartialProcess, rates: list[float]) -> Any:
  """The vectors after a step of plain descent by each rate, by hand."""
  (table,) = planted.global_weights(process, process.initialize()).values()
  cohort = planted.cohort_of(process, _clients(), 'seed')
  firsts = _vectors(planted.first_states(process, cohort))
  found = []
  for fields, vector in zip(_clients().values(), firsts, strict=True):
    x, y = table[fields['x']], fields['y']
    for rate in rates:
      vector = vector - rate * 2.0 * (x @ vector - y) @ x / len(y)
    found.append(vector)
  return found


@pytest.mark.parametrize(
  ('slots', 'counted'),
  [
    pytest.param('reset', [1, 2, 3, 4, 5] * 2, marks=pytest.mark.slow),
    ('kept', list(range(1, 11))),
  ],
)
def test_a_schedule_counts_steps_in_a_round_or_in_a_life(slots, counted):
  scheduled = optimizers.schedule_learning_rate(sgd(_RATE), _falling)
  process = _process(scheduled, slots=slots)
  wanted = _descended(process, [_RATE / count for count in counted])
  planted.assert_close(_vectors(_train(process, 2)[1]), wanted, 1e-5)


# ---- refusals ----------------------------------------------------------------


def _scheduled() -> phases.Optimizer:
  return optimizers.schedule_learning_rate(sgd(_RATE), _falling)


def _furl(**settings: Any) -> Any:
  return algorithms.build_furl(
    planted.factorization(), training=Phase(slots='kept'), **settings
  )


@pytest.mark.parametrize(
  ('build', 'error', 'message'),
  [
    (lambda: Phase(slots='keep'), phases.PhaseError, "slots='keep'.*'kept'"),
    (
      lambda: Phase(optimizer=_scheduled()),
      phases.PhaseError,
      'counts the steps of a client, not rounds.*rate_factor=lambda',
    ),
    (
      lambda: Phase(rate_factor=float('nan')),
      phases.PhaseError,
      'rate_factor: ',
    ),
    (
      lambda: _process(sgd(_RATE), rate_factor=lambda done: 0.5**done),
      phases.PhaseError,
      'rate_factor: the function fails on the number of rounds, an int32',
    ),
    (
      lambda: Phase(
        optimizer=_scheduled(), slots='reset', rate_factor=lambda done: 1.0
      ),
      phases.PhaseError,
      'ScheduledLROptimizer.* has no learning rate that could be multiplied',
    ),
    (
      lambda: _process(sgd(_RATE), train=(tiers.GLOBAL,), slots='kept'),
      phases.PhaseError,
      "trains .'global'., of which the model has no weights of the client's",
    ),
    (
      lambda: _process(sgd(_RATE), memory=client_state.stateless, slots='kept'),
      phases.PhaseError,
      "forget their 'local' weights.*such as FURL",
    ),
    (
      lambda: _furl(private_rule=client_statistics.SCALED_BY_SHARE),
      client_work.CompositionError,
      "settles what clients remember, .*slots='kept'",
    ),
    (
      lambda: evaluation.build_query_evaluation(
        planted.factorization(),
        client_state=client_state.persist_local,
        train=(tiers.LOCAL,),
        personalise=Phase(slots='kept'),
      ),
      client_work.CompositionError,
      "slots='kept': .* an evaluation keeps nothing",
    ),
    (
      lambda: evaluation.build_query_evaluation(
        planted.factorization(),
        train=(tiers.LOCAL,),
        personalise=Phase(rate_factor=lambda done: 1.0),
      ),
      client_work.CompositionError,
      'a rate factor that follow the rounds',
    ),
  ],
)
def test_what_cannot_be_kept_or_followed_is_refused(build, error, message):
  with pytest.raises(error, match=message):
    build()
