"""What the parts of an algorithm are composed to, and what is refused."""

import collections
import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import planted
from tff_partial import aggregators
from tff_partial import algorithms
from tff_partial import client_state
from tff_partial import client_statistics
from tff_partial import composition
from tff_partial import contexts
from tff_partial import evaluation
from tff_partial import phases
from tff_partial import processes
from tff_partial import random_bits
from tff_partial import tiers
from tff_partial.client import client_work
from tff_partial.client import local_training
from tff_partial.composition import Aggregation
from tff_partial.data import packing
from tff_partial.data import splits
from tff_partial.data.examples import ClientDataError
from tff_partial.dp import clipping as clipping_lib
from tff_partial.dp import local_noise
from tff_partial.dp import privacy
from tff_partial.exchange import messages
from tff_partial.model import keras_models
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.training import sampling

layers = tf.keras.layers
_BOTH = (tiers.GLOBAL, tiers.LOCAL)
_BY_EXAMPLES = messages.ClientWeighting.NUM_EXAMPLES
_LOCAL_NOISE = local_noise.LocalNoise(1.0, 1.0)
_MEDIAN = aggregators.coordinate_median(clients_per_round=2)
_PRIVATE = privacy.private_mean(
  clipping_lib.FixedClip(1.0), noise_multiplier=1.0, clients_per_round=2
)
_SCALED = (client_statistics.SCALED_BY_SHARE,)


def _compose(
  model: models.PartialModel, **options: Any
) -> processes.PartialProcess:
  """Clients keep their local weights, and train all together."""
  return composition.compose(
    **{
      'model': model,
      'work': [Phase(_BOTH, on=splits.by_time().query, measured=True)],
      'client_state': client_state.persist_local,
      'aggregation': Aggregation(
        aggregator=tff.aggregators.MeanFactory(no_nan_division=True)
      ),
      'server_optimizer': phases.sgd(1.0),
      **options,
    }
  )


def _build() -> tf.keras.Model:
  """A frozen layer, shared ones, and one of the client's own."""
  eyes = layers.Dense(3, trainable=False, name='eyes')
  rest = layers.Dense(3, name='body'), layers.Dense(1, name='user')
  return tf.keras.Sequential([tf.keras.Input([2]), eyes, *rest])


pytestmark = pytest.mark.usefixtures('in_native')


@pytest.fixture(scope='module', name='process')
def fixture_process() -> processes.PartialProcess:
  return _compose(planted.factorization(_build, seed=3))


def _clients() -> dict[str, dict[str, np.ndarray]]:
  clients = planted.drawn({'ann': 4, 'bob': 7, 'cid': 1}, seed=0)
  for fields in clients.values():
    fields['time'] = np.arange(len(fields['y']))
  return clients


# ---- types -------------------------------------------------------------------


@pytest.mark.slow
def test_the_type_of_a_process(process):
  state = process.initialize.type_signature.result.member
  kept = tff.to_type(
    collections.OrderedDict(
      [
        ('user/kernel', tff.TensorType(np.float32, [3, 1])),
        ('user/bias', tff.TensorType(np.float32, [1])),
      ]
    )
  )
  data = tff.to_type(
    collections.OrderedDict(
      examples=collections.OrderedDict(
        x=tff.TensorType(np.float32, [None, 2]),
        y=tff.TensorType(np.float32, [None, 1]),
        weight=tff.TensorType(np.float32, [None]),
        time=tff.TensorType(np.int64, [None]),
      ),
      count=np.int32,
      seed=tff.TensorType(np.int32, [2]),
    )
  )
  taken = process.next.type_signature.parameter
  assert taken[0] == tff.FederatedType(state, tff.SERVER)
  assert taken[1].member.is_equivalent_to(kept)
  assert taken[1].placement is taken[2].placement is tff.CLIENTS
  assert taken[2].member.is_equivalent_to(data)
  result = process.next.type_signature.result
  names = [name for name, _ in tff.structure.iter_elements(result)]
  assert names == ['state', 'client_states', 'metrics']
  assert result.state == taken[0]
  assert result.client_states == taken[1]
  assert result.metrics.placement is tff.SERVER
  seed = tff.TensorType(np.int32, [2])
  assert process.initialize_client.type_signature.parameter == seed
  assert not process.is_stateless
  assert isinstance(process, tff.templates.IterativeProcess)


@pytest.mark.slow
def test_weights_at_the_server_are_in_the_container_of_tff(process):
  state = process.initialize()
  weights = process.get_model_weights(state)
  assert isinstance(weights, tff.learning.models.ModelWeights)
  assert list(weights.trainable) == [tiers.GLOBAL]
  assert list(weights.trainable[tiers.GLOBAL]) == ['body/kernel', 'body/bias']
  assert list(weights.non_trainable) == ['eyes/kernel', 'eyes/bias']
  doubled = tff.learning.models.ModelWeights(
    tf.nest.map_structure(lambda t: t * 2 + 1, weights.trainable),
    weights.non_trainable,
  )
  changed = process.set_model_weights(state, doubled)
  found = process.get_model_weights(changed)
  planted.assert_same(found.trainable, doubled.trainable)
  planted.assert_same(found.non_trainable, weights.non_trainable)
  assert changed.client_work == state.client_work


def test_first_weights_follow_from_the_models_seed(process):
  weights = planted.global_weights(process, process.initialize())
  planted.assert_same(
    weights, planted.global_weights(process, process.initialize())
  )
  expected = process.model.initial_weights(
    tiers.GLOBAL, random_bits.derive(3, 'server')
  )
  planted.assert_same(weights, dict(expected))


# ---- a round -----------------------------------------------------------------


def _knowing(model, before, remembered, value) -> contexts.ClientContext:
  """What a client knows as it begins."""
  weights = tf.nest.map_structure(
    tf.constant,
    tiers.join(
      {tiers.GLOBAL: collections.OrderedDict(before)}, {tiers.LOCAL: remembered}
    ),
  )
  return contexts.ClientContext(
    model,
    weights,
    weights,
    model.frozen_weights(),
    tf.nest.map_structure(tf.constant, value['examples']),
    tf.constant(value['count']),
    tf.constant(value['seed']),
    remembered,
  )


def _done_by(
  process, before, cohort, kept
) -> list[local_training.ClientResult]:
  """What each client's work comes to, outside of any runtime."""
  return [
    local_training.run(
      [Phase(_BOTH, on=splits.by_time().query, measured=True)],
      _knowing(process.model, before, remembered, value),
    )
    for value, remembered in zip(cohort, kept, strict=True)
  ]


def _round(process, some=slice(None)) -> tuple[Any, Any, Any, Any]:
  """Some clients, the state before, what they had, and what comes out."""
  cohort = planted.cohort_of(process, _clients(), 'seed')[some]
  state = process.initialize()
  kept = planted.first_states(process, cohort)
  return cohort, state, kept, planted.run(process, cohort, state, kept)


def test_a_round_is_what_its_clients_do(process):
  cohort, state, kept, output = _round(process)
  before = planted.global_weights(process, state)
  done = _done_by(process, before, cohort, kept)
  for worked, new in zip(done, output.client_states, strict=True):
    planted.assert_close(dict(new), dict(worked.weights[tiers.LOCAL]))
  # By time, halves: the later 2 of 4, 3 of 7 and none of 1.
  assert [int(worked.num_examples) for worked in done] == [2, 3, 0]
  updates = [tiers.delta(before, w.weights[tiers.GLOBAL]) for w in done]
  after = planted.global_weights(process, output.state)
  for name, tensor in before.items():
    mean = (2 * updates[0][name] + 3 * updates[1][name]) / 5
    planted.assert_close(after[name], tensor - mean.numpy())
  frozen, later = (
    process.get_model_weights(s).non_trainable for s in (state, output.state)
  )
  assert frozen['eyes/kernel'].any()
  planted.assert_same(dict(later), dict(frozen))
  assert output.state.client_work['round'] == 1
  found = planted.train_metrics(output)
  assert found['num_examples'] == 5
  assert found['num_clients'] == 2
  assert found['num_not_finite'] == 0


@pytest.mark.slow
def test_a_client_may_weigh_what_a_function_says(process):
  # 2, 3 and no examples; who has none would weigh less than nothing.
  weigh = _compose(
    process.model,
    aggregation=Aggregation(
      client_weighting=lambda worked: 3 * worked.num_examples - 5
    ),
  )
  cohort, state, kept, output = _round(weigh)
  before = planted.global_weights(weigh, state)
  one, other, _ = (
    tiers.delta(before, worked.weights[tiers.GLOBAL])
    for worked in _done_by(weigh, before, cohort, kept)
  )
  for name, after in planted.global_weights(weigh, output.state).items():
    mean = (1 * one[name] + 4 * other[name]) / 5
    planted.assert_close(after, before[name] - mean.numpy())
  found = planted.train_metrics(output)
  assert (found['num_clients'], found['num_not_finite']) == (2, 1)


def test_a_client_without_examples_sends_nothing(process):
  clients = _clients()
  nobody = {name: values[:0] for name, values in clients['ann'].items()}
  some = packing.pack(clients, process.example_spec)
  with pytest.raises(ClientDataError, match='with 0 all are kept'):
    packing.pack({**clients, 'dot': nobody}, process.example_spec)
  more = packing.pack(
    {'dot': nobody, **clients}, process.example_spec, min_examples=0
  )
  assert len(more) == 4
  outputs = []
  for population in (some, more):
    ids = population.client_ids
    cohort = population.cohort(ids, sampling.client_seeds(ids, 'seed'))
    kept = planted.first_states(process, cohort)
    outputs.append((kept, planted.run(process, cohort, None, kept)))
  (_, without), (kept, output) = outputs
  planted.assert_same_weights(process, output.state, without.state)
  assert planted.train_metrics(output) == planted.train_metrics(without)
  planted.assert_same(dict(output.client_states[0]), dict(kept[0]))


@pytest.mark.slow
@pytest.mark.parametrize('shuffle', [False, True])
def test_epochs_may_follow_the_rounds(process, shuffle):
  def composed(epochs: Any) -> processes.PartialProcess:
    phase = Phase(
      _BOTH, batch_size=2, epochs=epochs, shuffle=shuffle, measured=True
    )
    return _compose(process.model, work=[phase])

  growing = composed(lambda done: 1 + 2 * done)
  cohort = planted.cohort_of(growing, _clients(), 'seed')
  kept = planted.first_states(growing, cohort)
  state = growing.initialize()
  for epochs in (1, 3):
    expected = planted.run(composed(epochs), cohort, state, kept)
    output = planted.run(growing, cohort, state, kept)
    planted.assert_same_weights(growing, output.state, expected.state)
    state = output.state
  with pytest.raises(client_work.CompositionError, match='is in no round'):
    evaluation.build_evaluation(
      process.model,
      work=[Phase(epochs=lambda done: done, measured=True)],
      client_state=client_state.persist_local,
    )


@pytest.mark.slow
def test_local_noise_hides_whether_a_client_had_anything_to_do(process):
  # One without examples is alone in the cohort: what it sends still counts.
  class Noise(local_noise.LocalNoise):
    def __call__(self, update: Any, seed: tf.Tensor) -> Any:
      return tf.nest.map_structure(tf.ones_like, update)

  noised = _compose(
    process.model,
    aggregation=Aggregation(
      client_weighting=messages.ClientWeighting.UNIFORM,
      postprocess_update=Noise(1.0, 1.0),
    ),
  )
  assert noised.mechanism == local_noise.LocalNoise(1.0, 1.0).mechanism
  _, state, _, output = _round(noised, slice(2, None))
  before, after = (
    planted.global_weights(noised, s) for s in (state, output.state)
  )
  for name, tensor in before.items():
    planted.assert_close(after[name], tensor - 1.0)


@pytest.mark.parametrize('of_body', ['.*', 'kernel'])
def test_noise_on_what_no_phase_trains_is_warned_of(process, of_body, caplog):
  names = f'body/{of_body}|user/.*'
  training = Phase(_BOTH, variable_filter=names, measured=True)
  _compose(process.model, work=[training], aggregation=Aggregation(_PRIVATE))
  assert ("trains ['body/bias'], but" in caplog.text) == (of_body == 'kernel')


@pytest.mark.slow
def test_where_nothing_at_the_server_is_trained_nothing_is_sent(process):
  alone = _compose(process.model, work=[Phase((tiers.LOCAL,), measured=True)])
  assert process.sent == (tiers.GLOBAL,)
  assert not alone.sent
  _, state, kept, output = _round(alone)
  assert not len(state.aggregator)
  assert not len(state.finalizer)
  weights, after = map(alone.get_model_weights, (state, output.state))
  planted.assert_same(dict(weights.trainable), dict(after.trainable))
  assert list(output.metrics) == ['client_work']
  assert planted.train_metrics(output)['num_clients'] == 3
  for old, new in zip(kept, output.client_states, strict=True):
    assert (old['user/kernel'] != new['user/kernel']).any()


# ---- what clients remember ---------------------------------------------------


def _weights_of(model: models.PartialModel, seed: int) -> tiers.Weights:
  seed_words = random_bits.derive(seed)
  return collections.OrderedDict(
    [(tiers.GLOBAL, model.initial_weights(tiers.GLOBAL, seed_words))]
  )


def _holding(weights: tiers.Weights) -> contexts.ClientContext:
  parts = dict.fromkeys(contexts.ClientContext._fields)
  return contexts.ClientContext(**{**parts, 'weights': weights})


def test_clients_that_begin_alike_hold_the_same_in_every_round(process):
  recall = functools.partial(client_state.frozen_init.recall, process.model)
  one, other = (
    recall(collections.OrderedDict(), {}, tf.constant([seed, 0]))
    for seed in (1, 2)
  )
  planted.assert_same(one, other)
  assert list(one) == [tiers.LOCAL]
  drawn = client_state.stateless.recall(
    process.model, collections.OrderedDict(), {}, tf.constant([1, 0])
  )
  name = 'user/kernel'
  assert (one[tiers.LOCAL][name] != drawn[tiers.LOCAL][name]).numpy().any()


def test_a_personal_copy_begins_as_what_is_received_first(process):
  memory, model = client_state.persist_personal, process.model
  seed = tf.constant([3, 4])
  kept = memory.first(model, seed)
  received = [_weights_of(model, number) for number in range(2)]
  held = memory.recall(model, kept, received[0], seed)
  assert list(held) == [tiers.LOCAL, tiers.PERSONAL]
  planted.assert_same(held[tiers.PERSONAL], received[0][tiers.GLOBAL])
  planted.assert_same(
    held[tiers.LOCAL], model.initial_weights(tiers.LOCAL, seed)
  )
  # What a client has after its phases is what it holds in its next round,
  # whatever it receives then.
  trained = tf.nest.map_structure(lambda t: t + 1.0, held)
  kept = memory.keep(_holding(tiers.join(received[0], trained)))
  planted.assert_same(
    memory.recall(model, kept, received[1], seed + 1), trained
  )


# ---- refusals ----------------------------------------------------------------


@pytest.mark.slow
def test_models_without_weights_for_the_server_are_refused():
  model = planted.factorization(_build)
  model.tier_of.update({'body/kernel': 'local', 'body/bias': 'local'})
  with pytest.raises(
    client_work.CompositionError, match='no variable at the server to train'
  ):
    _compose(model)  # Its only other variables are frozen.


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (
      {'aggregation': Aggregation(aggregator=tff.aggregators.MeanFactory)},
      r'expected a factory such as `tff.aggregators.MeanFactory\(\)`, found',
    ),
    (
      {'server_optimizer': tf.keras.optimizers.SGD()},
      r'server optimizer must be one of `tff.learning.optimizers`, for example '
      r'`tff.learning.optimizers.build_sgdm\(0.01\)`; found SGD',
    ),
    (
      {'work': [Phase(), Phase((tiers.LOCAL,))]},
      'No phase of the round is measured, so that no client would have',
    ),
    (
      {'work': [Phase(on=splits.by_mark('is query').query, measured=True)]},
      "The field of examples 'is query': TFF reads names of English letters",
    ),
    (
      {'aggregation': Aggregation(aggregator=_PRIVATE), 'statistics': _SCALED},
      "The statistic 'weight': clients would send it exactly, .* Leave it out, "
      'join it WITH_UPDATE',
    ),
    (
      {'aggregation': Aggregation(postprocess_update=_LOCAL_NOISE)},
      'client_weighting: clients would send how much they weigh, exactly, .*'
      'Pass ClientWeighting.UNIFORM',
    ),
    (
      {'aggregation': Aggregation(_PRIVATE, _BY_EXAMPLES)},
      'client_weighting: .* takes no weights of clients. Leave it out',
    ),
    (
      {'aggregation': Aggregation(_MEDIAN, _BY_EXAMPLES)},
      'client_weighting: RobustFactory takes no weights of clients',
    ),
    (
      {'aggregation': Aggregation(_MEDIAN), 'statistics': _SCALED},
      'SCALED_BY_SHARE: .* RobustFactory takes no weights of clients',
    ),
    (
      {'aggregation': Aggregation(client_weighting='uniform')},
      "client_weighting='uniform': give a `ClientWeighting`, or a function",
    ),
    (
      {'aggregation': Aggregation(client_weighting=lambda _: tf.ones([2]))},
      r'client_weighting: a client has one number .* found float32\(2,\)',
    ),
  ],
)
def test_parts_that_do_not_fit_are_refused(process, options, message):
  with pytest.raises(client_work.CompositionError, match=message):
    _compose(process.model, **options)


def test_an_algorithm_for_local_variables_warns_if_there_are_none(caplog):
  model = keras_models.from_keras(planted.build_slope, loss='mse')
  algorithms.build_fed_avg(model)
  assert not caplog.records
  algorithms.build_fed_recon(model)
  assert 'No variable of the model is local' in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
  'keep',
  [
    lambda client: collections.OrderedDict(count=client.count),
    lambda client: collections.OrderedDict(
      (name, tf.cast(tensor, tf.float64))
      for name, tensor in client.weights[tiers.LOCAL].items()
    ),
  ],
  ids=['structure', 'type'],
)
def test_a_client_state_that_changes_its_type_is_refused(process, keep):
  memory = client_state.persist_local._replace(keep=keep)
  with pytest.raises(
    client_work.CompositionError,
    match='A round takes client states .*and returns .* What a client '
    'state keeps must look like what it makes first',
  ):
    _compose(process.model, client_state=memory)


def _process_of(process: processes.PartialProcess, **parts: Any) -> Any:
  names = 'initialize_client get_model_weights set_model_weights'.split()
  names += ['model', 'example_spec', 'sent']
  arguments = {name: getattr(process, name) for name in names}
  next_fn = parts.pop('next', process.next)
  return processes.PartialProcess(
    process.initialize, next_fn, **{**arguments, **parts}
  )


def _next_with(process: processes.PartialProcess, change) -> tff.Computation:
  """The round of a process, with other client states at its end."""

  @tff.federated_computation(*process.next.type_signature.parameter)
  def next_fn(state, client_states, clients):
    output = process.next(state, client_states, clients)
    return processes.PartialProcessOutput(
      output.state, change(output.client_states), output.metrics
    )

  return next_fn


def test_client_states_that_go_to_the_server_are_refused(process):
  with pytest.raises(
    client_work.CompositionError, match='must stay at clients, found .*SERVER'
  ):
    _process_of(process, next=_next_with(process, tff.federated_sum))


def test_client_states_of_another_type_are_refused(process):
  kept = process.initialize_client.type_signature.result

  @tff.tensorflow.computation(kept)
  def forget_bias(state):
    return state['user/kernel']

  with pytest.raises(
    client_work.CompositionError,
    match='A round takes client states of type .*user/bias.* and returns',
  ):
    _process_of(
      process,
      next=_next_with(
        process, functools.partial(tff.federated_map, forget_bias)
      ),
    )

  @tff.tensorflow.computation(tff.TensorType(np.int32, [2]))
  def draw(seed):
    return seed

  with pytest.raises(
    client_work.CompositionError,
    match=r'`initialize_client` makes int32\[2\], a round takes .*user/bias',
  ):
    _process_of(process, initialize_client=draw)


def test_a_field_that_two_phases_read_in_two_ways_is_refused(process):
  with pytest.raises(ValueError, match="Two parts read the field 'time'"):
    _compose(
      process.model,
      work=[
        Phase(on=splits.by_time().support),
        Phase(on=splits.by_mark('time').query, measured=True),
      ],
    )
