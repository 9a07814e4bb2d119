"""Laws of cohorts as they are on real devices: late, partial, asleep, in turn.

All of it follows from the seed, the round and the client.
"""

import collections
import functools
from typing import Any

import numpy as np
import pytest

from tasks.errors import OptionError
from tasks.experiment.command_line.flags import parse
from tasks.experiment.options.cohorts import Cohorts
from tests.support import small_runs
from tests.support.commands import repeatable_rows
import tff_partial
from tff_partial import phases
from tff_partial.data import cohorts
from tff_partial.data import packing
from tff_partial.dp import clipping as clipping_lib
from tff_partial.dp import privacy_plans
from tff_partial.training import programs
from tff_partial.training.errors import ProgramError
from tff_partial.training.participation import latency as latency_lib
from tff_partial.training.participation import sampling
from tff_partial.training.participation.availability import Availability
from tff_partial.training.participation.latency import Latency
from tff_partial.training.participation.sampling import Participation

_POPULATION = tuple(f'client {i}' for i in range(40))
# A day of four rounds in one time zone: midnight, morning, noon, evening.
_DAY = Availability(4, floor=0.2, zone_spread=0.0)
# Everything at once.
_REAL = Participation(
  order=sampling.EPOCHS,
  extra_clients=1,
  latency=Latency(speed_spread=0.5, round_spread=0.5),
  partial_work=0.5,
  availability=Availability(4, floor=0.5),
)


def _sampler(
  participation: Participation = Participation(), **options: Any
) -> sampling.CohortSampler:
  options = {'clients_per_round': 10, 'seed': 0, **options}
  return sampling.CohortSampler(
    _POPULATION, participation=participation, **options
  )


@pytest.mark.parametrize(
  'participation',
  [
    Participation(extra_clients=5, latency=Latency(1.0, 1.0)),
    Participation(availability=Availability(5, floor=0.4)),
    Participation(order=sampling.EPOCHS),
    Participation(order=sampling.EPOCHS, availability=Availability(5)),
  ],
)
def test_a_cohort_depends_on_seed_and_round_alone(participation):
  cohorts_of_a_run = [_sampler(participation).cohort(n) for n in range(1, 12)]
  one = _sampler(participation)
  assert [one.cohort(n) for n in range(1, 12)] == cohorts_of_a_run
  # A run that goes on in the middle, and one that goes back.
  resumed = _sampler(participation)
  assert [resumed.cohort(n) for n in range(7, 12)] == cohorts_of_a_run[6:]
  assert [resumed.cohort(n) for n in range(11, 0, -1)] == cohorts_of_a_run[::-1]
  other = _sampler(participation, seed=1)
  assert [other.cohort(n) for n in range(1, 12)] != cohorts_of_a_run
  for cohort in cohorts_of_a_run:
    assert len(set(cohort)) == len(cohort) <= 10


# ---- latencies ---------------------------------------------------------------


def test_latencies_are_log_normal_with_a_part_that_stays():
  ids = [str(number) for number in range(4000)]
  latency = Latency(speed_spread=0.6, round_spread=0.8)
  first, second = (latency.logarithms(ids, 0, number) for number in (1, 2))
  # 0.36 + 0.64 = 1, of which 0.36 is common to both rounds.
  for logarithms in (first, second):
    assert abs(logarithms.mean()) < 4 / np.sqrt(4000)
    assert abs(logarithms.var() - 1.0) < 4 * np.sqrt(2 / 4000)
    assert abs((logarithms < 1.0).mean() - 0.841) < 4 * np.sqrt(0.134 / 4000)
  assert abs(np.mean(first * second) - 0.36) < 4 / np.sqrt(4000)
  alone = latency.logarithms(['17'], 0, 2)
  assert alone == second[17]
  always = Latency(speed_spread=0.6)
  np.testing.assert_array_equal(
    always.logarithms(ids, 0, 1), always.logarithms(ids, 0, 2)
  )


def test_the_first_that_answer_are_joined():
  latency = Latency(speed_spread=1.0, round_spread=1.0)
  sampler = _sampler(Participation(extra_clients=6, latency=latency))
  everybody = _sampler(clients_per_round=16)
  for number in range(1, 20):
    asked = everybody.cohort(number)
    taken = latency.logarithms(asked, 0, number)
    last = np.sort(taken)[9]
    # Ten of sixteen, in the order in which they were drawn.
    assert sampler.cohort(number) == [
      client for client, mine in zip(asked, taken, strict=True) if mine <= last
    ]
    assert sampler.num_asked == 16


def test_fast_clients_take_part_more_often():
  def shares(latency: Latency) -> np.ndarray:
    sampler = _sampler(Participation(extra_clients=10, latency=latency))
    counts = collections.Counter(
      client for number in range(1, 301) for client in sampler.cohort(number)
    )
    # From the fastest to the slowest.
    order = np.argsort(Latency(1.0).logarithms(_POPULATION, 0, 1))
    return np.array([counts[_POPULATION[place]] for place in order]) / 300

  # Half of those that are asked, so that the fastest are always in time.
  biased = shares(Latency(speed_spread=1.0))
  assert (biased[:5] > 0.4).all() and (biased[-5:] < 0.1).all()
  # A share of 1/4 with a deviation of 0.025.
  fair = shares(Latency(round_spread=1.0))
  assert np.allclose(fair, 0.25, atol=0.1)


# ---- partial work ------------------------------------------------------------


def test_a_share_of_the_clients_is_slow_whoever_else_is_asked():
  ids = [str(number) for number in range(2000)]
  for latency in (Latency(), Latency(0.5, 0.5), Latency(2.0, 0.0)):
    slow = latency.are_slow(0.3, ids, 0, 1)
    assert abs(slow.mean() - 0.3) < 4 * np.sqrt(0.21 / 2000)
    assert latency.are_slow(0.3, ids[7:8], 0, 1) == slow[7]
    # Who is slow at a small share is so at a large one.
    assert not (slow & ~latency.are_slow(0.6, ids, 0, 1)).any()
    assert not latency.are_slow(0.0, ids, 0, 1).any()
    assert latency.are_slow(1.0, ids, 0, 1).all()
  latency = Latency(0.5, 0.5)
  taken = latency.logarithms(ids, 0, 1)
  slow = latency.are_slow(0.3, ids, 0, 1)
  assert taken[slow].min() > taken[~slow].max()


@functools.cache
def _spec() -> Any:
  return small_runs.build_model().example_spec


def _cohort(number: int = 400, count: int = 8) -> cohorts.Cohort:
  """Clients with as many examples each, of which one sees which they are."""
  clients = {
    f'client {place}': {
      'x': np.arange(count, dtype=np.int32) % small_runs.ITEMS,
      'y': np.arange(count, dtype=np.float32)[:, np.newaxis] + place,
    }
    for place in range(number)
  }
  population = packing.pack(clients, _spec())
  return population.cohort(
    population.client_ids,
    sampling.client_seeds(population.client_ids, 0, 1),
  )


def test_slow_clients_do_any_part_of_their_work():
  whole = _cohort()
  slow = np.arange(400) % 2 == 0
  cut = latency_lib.partial_work(whole, slow, seed=0, round_number=1)
  counts = np.array([client['count'] for client in cut])
  assert (counts[~slow] == 8).all()
  # 200 draws from 1 to 8: each 25 times, with a deviation of 4.7.
  drawn = collections.Counter(counts[slow].tolist())
  assert sorted(drawn) == list(range(1, 9))
  assert max(drawn.values()) < 25 + 4.5 * 4.7
  # All else is as it was, in its order.
  for before, after in zip(whole, cut, strict=True):
    assert list(before) == list(after)
    np.testing.assert_array_equal(before['seed'], after['seed'])
    np.testing.assert_array_equal(
      before['examples']['y'], after['examples']['y']
    )
  again = latency_lib.partial_work(whole, slow, seed=0, round_number=1)
  later = latency_lib.partial_work(whole, slow, seed=0, round_number=2)
  assert [c['count'] for c in again[:]] == counts.tolist()
  assert [c['count'] for c in later] != counts.tolist()


@pytest.fixture(scope='module', name='runtime', autouse=True)
def fixture_runtime():
  with tff_partial.runtimes.cohort(jit=False) as context:
    yield context


def _world(build: Any, measure: Any, **options: Any) -> small_runs.World:
  model = small_runs.build_model()
  return small_runs.World(build(model, **options), measure(model))


@pytest.fixture(scope='module', name='world')
def fixture_world():
  """Federated reconstruction: a support and a query set, two epochs."""
  return _world(
    tff_partial.algorithms.build_fed_recon,
    tff_partial.algorithms.build_fed_recon_eval,
    update_optimizer=phases.sgd(0.5),
    reconstruction_epochs=2,
    batch_size=2,
  )


@pytest.mark.slow
def test_partial_work_is_training_on_the_first_examples(world):
  process = world.process
  ids = world.clients.client_ids
  seeds = sampling.client_seeds(ids, 0, 1)
  whole = world.clients.cohort(ids, seeds)
  cut = latency_lib.partial_work(whole, np.full([len(ids)], True), 0, 1)
  counts = [int(client['count']) for client in cut]
  assert len(set(counts)) > 2
  # The same clients with the first of their examples, and no others.
  clients = {
    name: {
      field: np.asarray(values)[:count]
      for field, values in client['examples'].items()
    }
    for name, client, count in zip(ids, whole, counts, strict=True)
  }
  packed = packing.pack(clients, process.example_spec, capacities=[8])
  nothing: list[Any] = [collections.OrderedDict()] * len(ids)
  outputs = [
    process.next(process.initialize(), nothing, cohort)
    for cohort in (cut, packed.cohort(ids, seeds), whole)
  ]
  states = [small_runs.flat(output.state) for output in outputs]
  assert states[0] == states[1] != states[2]
  # A list of values without groups is read value by value.
  listed = process.next(process.initialize(), nothing, list(cut))
  assert small_runs.flat(listed.state) == states[0]
  done = [
    output.metrics['client_work']['train']['num_examples'] for output in outputs
  ]
  assert done[0] == done[1] < done[2]


# ---- availability ------------------------------------------------------------


def test_the_probability_follows_the_day():
  # Midnight, morning, noon and evening, and the next midnight.
  for number, expected in enumerate([0.2, 0.6, 1.0, 0.6, 0.2]):
    np.testing.assert_allclose(
      _DAY.probabilities(3, 0, number), expected, atol=1e-12
    )
  # Around the world the sum is always about the same.
  around = Availability(4, floor=0.2)
  for number in range(4):
    probabilities = around.probabilities(10_000, 0, number)
    assert abs(probabilities.mean() - 0.6) < 4 * 0.29 / 100
    assert probabilities.min() < 0.201 and probabilities.max() > 0.999


def test_clients_are_available_as_often_as_likely():
  found = np.array(
    [_DAY.are_available(40, 0, number) for number in range(4 * 250)]
  ).reshape([250, 4, 40])
  # 10,000 draws of each time of day: a deviation below 0.005.
  np.testing.assert_allclose(
    found.mean((0, 2)), [0.2, 0.6, 1.0, 0.6], atol=0.02
  )
  # No client is so more often than others: 250 draws, a deviation of 0.031.
  np.testing.assert_allclose(found[:, 1].mean(0), 0.6, atol=0.14)


def test_a_client_comes_and_goes_once_a_day():
  day = Availability(24, floor=0.1)
  rounds = range(24 * 20)
  times = np.array([day.times(40, 0, number) for number in rounds])
  there = np.array([day.are_available(40, 0, number) for number in rounds])
  for client in range(40):
    days = np.floor(times[:, client])
    for one in np.unique(days)[1:-1]:
      of_a_day = there[days == one, client].astype(int)
      # At its noon it is there, and before and after not for long enough.
      assert of_a_day[len(of_a_day) // 2 - 1 : len(of_a_day) // 2 + 1].any()
      assert (np.abs(np.diff(of_a_day))).sum() <= 2
  assert 0.4 < there.mean() < 0.7


def test_only_available_clients_are_asked():
  day = Availability(4, floor=0.4)
  sampler = _sampler(Participation(availability=day))
  seen = set()
  for number in range(1, 60):
    there = day.are_available(40, 0, number)
    cohort = sampler.cohort(number)
    assert {int(c.split()[1]) for c in cohort} <= set(np.flatnonzero(there))
    assert len(cohort) == min(10, there.sum())
    seen |= set(cohort)
  assert seen == set(_POPULATION)


def test_too_few_available_clients_are_refused_at_once():
  # 0.2 of 40 at midnight are 8.
  assert abs(_DAY.fewest_expected(40, 0) - 8.0) < 1e-9
  sampler = _sampler(Participation(availability=_DAY), clients_per_round=8)
  sizes = {len(sampler.cohort(4 * day)) for day in range(1, 60)}
  # On average they are enough; in a night with fewer the cohort is smaller.
  assert max(sizes) == 8 and min(sizes) < 8
  with pytest.raises(ProgramError, match='only 8.0 of 40 are avail'):
    _sampler(Participation(availability=_DAY), clients_per_round=9)
  # Those in reserve must be there, too.
  with pytest.raises(ProgramError, match='asks 9 clients'):
    _sampler(
      Participation(availability=_DAY, extra_clients=1), clients_per_round=8
    )


# ---- epochs ------------------------------------------------------------------


def test_each_client_is_asked_once_an_epoch():
  sampler = _sampler(Participation(order=sampling.EPOCHS), clients_per_round=12)
  epochs = [
    [sampler.cohort(4 * epoch + number) for number in (1, 2, 3, 4)]
    for epoch in range(5)
  ]
  for epoch in epochs:
    # The last cohort is what is left.
    assert [len(cohort) for cohort in epoch] == [12, 12, 12, 4]
    assert sorted(c for cohort in epoch for c in cohort) == sorted(_POPULATION)
  firsts = {tuple(epoch[0]) for epoch in epochs}
  assert len(firsts) == 5


def test_in_an_epoch_who_is_asleep_is_asked_later():
  day = Availability(4, floor=0.5)
  sampler = _sampler(
    Participation(order=sampling.EPOCHS, availability=day), clients_per_round=4
  )
  missed = []
  for epoch in range(6):
    asked: list[str] = []
    for number in range(epoch * 10 + 1, epoch * 10 + 11):
      there = day.are_available(40, 0, number)
      cohort = sampler.cohort(number)
      assert all(there[int(client.split()[1])] for client in cohort)
      waiting = [
        client
        for place, client in enumerate(_POPULATION)
        if there[place] and client not in asked
      ]
      assert len(cohort) == min(4, len(waiting))
      asked += cohort
    assert len(set(asked)) == len(asked)
    missed.append(40 - len(asked))
  assert np.mean(missed) < 4


# ---- what is refused ---------------------------------------------------------


@pytest.mark.parametrize(
  ('make', 'expected'),
  [
    (lambda: Latency(speed_spread=-1.0), 'speed_spread=-1.0'),
    (lambda: Latency(round_spread=float('inf')), 'round_spread=inf'),
    (lambda: Latency(round_spread=float('nan')), 'round_spread=nan'),
    (lambda: Availability(1), 'rounds_per_day=1: a day of one round'),
    (lambda: Availability(4, floor=1.5), 'floor=1.5'),
    (lambda: Availability(4, zone_spread=-0.1), 'zone_spread=-0.1'),
    (lambda: Participation(order='rounds'), "order='rounds': choose"),
    (lambda: Participation(extra_clients=-1), 'extra_clients=-1'),
    (lambda: Participation(partial_work=1.5), 'partial_work=1.5'),
    (lambda: Participation(partial_work=float('nan')), 'partial_work=nan'),
    (
      lambda: _sampler(Participation(extra_clients=31)),
      'asks 41 clients .* population has 40',
    ),
    (
      lambda: _sampler(Participation(extra_clients=1), poisson=True),
      'extra_clients=1.* with Poisson sampling',
    ),
    (
      lambda: _sampler(Participation(availability=_DAY), poisson=True),
      'Availability.* with Poisson sampling',
    ),
    (
      lambda: _sampler(Participation(order=sampling.EPOCHS), poisson=True),
      "order='epochs'.* with Poisson sampling",
    ),
  ],
)
def test_impossible_cohorts_are_refused(make, expected):
  with pytest.raises(ProgramError, match=expected):
    make()


def _planned(
  participation: Participation, kind: str = 'poisson', oversample: float = 1.0
) -> sampling.CohortSampler:
  clip: Any = clipping_lib.FixedClip(1.0)
  if kind == 'once_per_tree':
    clip = clipping_lib.TreeNoise(1.0, 4)
  plan = privacy_plans.plan(
    clip,
    noise_multiplier=1.0,
    delta=1e-3,
    population=40,
    clients_per_round=10,
    rounds=4,
    sampling=kind,
  )
  ledger = privacy_plans.PrivacyLedger(plan)
  return sampling.planned(
    _POPULATION, 10, 0, oversample, 0.0, ledger, participation
  )


@pytest.mark.parametrize(
  ('participation', 'options', 'expected'),
  [
    (Participation(extra_clients=1), {}, 'who is joined would depend on'),
    (
      Participation(latency=Latency(1.0)),
      {'kind': 'fixed_size', 'oversample': 1.5},
      'oversample=1.5, .* how fast others are, which epsilon does not count',
    ),
    (Participation(availability=_DAY), {}, 'would follow the time of day'),
    (Participation(order=sampling.EPOCHS), {}, "order='epochs'"),
    (
      Participation(order=sampling.EPOCHS),
      {'kind': 'fixed_size'},
      'would follow from the rounds before',
    ),
  ],
)
def test_a_plan_refuses_what_it_does_not_count(
  participation, options, expected
):
  with pytest.raises(programs.ProgramError, match=expected):
    _planned(participation, **options)


def test_a_plan_of_trees_has_epochs_already():
  sampler = _planned(Participation(order=sampling.EPOCHS), 'once_per_tree')
  plain = _planned(Participation(), 'once_per_tree')
  rounds = range(1, 9)
  drawn = [sampler.cohort(number) for number in rounds]
  assert drawn == [plain.cohort(number) for number in rounds]
  assert sorted(sum(drawn[:4], [])) == sorted(_POPULATION)


def test_partial_work_goes_with_a_plan():
  # Who does how much depends on nobody else.
  sampler = _planned(
    Participation(partial_work=0.5, latency=Latency(round_spread=1.0))
  )
  plain = _planned(Participation())
  assert [sampler.cohort(n) for n in range(9)] == [
    plain.cohort(n) for n in range(9)
  ]


# ---- as options --------------------------------------------------------------

_FLAGS = (
  '--sampling=epochs',
  '--extra_clients=2',
  '--dropout_rate=0.1',
  '--set=speed_spread=0.5',
  '--set=latency_spread=0.5',
  '--set=partial_work=0.5',
  '--set=availability_day=4',
  '--set=availability_floor=0.4',
  '--set=time_zone_spread=0.5',
)


def test_flags_say_what_the_library_does():
  assert Cohorts().participation() == Participation()
  assert parse(_FLAGS).loop.cohorts.participation() == Participation(
    order=sampling.EPOCHS,
    extra_clients=2,
    latency=Latency(0.5, 0.5),
    partial_work=0.5,
    availability=Availability(4, 0.4, 0.5),
  )


@pytest.mark.parametrize(
  ('flags', 'expected'),
  [
    (['--sampling=poisson'], 'sampling'),
    (['--extra_clients=-1'], '--extra_clients=-1: give at least 0'),
    (['--set=partial_work=2'], '--set=partial_work=2.0: give at most 1'),
    (['--set=availability_day=1'], '--set=availability_day=1: give at least 2'),
    (['--set=availability_floor=0.5'], 'Give --set=availability_day'),
    (['--set=time_zone_spread=0'], 'Give --set=availability_day'),
    (['--set=speed_spread=1'], 'Give --extra_clients, --oversample or'),
    (['--set=latency_spread=1'], 'latency_spread=1.0: all clients are waited'),
  ],
)
def test_flags_that_say_nothing_are_refused(flags, expected):
  with pytest.raises(OptionError) as caught:
    parse(flags)
  assert expected in str(caught.value)


_TREE = ('--dp_mechanism=tree', '--clip=1')


@pytest.mark.parametrize(
  ('flags', 'expected'),
  [
    (['--extra_clients=1'], 'who is joined depends on how fast others are'),
    (['--extra_clients=1', *_TREE], '--extra_clients=1'),
    (
      ['--oversample=2', '--set=latency_spread=1', '--dp_sampling=fixed'],
      '--set=latency_spread=1.0: who is joined depends',
    ),
    (['--set=availability_day=24'], '--set=availability_day=24: how likely'),
    (['--set=availability_day=24', *_TREE], '--set=availability_day=24'),
    (['--sampling=epochs'], '--dp_mechanism=tree'),
  ],
)
def test_a_private_run_refuses_what_is_not_covered(flags, expected):
  with pytest.raises(OptionError) as caught:
    parse(['--target_epsilon=8', *flags])
  assert expected in str(caught.value)
  assert 'is not covered by --target_epsilon' in str(caught.value)


# ---- whole runs --------------------------------------------------------------

_RUN: dict[str, Any] = {'clients_per_round': 3, 'dropout_rate': 0.1}


def test_a_run_has_the_cohorts_and_the_work_of_its_sampler(world):
  worked = []

  class Watching(small_runs.Spy):
    """Notes how many examples each client trains with, as a runtime does."""

    def cohort(self, client_ids, seeds):
      found = super().cohort(client_ids, seeds)
      worked.append(found)
      return found

  spy = Watching(world.clients)
  result = world.train(clients=spy, participation=_REAL, seed=3, **_RUN)
  sampler = sampling.CohortSampler(
    world.clients.client_ids, 3, 3, 1.0, 0.1, participation=_REAL
  )
  rounds = range(1, small_runs.ROUNDS + 1)
  assert spy.cohorts == [tuple(sampler.cohort(number)) for number in rounds]
  last = sampler.with_partial_work(worked[-1], small_runs.ROUNDS)
  # The query set is the smaller half, of at least one if there are two.
  assert result.train['num_examples'] == sum(
    int(client['count']) - max(round(int(client['count']) / 2), 1)
    for client in last
  )


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_nothing_had_happened(world, tmp_path):
  options = {'participation': _REAL, **_RUN}
  whole = world.train(output_dir=tmp_path / 'whole', **options)
  for ends_at in (5, 2):
    with pytest.raises(small_runs.Killed):
      world.train(
        output_dir=tmp_path / 'killed',
        clients=small_runs.Spy(world.clients, ends_at),
        **options,
      )
  resumed = world.train(output_dir=tmp_path / 'killed', **options)
  small_runs.assert_same(resumed, whole)
  assert repeatable_rows(tmp_path / 'killed') == repeatable_rows(
    tmp_path / 'whole'
  )
  plain = world.train(clients_per_round=3, dropout_rate=0.1)
  assert small_runs.flat(plain.weights) != small_runs.flat(whole.weights)


def test_a_run_does_not_go_on_with_other_cohorts(world, tmp_path):
  world.train(output_dir=tmp_path, rounds=2, evaluate_every=2)
  with pytest.raises(programs.ProgramError, match='participation was nothing'):
    world.train(
      output_dir=tmp_path,
      rounds=3,
      evaluate_every=2,
      participation=Participation(partial_work=0.5),
    )
  # What changes nothing is no other setting.
  world.train(
    output_dir=tmp_path,
    rounds=3,
    evaluate_every=2,
    participation=Participation(),
  )
