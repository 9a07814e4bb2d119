"""FedEmbed, on a model so small that each number can be redone by hand.

An example is a number x, the personal embedding a number e. The encoder makes
`f = w x + v e`; the heads are numbers that multiply f, and the loss of each is
half a squared error. Embeddings are `[1]`, prototypes `[3, 1]`.
"""

import collections
import dataclasses
import functools
import types
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import baselines
from baselines import p_fed_km
from tests.support import planted
from tests.support.stacks import linear
from tff_partial import algorithms
from tff_partial import assignments
from tff_partial import client_state
from tff_partial import composition
from tff_partial import contexts
from tff_partial import evaluation
from tff_partial import groups
from tff_partial import layers
from tff_partial import processes
from tff_partial import tiers
from tff_partial.composition import Aggregation
from tff_partial.data import splits
from tff_partial.exchange import messages
from tff_partial.model import keras_models
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.phases import PhaseError
from tff_partial.phases import sgd
from tff_partial.solvers.exact import Exact

K = 3
_NODES = [[0.0], [2.0], [5.0]]  # Prototypes, as they begin.
# Columns of labels: what the user thinks, the type, the sub-population, and
# whether the user is prototypical.
_LABELS = tf.TensorSpec([4], tf.float32)


def _build(num_groups: int = K) -> tf.keras.Model:
  inputs = tf.keras.Input([1], name='x')
  own = layers.PrivateVector(1, initializer='ones', name='embedding')(inputs)
  joined = tf.keras.layers.Concatenate()([inputs, own])
  half = functools.partial(linear, tf.keras.initializers.Constant(0.5))
  features = half(name='encoder')()(joined)
  features = layers.Centers(
    num_groups,
    1,
    initializer=tf.keras.initializers.Constant(_NODES),
    name='prototypes',
  )(features)
  heads = {'head': 'head', 'global': 'global_head', 'type': 'type_head'}
  return tf.keras.Model(
    inputs, {of: half(name=name)()(features) for of, name in heads.items()}
  )


def _half_square(wanted: tf.Tensor, found: tf.Tensor) -> tf.Tensor:
  return 0.5 * tf.square(wanted - found[:, 0])


PARTS = assignments.FedEmbedVariables(
  embedding='embedding/own',
  global_head='global_head/.*',
  global_loss=lambda labels, outputs: _half_square(
    labels[:, 0], outputs['global']
  ),
  prototypes='prototypes/vectors',
  sub_population=lambda labels: tf.cast(labels[:, 2], tf.int32),
  liked_type=lambda labels: tf.where(
    labels[:, 0] > 0, tf.cast(labels[:, 1], tf.int32), -1
  ),
  is_prototypical=lambda labels: labels[:, 3] > 0,
)


def _of_head(labels: tf.Tensor, outputs: Any) -> tf.Tensor:
  return _half_square(labels[:, 0], outputs['head'])


def _model(**options: Any) -> models.PartialModel:
  return keras_models.from_keras(
    **{
      'build': _build,
      'loss': lambda labels, outputs: (
        _of_head(labels, outputs) + _half_square(labels[:, 1], outputs['type'])
      ),
      'labels': _LABELS,
      'local': 'embedding',
      'group': 'head',
      'num_groups': K,
      **options,
    }
  )


def _client(
  group: int, *wanted: float, kind: int = 1, is_prototypical: bool = False
) -> planted.Fields:
  """Examples x = 1, 2, ... of one type."""
  labels = np.array([[y, kind, group, is_prototypical] for y in wanted])
  count = len(wanted)
  return {
    'x': np.arange(1, count + 1, dtype=np.float32)[:, None],
    'y': labels.astype(np.float32),
  }


_TRAINING = Phase(optimizer=sgd(0.1), batch_size=None)


def _process(
  assignment: assignments.Assignment, **options: Any
) -> processes.PartialProcess:
  return algorithms.build_fed_embed(
    _model(),
    parts=PARTS,
    assignment=assignment,
    aggregation=Aggregation(client_weighting=messages.ClientWeighting.UNIFORM),
    **{'training': _TRAINING, **options},
  )


pytestmark = pytest.mark.usefixtures('in_cohorts')


@pytest.fixture(scope='module', name='of_type')
def fixture_of_type() -> processes.PartialProcess:
  return _process(assignments.by_type(PARTS))


@pytest.fixture(scope='module', name='triplet')
def fixture_triplet() -> processes.PartialProcess:
  """Nothing but one step of the triplet loss."""
  return _process(
    assignments.by_prototype(PARTS, steps=1, server_learning_rate=5.0),
    training=dataclasses.replace(_TRAINING, optimizer=sgd(0.0)),
  )


def _after(
  process: processes.PartialProcess, clients: dict[str, planted.Fields]
) -> tuple[dict[str, np.ndarray], list[Any]]:
  """Weights at the server after a round, and what clients remember."""
  output = planted.run(process, planted.cohort_of(process, clients, 1))
  trained = process.get_model_weights(output.state).trainable
  return {
    name: np.asarray(value)
    for named in trained.values()
    for name, value in named.items()
  }, list(output.client_states)


# ---- sections 3.2 and 3.4: who learns from what ------------------------------


@pytest.mark.slow
def test_gradients_go_where_section_3_sends_them(of_type):
  weights, (kept,) = _after(of_type, {'one': _client(1, 3.0)})
  # x = e = 1 and all weights 0.5: f = 1, and each head says 0.5. The head is
  # wrong by 0.5 - 3 = -2.5, the type head by 0.5 - 1 = -0.5.
  wrong = -2.5 * 0.5 + -0.5 * 0.5
  w, v = weights['encoder/kernel'][:, 0]
  assert w == pytest.approx(0.5 - 0.1 * wrong)
  assert v == pytest.approx(0.5 - 0.1 * wrong)
  np.testing.assert_allclose(
    weights['head/kernel'][:, 0, 0], [0.5, 0.5 + 0.25, 0.5]
  )
  assert weights['type_head/kernel'] == pytest.approx(0.5 + 0.05)
  # Both losses also move the embedding, through the encoder as it was.
  e = 1.0 - 0.1 * wrong * 0.5
  # Then the global head: of the loss it sees, the encoder learns nothing, and
  # neither does the head of the sub-population.
  f = w + v * e
  gone_wrong = 0.5 * f - 3.0
  assert weights['global_head/kernel'] == pytest.approx(
    0.5 - 0.1 * gone_wrong * f
  )
  assert kept['held']['embedding/own'] == pytest.approx(
    e - 0.1 * gone_wrong * 0.5 * v
  )
  # Prototypes have nothing to do with it.
  np.testing.assert_array_equal(weights['prototypes/vectors'], _NODES)


@pytest.mark.slow
def test_heads_are_averaged_over_all_clients(of_type):
  # Algorithm 1, line 25: a client of another sub-population halves the step.
  alone, _ = _after(of_type, {'one': _client(1, 3.0)})
  both, kept = _after(of_type, {'one': _client(1, 3.0), 'two': _client(2, 0.5)})
  moved = alone['head/kernel'][1] - 0.5
  np.testing.assert_allclose(both['head/kernel'][1], 0.5 + moved / 2)
  # Nobody is of sub-population 0. And the head that client two has was right.
  np.testing.assert_array_equal(both['head/kernel'][[0, 2]], [[[0.5]], [[0.5]]])
  assert [each['group'] for each in kept] == [1, 2]


@pytest.mark.slow
def test_heads_follow_by_what_clients_train_on():
  # A client of two examples trains on one, by which it would stay.
  stays = groups.Assign(lambda client: tf.minimum(client.count - 1, 1))
  process = _process(
    assignments.by_type(PARTS)._replace(reassign=stays),
    training=dataclasses.replace(_TRAINING, on=splits.halves().support),
  )
  weights, _ = _after(process, {'one': _client(0, 3.0, 3.0)})
  first, second, _ = weights['head/kernel']
  assert first != second == 0.5


@pytest.mark.slow
def test_an_embedding_is_solved_for_before_the_heads_are_trained():
  optimizers = {tiers.LOCAL: Exact(ridge=1 / 16), tiers.GLOBAL: sgd(0.1)}
  process = _process(
    assignments.by_type(PARTS),
    training=Phase(optimizer=optimizers, batch_size=None),
  )
  weights, (kept,) = _after(process, {'one': _client(1, 3.0)})
  # f = (1 + e) / 2; (f / 2 - 3)^2 / 2 + (f / 2 - 1)^2 / 2 + e^2 / 16 has the
  # slope (0.25 e - 2.75 + 0.25 e - 0.75) / 4 + e / 8: e = 3.5, and f = 2.25.
  assert kept['held']['embedding/own'] == pytest.approx(3.5)
  wrong = 0.5 * 2.25 - 3.0
  assert weights['head/kernel'][1] == pytest.approx(0.5 - 0.1 * wrong * 2.25)


# ---- section 3.3.2: prototypes -----------------------------------------------


def _knowing(
  embedding: float, nodes: tf.Tensor, labels: Any = None, seed: int = 0
) -> contexts.ClientContext:
  """What a client knows at a batch, of the groups of `_model`."""
  weights = collections.OrderedDict(
    [
      (tiers.GLOBAL, {PARTS.prototypes: nodes}),
      (tiers.LOCAL, {PARTS.embedding: tf.constant([embedding])}),
    ]
  )
  count = 0 if labels is None else len(labels)
  return contexts.ClientContext(
    types.SimpleNamespace(num_groups=K),  # type: ignore[arg-type]
    weights,
    weights,
    {},
    {},
    tf.constant(count),
    tf.constant([seed, 0]),
    batch=contexts.Batch(
      None, labels, tf.ones([count]), tf.fill([count], True), None
    ),
  )


def test_the_triplet_loss():
  loss = assignments.triplet_loss(PARTS, 0.5)
  # Type 0, of a user of sub-population 2; what it does not like says nothing.
  labels = tf.constant([[1.0, 0.0, 2.0, 0.0], [0.0, 0.0, 2.0, 0.0]])
  nodes = tf.constant([[0.0], [1.0], [5.0]])
  found = {
    tuple(loss(_knowing(2.0, nodes, labels, seed)).numpy()) for seed in range(9)
  }
  # The other one is drawn: 4 - 1 + 0.5, or 4 - 9 + 0.5.
  assert found == {(3.5, 0.0), (0.0, 0.0)}


@pytest.mark.slow
def test_embeddings_go_to_what_their_user_likes(triplet):
  # e = 1 likes 0. Against 2 the gradient of e^2 - (e - 2)^2 is 4, and steps are
  # a tenth of that. Against 5 the hinge is closed: 1 - 16 + 1 < 0.
  against_two, against_five = 0.6, 1.0
  found = set()
  for seed in range(8):
    # Which sub-population it is of, the client does not look up.
    # The second example, which it does not like, is no part of the mean.
    likes_zero = _client(seed % 3, 0.5, 0.0, kind=0)
    cohort = planted.cohort_of(triplet, {'one': likes_zero}, seed)
    output = planted.run(triplet, cohort)
    (kept,) = output.client_states
    found.add(round(float(kept['held']['embedding/own'][0]), 5))
    assert kept['group'] == 0
    # Nobody but prototypical clients moves prototypes.
    np.testing.assert_array_equal(
      planted.global_weights(triplet, output.state)['prototypes/vectors'],
      _NODES,
    )
  # The other one is drawn.
  assert found == {against_two, against_five}


@pytest.mark.slow
@pytest.mark.parametrize('by', [assignments.by_prototype, assignments.by_map])
def test_clients_are_assigned_by_what_they_train_on(by):
  on = splits.halves().support
  training = dataclasses.replace(_TRAINING, on=on)
  assignment = by(PARTS, forming=Phase())
  process = _process(assignment, training=training)
  *parts, heads, after = process.work.work
  assert all(part.on is on for part in (*parts, *heads.phases, after))
  assert len(parts) == len(assignment.before) + 1


@pytest.mark.slow
def test_prototypes_are_the_embeddings_of_prototypical_clients(triplet):
  # Both like what is of type 0, but the first knows better where it belongs.
  clients = {
    'known': _client(2, 0.5, kind=0, is_prototypical=True),
    'other': _client(2, 0.5, kind=0),
  }
  weights, (known, other) = _after(triplet, clients)
  assert (known['group'], other['group']) == (2, 0)
  # It draws its embedding to no prototype, but the prototype to its embedding:
  # a tenth of the way from 5 to 1, of which the server takes the mean over two
  # clients five times.
  assert known['held']['embedding/own'] == 1.0
  np.testing.assert_allclose(
    weights['prototypes/vectors'], [[0.0], [2.0], [5.0 - 0.1 * 4.0 / 2 * 5]]
  )
  # Whatever its examples weigh.
  clients['known']['weight'] = np.array([3.0], np.float32)
  weights, _ = _after(triplet, clients)
  np.testing.assert_allclose(weights['prototypes/vectors'][2], [5.0 - 1.0])


@pytest.mark.parametrize(
  ('embedding', 'expected'), [(0.9, 0), (1.1, 1), (3.4, 1), (9.0, 2), (1.0, 0)]
)
def test_the_nearest_center_is_chosen(embedding, expected):
  nearest = groups.nearest(PARTS.embedding, PARTS.prototypes)
  known = _knowing(embedding, tf.constant(_NODES))
  assert nearest.choose(known) == expected


# ---- section 3.3.1: the self-organizing map ----------------------------------


@pytest.mark.parametrize(
  ('radius', 'rows', 'nearness'),
  [
    (0.0, 1, [0.0, 1.0, 0.0]),
    (1.0, 1, [np.exp(-0.5), 1.0, np.exp(-0.5)]),
    # Two rows of two: nodes 0 and 1 above 2.
    (1.0, 2, [np.exp(-0.5), 1.0, np.exp(-1.0)]),
    (np.inf, 1, [1.0, 1.0, 1.0]),
  ],
)
def test_nodes_go_by_kohonens_rule(radius, rows, nearness):
  nodes = tf.constant(_NODES)
  with tf.GradientTape() as tape:
    tape.watch(nodes)
    loss = assignments.map_loss(PARTS, radius, rows)(_knowing(1.4, nodes))
  step = -tape.gradient(loss, nodes)
  np.testing.assert_allclose(
    step[:, 0], np.array(nearness) * [1.4, -0.6, -3.6], rtol=1e-6
  )


@pytest.mark.slow
def test_clients_join_the_nearest_node_and_draw_it():
  process = _process(
    assignments.by_map(PARTS, client_learning_rate=0.5, radius=0.0)
  )
  weights, (kept,) = _after(process, {'one': _client(2, 0.5)})
  # e = 1 is as far from 0 as from 2, and the first counts.
  assert kept['group'] == 0
  e = kept['held']['embedding/own'][0]
  nearest = 0 if e <= 1.0 else 1
  expected = np.array([0.0, 2.0, 5.0])
  expected[nearest] += 0.5 * (e - expected[nearest])
  np.testing.assert_allclose(
    weights['prototypes/vectors'][:, 0], expected, rtol=1e-6
  )


@pytest.mark.slow
def test_each_node_may_follow_the_one_client_nearest_to_it():
  process = _process(
    assignments.by_map(
      PARTS, client_learning_rate=0.5, radius=np.inf, follow_nearest=True
    )
  )
  clients = {'one': _client(2, 0.5), 'two': _client(2, 9.0)}
  weights, kept = _after(process, clients)
  embeddings = np.array([each['held']['embedding/own'][0] for each in kept])
  nodes = np.array([0.0, 2.0, 5.0])
  best = np.abs(nodes[:, np.newaxis] - embeddings).argmin(1)
  assert len(set(best)) == 2
  np.testing.assert_allclose(
    weights['prototypes/vectors'][:, 0],
    nodes + 0.5 * (embeddings[best] - nodes),
    rtol=1e-6,
  )


@pytest.mark.slow
def test_clients_form_their_embedding_before_they_join():
  # The global head is wrong by 0.5 - 3, times its 0.5, times v = 0.5: a step of
  # rate 2 takes e from 1, which is as near to 0 as to 2, to 2.25.
  forming = Phase(optimizer=sgd(2.0), batch_size=None)
  no_training = dataclasses.replace(_TRAINING, optimizer=sgd(0.0))
  groups_of = {}
  for name, how in (('as it is', None), ('formed', forming)):
    process = _process(
      assignments.by_map(
        PARTS, forming=how, client_learning_rate=0.5, radius=0.0
      ),
      training=no_training,
    )
    weights, (kept,) = _after(process, {'one': _client(2, 3.0)})
    groups_of[name] = int(kept['group'])
  assert groups_of == {'as it is': 0, 'formed': 1}
  assert kept['held']['embedding/own'] == pytest.approx(2.25)
  np.testing.assert_allclose(
    weights['prototypes/vectors'], [[0.0], [2.125], [5.0]]
  )


@pytest.mark.parametrize(
  ('moves', 'expected'),
  [
    # From head 0 most went to 1, and from 2 most to 0; nobody is in 2.
    ([[0, 3, 0], [1, 2, 0], [4, 0, 0]], [2, 0, 2]),
    # As many stay as come: it keeps its own.
    ([[2, 1, 0], [2, 1, 0], [0, 0, 0]], [0, 1, 2]),
  ],
)
def test_heads_follow_their_clients(moves, expected):
  followed = groups.inherit_weights({'head': tf.range(3.0)}, tf.constant(moves))
  np.testing.assert_array_equal(followed['head'], expected)


# ---- Table 1: everybody a head of their own ----------------------------------

_OWN_HEADS = {'local': ['embedding', 'head'], 'group': None, 'num_groups': 0}


@pytest.mark.slow
def test_personal_heads_stay_home():
  model = _model(**_OWN_HEADS)
  process = algorithms.build_fed_embed(
    model, parts=PARTS, assignment=assignments.OWN_HEAD, training=_TRAINING
  )
  assert process.sent == (tiers.GLOBAL,)
  weights, (kept,) = _after(process, {'one': _client(1, 3.0)})
  assert 'head/kernel' not in weights
  assert kept['held']['head/kernel'] == pytest.approx(0.75)
  # A new client trains both, here on the first of two such examples.
  measuring = algorithms.build_fed_embed_eval(
    model, parts=PARTS, assignment=assignments.OWN_HEAD, personalise=_TRAINING
  )
  cohort = planted.cohort_of(measuring, {'new': _client(1, 3.0, 3.0)}, 1)
  (held,), (value,) = planted.first_states(measuring, cohort), list(cohort)
  first = process.get_model_weights(process.initialize())
  own = measuring.personalise(first, held, value)
  assert own['head/kernel'] == pytest.approx(0.75)
  assert own['embedding/own'] == pytest.approx(1.075)


@pytest.mark.slow
def test_an_own_head_is_solved_for_before_the_rest_is_trained():
  solve = Phase(
    train=(tiers.LOCAL,), variable_filter='head/.*', optimizer=Exact(ridge=0.5)
  )
  process = algorithms.build_fed_embed(
    _model(**_OWN_HEADS),
    parts=PARTS,
    assignment=assignments.OWN_HEAD._replace(before=(solve,)),
    training=_TRAINING,
  )
  _, (kept,) = _after(process, {'one': _client(1, 3.0)})
  # f = 1: (h - 3)^2 / 2 + h^2 / 2 is least at 1.5, and a step adds 0.15.
  assert kept['held']['head/kernel'] == pytest.approx(1.65)


# ---- PFedKM ------------------------------------------------------------------


def _build_clustered() -> tf.keras.Model:
  """`head * w x`, and `g * w x` where g is the user's own."""
  inputs = tf.keras.Input([1], name='x')
  features = linear('ones', name='encoder')()(inputs)
  gradient = layers.PrivateVector(1, initializer='zeros', name='embedding')
  own = gradient(inputs)
  features = layers.Centers(
    2,
    1,
    initializer=tf.keras.initializers.Constant([[-1.0], [1.0]]),
    name='prototypes',
  )(features)
  head = linear('zeros', name='head')()
  outputs = {'head': head(features), 'global': features * own}
  return tf.keras.Model(inputs, outputs)


def _assert_measured_with_the_second_head(
  process: processes.PartialProcess, **options: Any
) -> None:
  """A client who likes 3, with heads of 0 and 2."""
  measuring = baselines.build_p_fed_km_eval(
    process.model, parts=PARTS, split=splits.same(), **options
  )
  trained = process.get_model_weights(process.initialize())
  trained.trainable[tiers.GROUP]['head/kernel'] = np.array(
    [[[0.0]], [[2.0]]], np.float32
  )
  found = planted.evaluate(measuring, trained, {'up': _client(0, 3.0)})
  assert found.metrics['loss'] == pytest.approx(0.5 * (2.0 - 3.0) ** 2)


@pytest.mark.slow
def test_pfedkm_of_heads_joins_users_of_like_gradients():
  model = _model(build=_build_clustered, num_groups=2, loss=_of_head)
  process = baselines.build_p_fed_km(
    model,
    parts=PARTS,
    gradients=p_fed_km.HEAD,
    training=_TRAINING,
    client_learning_rate=0.5,
    aggregation=Aggregation(client_weighting=messages.ClientWeighting.UNIFORM),
  )
  # The gradient of half of (y - g x)^2 in g is -y x at g = 0.
  clients = {'up': _client(0, 3.0), 'down': _client(0, -2.0)}
  weights, kept = _after(process, clients)
  assert [each['group'] for each in kept] == [1, 0]
  # Each center goes half of the way, and counts for half of the cohort.
  np.testing.assert_allclose(
    weights['prototypes/vectors'][:, 0], [-1.0 - 0.25, 1.0 + 0.5]
  )
  # So does each head.
  np.testing.assert_allclose(
    weights['head/kernel'][:, 0, 0], [-0.1, 0.15], rtol=1e-6
  )
  # Nobody remembers a gradient.
  assert not kept[0]['held']
  _assert_measured_with_the_second_head(process, gradients=p_fed_km.HEAD)


def _build_clustered_by_model(size: int = 2) -> tf.keras.Model:
  """`head * w x` and `a * w x`, of which w and a are everybody's."""
  inputs = tf.keras.Input([1], name='x')
  features = layers.Centers(
    2,
    size,
    initializer=tf.keras.initializers.Constant([[-1.0] * size, [1.0] * size]),
    name='prototypes',
  )(linear('ones', name='encoder')()(inputs))
  half = tf.keras.initializers.Constant(0.5)
  return tf.keras.Model(
    inputs,
    {
      'head': linear('zeros', name='head')()(features),
      'global': linear(half, name='global_head')()(features),
    },
  )


def _clustered_by_model(**options: Any) -> models.PartialModel:
  return _model(
    **{
      'build': _build_clustered_by_model,
      'local': None,
      'num_groups': 2,
      'loss': _of_head,
      **options,
    }
  )


@pytest.mark.slow
def test_pfedkm_joins_users_of_like_gradients_of_the_whole_model():
  model = _clustered_by_model()
  process = baselines.build_p_fed_km(
    model,
    parts=PARTS,
    training=_TRAINING,
    client_learning_rate=0.5,
    server_learning_rate=2.0,
    server_optimizer=sgd(10.0),
    aggregation=Aggregation(client_weighting=messages.ClientWeighting.UNIFORM),
  )
  # At w = 1 and a = 0.5, half of (y - a w)^2 descends by (y - 0.5) (a, w): by
  # 2.5 (0.5, 1) and by -2.5 (0.5, 1).
  clients = {'up': _client(0, 3.0), 'down': _client(0, -2.0)}
  weights, kept = _after(process, clients)
  assert [each['group'] for each in kept] == [1, 0]
  # Each center goes half of the way, half of the cohort takes it, and the
  # server doubles the mean of both.
  half = np.array([1.25 - 1.0, 2.5 - 1.0]) / 2
  np.testing.assert_allclose(
    weights['prototypes/vectors'], [-1.0 - half, 1.0 + half]
  )
  # Nothing else has moved by the gradient: its clients train their head alone,
  # by a tenth of y w, and the encoder learns nothing from a head that is zero.
  assert weights['encoder/kernel'] == 1.0
  assert weights['global_head/kernel'] == 0.5
  np.testing.assert_allclose(
    weights['head/kernel'][:, 0, 0], [-0.2 / 2 * 10, 0.3 / 2 * 10], rtol=1e-6
  )
  assert not kept[0]['held']
  _assert_measured_with_the_second_head(process)


@pytest.mark.slow
def test_pfedkm_trains_the_variables_that_are_named():
  process = baselines.build_p_fed_km(
    _clustered_by_model(),
    parts=PARTS,
    training=dataclasses.replace(_TRAINING, variable_filter='encoder/.*'),
  )
  weights, _ = _after(process, {'up': _client(0, 3.0)})
  # From zero, where all heads begin.
  np.testing.assert_array_equal(weights['head/kernel'][:, 0, 0], [0.0, 0.0])


@pytest.mark.slow
def test_a_client_between_two_centers_moves_the_one_that_it_joins():
  process = baselines.build_p_fed_km(
    _clustered_by_model(),
    parts=PARTS,
    training=_TRAINING,
    client_learning_rate=0.5,
  )
  # What the shared head predicts: its gradient is zero.
  weights, kept = _after(process, {'one': _client(0, 0.5)})
  assert kept[0]['group'] == 0
  np.testing.assert_array_equal(
    weights['prototypes/vectors'], [[-0.5] * 2, [1.0] * 2]
  )


@pytest.mark.slow
def test_a_client_of_pfedkm_that_trains_on_nothing_moves_no_center():
  process = baselines.build_p_fed_km(
    _clustered_by_model(),
    parts=PARTS,
    training=dataclasses.replace(_TRAINING, on=splits.halves().query),
    # Each client counts once, also without examples to train on.
    aggregation=Aggregation(tff.aggregators.UnweightedMeanFactory()),
  )
  weights, _ = _after(process, {'one': _client(0, 3.0)})
  np.testing.assert_array_equal(
    weights['prototypes/vectors'], [[-1.0] * 2, [1.0] * 2]
  )


def test_centers_of_another_length_are_refused():
  model = _clustered_by_model(
    build=functools.partial(_build_clustered_by_model, 3)
  )
  with pytest.raises(groups.GroupError, match='of 3 numbers.* has 2'):
    baselines.build_p_fed_km(model, parts=PARTS)


def test_gradients_of_something_else_are_refused():
  with pytest.raises(groups.GroupError, match="gradients='body' is none of"):
    baselines.build_p_fed_km_eval(
      _clustered_by_model(), parts=PARTS, gradients='body'
    )


# ---- what is measured --------------------------------------------------------


def _measured(
  process: processes.PartialProcess,
  measuring: evaluation.Evaluation,
  group: int,
  kind: int = 1,
) -> float:
  """The loss of a client whose sub-population's head is 0.5 and others 0."""
  weights = process.get_model_weights(process.initialize())
  heads = np.zeros([K, 1, 1], np.float32)
  heads[group] = 0.5
  weights.trainable[tiers.GROUP]['head/kernel'] = heads
  clients = {'one': _client(2, 3.0, 3.0, kind=kind)}
  found = planted.evaluate(measuring, weights, clients)
  return float(found.metrics['loss'])


@pytest.mark.slow
def test_clients_are_measured_with_the_head_of_their_sub_population(of_type):
  measuring = algorithms.build_fed_embed_eval(
    of_type.model, parts=PARTS, assignment=assignments.by_type(PARTS)
  )
  # The second half is one example: x = 2 and e = 1, so f = 1.5.
  of_types = 0.5 * (0.75 - 1.0) ** 2
  assert _measured(of_type, measuring, 2) == pytest.approx(
    0.5 * (0.75 - 3.0) ** 2 + of_types
  )
  assert _measured(of_type, measuring, 1) == pytest.approx(
    0.5 * 3.0**2 + of_types
  )


@pytest.mark.slow
def test_clients_find_their_prototype_before_they_are_measured(triplet):
  measuring = algorithms.build_fed_embed_eval(
    triplet.model,
    parts=PARTS,
    assignment=assignments.by_prototype(PARTS, steps=30, margin=30.0),
    split=splits.halves(),
  )
  # It has never taken part, and e = 1 lies next to others.
  assert _measured(triplet, measuring, 2, kind=2) < 0.5 * 3.0**2
  personal = planted.first_states(
    measuring, planted.cohort_of(measuring, {'one': _client(2, 1.0)}, 1)
  )
  assert personal[0]['group'] == -1


@pytest.mark.slow
def test_new_clients_train_their_embedding_through_the_global_head(of_type):
  options = {'parts': PARTS, 'assignment': assignments.by_type(PARTS)}
  measuring = algorithms.build_fed_embed_eval(
    of_type.model, personalise=_TRAINING, **options
  )
  cohort = planted.cohort_of(measuring, {'one': _client(1, 3.0, 3.0)}, 1)
  (held,), (value,) = planted.first_states(measuring, cohort), list(cohort)
  weights = of_type.get_model_weights(of_type.initialize())
  found = measuring.personalise(weights, held, value)
  # e = 1 sees an error of 0.5 - 3, times the head's 0.5, times v = 0.5.
  assert found['embedding/own'] == pytest.approx(1.0 + 0.1 * 2.5 * 0.25)
  np.testing.assert_array_equal(found['encoder/kernel'], [[0.5], [0.5]])


# ---- what does not fit -------------------------------------------------------


@pytest.mark.parametrize(
  ('build', 'argument'),
  [('build_fed_embed', 'training'), ('build_fed_embed_eval', 'personalise')],
)
def test_names_of_variables_beside_their_roles_are_refused(build, argument):
  with pytest.raises(PhaseError, match=r"variable_filter='head/.\*': which"):
    getattr(algorithms, build)(
      _model(),
      parts=PARTS,
      assignment=assignments.by_type(PARTS),
      **{argument: Phase(variable_filter='head/.*')},
    )


@pytest.mark.parametrize('setting', [{'loss': 'mse'}, {'variable_filter': 'e'}])
def test_a_phase_that_forms_embeddings_names_no_variables_nor_loss(setting):
  with pytest.raises(PhaseError, match=f'{next(iter(setting))}=.*follows from'):
    assignments.by_map(PARTS, forming=Phase(**setting))


@pytest.mark.parametrize('setting', [{'rows': 0}, {'radius': -1.0}])
def test_a_map_has_rows_and_a_radius(setting):
  with pytest.raises(groups.GroupError, match='give at least 1, and 0'):
    assignments.by_map(PARTS, **setting)


def _compose(model: models.PartialModel, *work: Any) -> Any:
  return composition.compose(
    model, work=list(work), client_state=client_state.persist_local
  )


_OWN = assignments.by_type(PARTS).assign
_ALL = Phase((tiers.GLOBAL, tiers.GROUP, tiers.LOCAL), measured=True)


@pytest.mark.parametrize(
  ('work', 'message'),
  [
    ((_OWN, _OWN, _ALL), 'choose their groups 2 times'),
    ((_ALL, _OWN), 'before the client has chosen its group'),
    (
      (groups.nearest('embedding', PARTS.prototypes), _ALL),
      r"to read the local variable 'embedding', but the model has "
      r"\['embedding/own'\] there",
    ),
  ],
  ids=['twice', 'too late', 'unknown'],
)
def test_choices_that_do_not_fit_are_refused(work, message):
  with pytest.raises((groups.GroupError, contexts.ContextError), match=message):
    _compose(_model(), *work)


def test_groups_without_weights_of_their_own_are_refused():
  model = _model(group=None, num_groups=0)
  with pytest.raises(groups.GroupError, match='the model has no variables for'):
    _compose(model, _OWN, Phase((tiers.GLOBAL, tiers.LOCAL), measured=True))


@pytest.mark.parametrize(
  ('build', 'lacks', 'message'),
  [
    (assignments.by_type, {'sub_population': None}, 'to know their sub-pop'),
    *(
      (assignments.by_prototype, {lacks: None}, message)
      for lacks, message in (
        ('sub_population', 'to know their sub-pop'),
        ('liked_type', 'to know what they like'),
        ('is_prototypical', r'FedEmbedVariables\(is_prototypical='),
      )
    ),
    *(
      (build, {'prototypes': ''}, 'which variable of the model')
      for build in (assignments.by_prototype, assignments.by_map)
    ),
  ],
)
def test_parts_that_are_missing_are_named(build, lacks, message):
  parts = PARTS.__class__(**{**vars(PARTS), **lacks})
  with pytest.raises(groups.GroupError, match=message):
    build(parts)
