"""Private aggregations as clients and servers see them, in TFF's processes."""

import collections
import functools

import numpy as np
import pytest
from scipy import stats
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import planted
from tff_partial import errors
from tff_partial import runtimes
from tff_partial import tiers
from tff_partial.algorithms import fed_recon
from tff_partial.composition import Aggregation
from tff_partial.dp import clipping as clipping_lib
from tff_partial.dp import local_noise
from tff_partial.dp import mechanisms
from tff_partial.dp import privacy
from tff_partial.dp import privacy_plans
from tff_partial.errors import PrivacyError

pytestmark = [
  pytest.mark.filterwarnings('ignore:np.find_common_type'),
  pytest.mark.usefixtures('in_cohorts'),
]

_CHANCE = 1e-9
_SIZE = 5000
_VECTOR = tff.TensorType(np.float32, [_SIZE])
_TIERS = tff.to_type(
  collections.OrderedDict(
    # Not in the order of the alphabet.
    shared=collections.OrderedDict(
      [('layer/kernel', tff.TensorType(np.float32, [20, 50]))]
    ),
    group=collections.OrderedDict(
      heads=tff.TensorType(np.float32, [3, 400]),
      bias=tff.TensorType(np.float64),
    ),
  )
)
_CLIPPINGS = {
  'fixed': clipping_lib.FixedClip(2.0),
  # Of which the count costs nearly nothing.
  'adaptive': clipping_lib.AdaptiveClip(2.0, count_stddev=1e6),
  'tree': clipping_lib.TreeNoise(2.0, 3),
}


def _mean(clipping='fixed', **changed):
  if isinstance(clipping, str):
    clipping = _CLIPPINGS[clipping]
  arguments = {'noise_multiplier': 1.0, 'clients_per_round': 10, **changed}
  return privacy.private_mean(clipping, **arguments)


@functools.cache
def _process(clipping='fixed', type_spec=_VECTOR, **changed):
  return _mean(clipping, **changed).create(type_spec)


def _zeros(clients=10):
  return [np.zeros(_SIZE, np.float32)] * clients


def _one_hot(element, size):
  vector = np.zeros(_SIZE, np.float32)
  vector[element] = size
  return vector


def _tiers(random):
  return tf.nest.map_structure(
    lambda spec: random.normal(size=spec.shape).astype(
      spec.dtype.as_numpy_dtype
    )[()],
    tff.types.type_to_tf_tensor_specs(_TIERS),
  )


def _run(process, rounds):
  """What is released in each round, given what clients send, and the state."""
  state, released = process.initialize(), []
  for values in rounds:
    output = process.next(state, values)
    state = output.state
    released.append((output.result, output.measurements))
  return released, state


# ---- noise -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize('clipping', _CLIPPINGS)
def test_the_noise_that_reaches_the_mean_is_what_is_said(clipping):
  released, _ = _run(_process(clipping), [_zeros()] * 2)
  for result, measured in released:
    looks = stats.kstest(result / measured['noise_stddev'], 'norm')
    assert looks.pvalue > _CHANCE
  first = released[0][1]['noise_stddev']
  # The clip is 2, and there are ten clients.
  np.testing.assert_allclose(first, 0.2, rtol=1e-6)
  assert released[0][1]['clip'] == 2.0


# ---- sensitivity -------------------------------------------------------------


@pytest.mark.slow
def test_the_mean_is_divided_by_what_is_expected():
  # Whoever comes: dividing by the actual number would say who did not.
  process = _process(noise_multiplier=0.0)
  for clients in (0, 5, 20):
    ((mean, _),), _ = _run(process, [[_one_hot(0, 1.0)] * clients])
    np.testing.assert_allclose(mean[0], clients / 10.0, rtol=2e-6)


@pytest.mark.slow
def test_weights_of_examples_count_for_nothing():
  weighted = tff.aggregators.as_weighted_aggregator(
    _mean(noise_multiplier=0.0)
  ).create(_VECTOR, tff.TensorType(np.float32))
  values = [_one_hot(0, 1.0), _one_hot(1, 1.0)]
  mean = weighted.next(
    weighted.initialize(), values, [np.float32(1e6), np.float32(0.0)]
  ).result
  np.testing.assert_allclose(mean[:2], [0.1, 0.1], rtol=2e-6)


@pytest.mark.slow
def test_nobody_in_a_round_is_noise_and_no_mistake():
  ((result, measured),), _ = _run(_process(diagnostics=True), [[]])
  assert np.all(np.isfinite(result)) and np.std(result) > 0.15
  assert measured['share_clipped_not_private'] == 0.0


# ---- parts -------------------------------------------------------------------


@pytest.mark.slow
def test_parts_are_clipped_for_themselves():
  random = np.random.default_rng(0)
  values = [_tiers(random) for _ in range(3)]
  by_part = _process_of_parts(noise_multiplier=0.0, diagnostics=True)
  ((mean, measured),), _ = _run(by_part, [values])
  assert list(mean) == ['shared', 'group']
  assert mean['group']['bias'].dtype == np.float64

  def norm(part):
    leaves = tf.nest.flatten(part)
    return np.sqrt(sum(np.sum(np.square(leaf, dtype=float)) for leaf in leaves))

  for part, clip in (('shared', 1.0), ('group', 3.0)):
    expected = tf.nest.map_structure(
      lambda *leaves, part=part, clip=clip: (
        sum(
          leaf * clip / norm(value[part])
          for leaf, value in zip(leaves, values, strict=True)
        )
        / 10.0
      ),
      *(value[part] for value in values),
    )
    planted.assert_close(mean[part], expected, relative=1e-7)
    assert measured[part]['clip'] == clip
    assert measured[part]['share_clipped_not_private'] == 1.0


def _process_of_parts(group=None, **changed):
  group = group or clipping_lib.FixedClip(3.0)
  return _mean(
    {'group': group, 'shared': clipping_lib.FixedClip(1.0)}, **changed
  ).create(_TIERS)


def test_parts_bound_the_noise_together():
  parts = {
    'a': clipping_lib.AdaptiveClip(count_stddev=1.0),
    'b': clipping_lib.FixedClip(1.0),
  }
  # The count of `a` costs 2, and has half of what is spent.
  largest = clipping_lib.largest_noise_multiplier(parts, 10)
  np.testing.assert_allclose(largest, 2.0 * np.sqrt(0.5))
  _mean(parts, noise_multiplier=1.41)
  with pytest.raises(PrivacyError, match='less than 1.41'):
    _mean(parts, noise_multiplier=1.42)


# ---- measurements ------------------------------------------------------------


@pytest.mark.slow
def test_what_is_measured_and_what_is_not_private():
  values = [_one_hot(0, 1.0)] * 3 + [_one_hot(0, 5.0)] * 7
  ((_, fixed),), _ = _run(_process(), [values])
  assert list(fixed) == ['clip', 'noise_stddev', 'signal_to_noise']
  ((_, measured),), _ = _run(_process('adaptive'), [values])
  assert {*measured} == {*fixed, 'share_clipped'}
  # What is exact is measured on request alone, and named for what it is.
  frank = _mean(diagnostics=True).create(_VECTOR)
  ((_, measured),), _ = _run(frank, [values])
  assert list(measured) == [*fixed, 'share_clipped_not_private']
  np.testing.assert_allclose(measured['share_clipped_not_private'], 0.7)


# ---- seeds, states and runtimes ----------------------------------------------


@pytest.mark.slow
def test_a_given_seed_makes_a_simulation():
  factory = _mean(noise_seed=5)
  assert factory.mechanism.is_simulation
  assert not _mean().mechanism.is_simulation
  results = [
    _run(_mean(noise_seed=seed).create(_VECTOR), [_zeros()])[0][0][0]
    for seed in (5, 5, 6)
  ]
  np.testing.assert_array_equal(results[0], results[1])
  assert not np.any(results[0] == results[2])


def test_a_secret_seed_never_comes_back():
  process = _process()
  seeds = {
    tuple(process.initialize().query_state.seed.tolist()) for _ in range(4)
  }
  other = _mean().create(_VECTOR)
  seeds.add(tuple(other.initialize().query_state.seed.tolist()))
  assert len(seeds) == 5


@pytest.mark.slow
@pytest.mark.parametrize('clipping', ['tree', 'fixed and adaptive'])
def test_runtimes_agree_to_the_last_bit(clipping):
  random = np.random.default_rng(1)
  changed = {'noise_seed': 5, 'noise_multiplier': 0.5}
  if clipping == 'fixed and adaptive':
    process = _process_of_parts(_CLIPPINGS['adaptive'], **changed)
    rounds = [[_tiers(random) for _ in range(70)] for _ in range(2)]
  else:
    process = _mean(clipping, **changed).create(_VECTOR)
    values = random.normal(size=[2, 70, _SIZE]).astype(np.float32)
    rounds = [list(values[0]), list(values[1])]
  expected, _ = _run(process, rounds)
  for runtime in (runtimes.cohort(jit=True, threads=2), runtimes.native()):
    with runtime:
      planted.assert_same(_run(process, rounds)[0], expected)


# ---- local noise -------------------------------------------------------------


@pytest.mark.slow
def test_local_noise_is_of_each_client():
  update = collections.OrderedDict(
    a=tf.zeros([_SIZE]), b=tf.constant([3e38], tf.float32)
  )
  noise = tf.function(local_noise.LocalNoise(2.0, 1.5))
  one = noise(update, tf.constant([1, 2]))
  again = noise(update, tf.constant([1, 2]))
  other = noise(update, tf.constant([1, 3]))
  planted.assert_same(one, again)
  looks = stats.kstest(one['a'] / 3.0, 'norm')
  assert looks.pvalue > _CHANCE
  assert abs(np.corrcoef(one['a'], other['a'])[0, 1]) < 7.0 / np.sqrt(_SIZE)
  # The huge number was clipped to 2 before.
  assert abs(one['b'] - 2.0) < 7.0 * 3.0
  clipped = local_noise.LocalNoise(2.0, 0.0)(update, tf.constant([1, 2]))
  np.testing.assert_allclose(clipped['b'], [2.0], rtol=2e-6)


def test_local_noise_hides_what_is_not_finite():
  update = {'a': tf.constant([np.nan, 1.0], tf.float64)}
  sent = local_noise.LocalNoise(2.0, 1.0)(update, tf.constant([1, 2]))
  assert sent['a'].dtype == tf.float64 and np.all(np.isfinite(sent['a']))


# ---- in an algorithm ---------------------------------------------------------


@pytest.mark.slow
def test_an_algorithm_is_private_by_its_aggregator():
  plan = privacy_plans.plan(
    {tiers.GLOBAL: clipping_lib.FixedClip(0.1)},
    noise_multiplier=2.0,
    delta=1e-5,
    population=100,
    clients_per_round=4,
    rounds=10,
  )
  process = fed_recon.build_fed_recon(
    planted.factorization(),
    aggregation=Aggregation(aggregator=plan.mean(diagnostics=True)),
  )
  assert process.mechanism == plan.mechanism
  clients = planted.rate({f'client {number}': 9 for number in range(4)})
  # One comes to what is not finite, another one to what is huge.
  clients['client 1']['y'][:] = 1e30
  clients['client 2']['y'][:] = 1e15
  state = process.initialize()
  before = planted.global_weights(process, state)
  output = planted.run(process, planted.cohort_of(process, clients), state)
  after = planted.global_weights(process, output.state)
  measured = output.metrics['aggregator'][tiers.GLOBAL]
  np.testing.assert_allclose(measured['noise_stddev'], 0.05)
  np.testing.assert_allclose(measured['share_clipped_not_private'], 0.25)
  # Every row of the table moved by noise, also those that nobody rated: by
  # little more than the noise, as the clips are small.
  (moved,) = [after[name] - before[name] for name in before]
  assert np.all(moved != 0.0)
  assert np.linalg.norm(moved) < 3 * 0.1 / 4 + 2.0 * 0.05 * moved.size**0.5


# ---- what is refused ---------------------------------------------------------


@pytest.mark.parametrize(
  ('call', 'match'),
  [
    (lambda: clipping_lib.FixedClip(0.0), '`clip`.*found 0.0'),
    (lambda: clipping_lib.AdaptiveClip(quantile=1.5), '`quantile`'),
    (lambda: _mean(noise_multiplier=-1.0), '`noise_multiplier`'),
    (lambda: clipping_lib.TreeNoise(1.0, 2.5), '`rounds_per_tree`.*found 2.5'),
    (lambda: _mean(clipping=1.0), 'found 1.0'),
    (lambda: _mean(clipping={}), 'found {}'),
    (lambda: _mean(clipping={'shared': 1.0}), "found {'shared': 1.0}"),
    (
      lambda: local_noise.LaplaceNoise(1.0, 1.0).epsilon(-1),
      '`participations`.*found -1',
    ),
    (
      lambda: _mean(
        {'a': clipping_lib.FixedClip(1.0), 'b': clipping_lib.TreeNoise(1.0, 3)}
      ),
      'none has',
    ),
    (
      lambda: _mean(clipping_lib.AdaptiveClip(count_stddev=0.5)),
      'out of reach.*less than 1',
    ),
  ],
)
def test_impossible_arguments_are_named(call, match):
  with pytest.raises(PrivacyError, match=match) as caught:
    call()
  assert isinstance(caught.value, errors.UserError)


@pytest.mark.parametrize(
  ('clipping', 'type_spec', 'match'),
  [
    ('fixed', tff.TensorType(np.int32, [3]), 'int32'),
    ('fixed', tff.TensorType(np.float32, [None]), 'known shape'),
    ('fixed', tff.SequenceType(np.float32), 'Only tensors'),
    ({'shared': clipping_lib.FixedClip(1.0)}, _TIERS, r"\['group', 'shared'\]"),
  ],
)
def test_what_cannot_be_clipped_is_refused(clipping, type_spec, match):
  with pytest.raises(mechanisms.PrivateTypeError, match=match):
    _mean(clipping).create(type_spec)


# ---- rows of tables ----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
  'clipping',
  [
    clipping_lib.TreeNoise(2.0, 3),
    {
      'shared': clipping_lib.AdaptiveClip(2.0, count_stddev=1.0),
      'group': clipping_lib.FixedClip(1.0),
    },
  ],
)
def test_rows_come_to_the_same_as_whole_tables(clipping):
  factory = _mean(
    clipping, noise_multiplier=0.5, noise_seed=3, diagnostics=True
  )
  table, vector = (tff.TensorType(np.float32, shape) for shape in ([9, 2], [3]))

  def types(of_table):
    return tff.to_type(
      collections.OrderedDict(
        shared=collections.OrderedDict(
          [('a/scale', vector), ('items', of_table), ('other', vector)]
        ),
        group=collections.OrderedDict(heads=vector),
      )
    )

  ids_type = tff.to_type(
    collections.OrderedDict(
      shared=collections.OrderedDict(items=tff.TensorType(np.int32, [None]))
    )
  )
  whole = factory.create(types(table))
  by_rows = factory.create_by_rows(
    types(tff.TensorType(np.float32, [None, 2])),
    tff.TensorType(np.float32),
    ids_type,
    types(table),
  )
  random = np.random.default_rng(0)
  tables, sent, weights = [], [], []
  for number in range(4):
    # The same row twice, which some clients send as zeros the second time.
    ids = np.array([number, 8, number], np.int32)
    values = random.normal(size=[3, 2]).astype(np.float32)
    values[2] *= number % 2
    full = np.zeros([9, 2], np.float32)
    np.add.at(full, ids, values)
    rest = random.normal(size=[3, 3]).astype(np.float32)

    def named(items, rest=rest):
      shared = [('a/scale', rest[0]), ('items', items), ('other', rest[1])]
      return collections.OrderedDict(
        shared=collections.OrderedDict(shared),
        group=collections.OrderedDict(heads=rest[2]),
      )

    tables.append(named(full))
    sent.append(named(values))
    # What a client would weigh does not count.
    weights.append(
      {'weight': np.float32(number), 'ids': {'shared': {'items': ids}}}
    )
  one, other = whole.initialize(), by_rows.initialize()
  for _ in range(3):
    expected, found = (
      whole.next(one, tables),
      by_rows.next(other, sent, weights),
    )
    one, other = expected.state, found.state
    # Norms are added up in another order; a unit is 2**-30 of a clip.
    planted.assert_close(
      (expected.result, expected.measurements),
      (found.result, found.measurements),
      relative=1e-6,
    )
    # Also the rows that nobody sent have noise.
    assert np.all(found.result['shared']['items'] != 0.0)


@pytest.mark.slow
def test_one_clip_is_one_clip_whatever_ids_a_client_sends():
  # Four rows of norm one half are one record of norm 1. If all four are the
  # same row, they add up to a norm of 2.
  clip = 1.0
  factory = _mean(
    clipping_lib.FixedClip(clip), noise_multiplier=0.0, clients_per_round=1
  )
  table = tff.to_type({'t': {'items': tff.TensorType(np.float32, [9, 2])}})
  ids_type = tff.to_type({'t': {'items': tff.TensorType(np.int32, [None])}})
  process = factory.create_by_rows(
    tff.to_type({'t': {'items': tff.TensorType(np.float32, [None, 2])}}),
    tff.TensorType(np.float32),
    ids_type,
    table,
  )
  state = process.initialize()
  halves = np.tile(np.float32([[0.5, 0.0]]), [4, 1])
  # Equal ones last, first, in pairs, and outside of the table's few slots.
  for ids in ([3] * 4, [0, 8, 8, 8], [7, 1, 7, 1], [8, 0, 8, 0], [1, 2, 3, 4]):
    sent = {'t': {'items': halves}}
    weight = {'weight': np.float32(1.0), 'ids': {'t': {'items': np.int32(ids)}}}
    result = process.next(state, [sent], [weight]).result['t']['items']
    expected = np.zeros([9, 2])
    np.add.at(expected, ids, halves)
    expected *= min(clip / np.linalg.norm(expected), 1.0)
    np.testing.assert_allclose(result, expected, rtol=1e-5)
    assert np.linalg.norm(result) <= clip
