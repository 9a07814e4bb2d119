"""A client's own Keras model after training, and what it would choose."""

import collections
import copy
import dataclasses
import logging
import re

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import tff_partial
from tff_partial import algorithms
from tff_partial import tiers
from tff_partial.data import examples
from tff_partial.data import vocabularies
from tff_partial.training import personal_models
from tff_partial.training import top_candidates
from tff_partial.training.errors import ProgramError

_ITEMS = 6
_RATE = 0.1


def _build() -> tf.keras.Model:
  item = tf.keras.Input([], dtype=tf.int32)
  height = tf.keras.layers.Embedding(_ITEMS, 1, name='items')(item)
  own = tf.keras.layers.Dense(
    1, name='user', kernel_initializer='zeros', bias_initializer='ones'
  )
  return tf.keras.Model(item, own(height))


@pytest.fixture(scope='module', name='model')
def fixture_model():
  return tff_partial.from_keras(_build, loss='mse', local='user')


@pytest.fixture(scope='module', name='clients')
def fixture_clients(model):
  random = np.random.default_rng(0)
  return tff_partial.pack(
    {
      f'u{user}': {'x': np.arange(4), 'y': random.normal(size=4)}
      for user in range(6)
    },
    model.example_spec,
  )


@pytest.fixture(scope='module', name='recon')
def fixture_recon(model, clients):
  process = tff_partial.algorithms.build_fed_recon(
    model, reconstruct=tff_partial.Phase(epochs=2, batch_size=None)
  )
  return tff_partial.train(process, clients, rounds=2, clients_per_round=3)


@pytest.fixture(scope='module', name='furl')
def fixture_furl(model, clients):
  """Of whose six clients only some took part."""
  process = tff_partial.algorithms.build_furl(
    model, training=tff_partial.Phase(batch_size=None, epochs=3)
  )
  return tff_partial.train(process, clients, rounds=2, clients_per_round=2)


def _assert_by_hand(result, clients, client: str, steps: int) -> None:
  """It predicts as after gradient steps on the two numbers of a user alone."""
  table = np.asarray(
    result.best_weights.trainable[tiers.GLOBAL]['items/embeddings']
  )[:, 0]
  value = clients.cohort([client], np.zeros([1, 2], np.int32))[0]['examples']
  heights, labels = table[value['x'][:4]], value['y'][:4, 0]
  slope, offset = 0.0, 1.0
  for _ in range(steps):
    error = slope * heights + offset - labels
    slope -= _RATE * np.mean(2 * error * heights)
    offset -= _RATE * np.mean(2 * error)
  found = _predicted(tff_partial.personalise(result, clients, client))
  np.testing.assert_allclose(found, slope * table + offset, atol=1e-6)


def _ditto(model):
  return algorithms.build_ditto(model, penalty=0.0)


def _predicted(keras_model: tf.keras.Model) -> np.ndarray:
  return keras_model.predict(np.arange(_ITEMS), verbose=0)[:, 0]


@pytest.mark.slow
def test_a_client_that_forgets_rebuilds_what_is_its_own_on_all_examples(
  recon, clients
):
  _assert_by_hand(recon, clients, 'u3', steps=2)


@pytest.mark.slow
def test_a_client_that_took_part_has_what_it_remembers(furl, clients, model):
  (client, *_) = [
    c for c in clients.client_ids if furl.client_store.client(c) is not None
  ]
  remembered = furl.best_client_store.client(client)
  found = _predicted(tff_partial.personalise(furl, clients, client))
  own = collections.OrderedDict(
    (name, remembered[leaf])
    for name in model.specs(tiers.LOCAL)
    for leaf in remembered
    if name in leaf
  )
  expected = model.to_keras(furl.best_weights, own)
  np.testing.assert_array_equal(found, _predicted(expected))


@pytest.mark.slow
def test_a_client_whose_work_was_never_finite_trains_as_a_new_one(
  model, clients
):
  fields = {
    client: {'x': np.arange(4), 'y': np.full([4], height)}
    for client, height in (('u0', 0.5), ('u1', 1e30))
  }
  furl = tff_partial.train(
    tff_partial.algorithms.build_furl(
      model, training=tff_partial.Phase(batch_size=None, epochs=3)
    ),
    tff_partial.pack(fields, model.example_spec),
    rounds=1,
    clients_per_round=2,
  )
  assert furl.train['num_not_finite'] == 1
  _assert_by_hand(furl, clients, 'u1', steps=3)


@pytest.mark.slow
def test_a_new_client_trains_what_is_its_own_as_in_a_round(furl, clients):
  (client, *_) = [
    c for c in clients.client_ids if furl.client_store.client(c) is None
  ]
  _assert_by_hand(furl, clients, client, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize('build', [_ditto, algorithms.build_p_fed_me])
def test_a_personal_copy_of_the_model_is_what_a_client_has(build, clients):
  model = tff_partial.from_keras(_build, loss='mse')
  process = build(model)
  result = tff_partial.train(process, clients, rounds=1, clients_per_round=2)
  of_all = _predicted(model.to_keras(result.best_weights))
  for client in clients.client_ids:
    found = _predicted(tff_partial.personalise(result, clients, client))
    assert np.abs(found - of_all).max() > 1e-3


@pytest.mark.slow
def test_an_evaluation_says_how_to_personalise_instead(recon, clients, model):
  evaluation = tff_partial.algorithms.build_fed_recon_eval(
    model, personalise=tff_partial.Phase(max_steps=0, batch_size=None)
  )
  keras_model = tff_partial.personalise(
    recon, clients, 'u3', evaluation=evaluation
  )
  np.testing.assert_array_equal(_predicted(keras_model), 1.0)


@pytest.mark.slow
def test_an_evaluation_takes_the_state_of_clients_who_took_part(
  furl, clients, model
):
  remembers = furl.client_store.client
  took_part = [c for c in clients.client_ids if remembers(c) is not None]
  new = [c for c in clients.client_ids if remembers(c) is None]
  ditto = algorithms.build_ditto_eval(model)
  with pytest.raises(ProgramError, match='the client state of the process'):
    tff_partial.personalise(furl, clients, took_part[0], evaluation=ditto)
  # A new client begins anew under any evaluation.
  found = tff_partial.personalise(furl, clients, new[0], evaluation=ditto)
  assert np.isfinite(_predicted(found)).all()


@pytest.mark.parametrize(
  ('inputs', 'expected'),
  [
    ([0, _ITEMS], 'x: example 1 is 6'),
    ([[0, 1]], r'one example to have shape \(\), found \(2,\)'),
    (['a'], 'expected values of type int32'),
    ([0.5], 'whose fractions would be lost'),
    (3, 'x: expected one value for each example, found the single value 3'),
  ],
)
def test_inputs_that_no_model_reads_are_refused(
  recon, clients, inputs, expected
):
  predictor = personal_models.Predictor(recon, clients)
  with pytest.raises(examples.ClientDataError, match=expected):
    predictor.predict('u0', inputs)


@pytest.mark.slow
def test_weights_that_are_not_finite_are_told(recon, clients, model, caplog):
  diverging = algorithms.build_fed_recon_eval(
    model,
    personalise=tff_partial.Phase(optimizer=tff_partial.sgd(1e30), epochs=3),
  )
  with caplog.at_level(logging.WARNING, 'absl'):
    tff_partial.personalise(recon, clients, 'u0', evaluation=diverging)
  assert 'the client trained are not finite' in caplog.text


def test_clients_whose_ids_are_of_other_values_are_refused(
  model, recon, clients
):
  known = vocabularies.Vocabulary('abcdef')
  trained = dataclasses.replace(recon, vocabularies={'film': known})
  others = copy.copy(clients)
  others.vocabularies = {'film': vocabularies.Vocabulary('bcdefg')}
  for personal in (
    lambda: tff_partial.personalise(trained, others, 'u0'),
    lambda: personal_models.Predictor(trained, others).predict('u0', [0]),
    lambda: tff_partial.evaluate(
      tff_partial.EvaluationSet(algorithms.build_fed_recon_eval(model), others),
      trained,
    ),
  ):
    with pytest.raises(vocabularies.VocabularyError, match="Column 'film': .*"):
      personal()


@pytest.mark.slow
@pytest.mark.parametrize(
  'build', [algorithms.build_fed_avg, algorithms.build_fed_per]
)
def test_who_has_nothing_of_its_own_is_told_so(clients, build):
  model = tff_partial.from_keras(_build, loss='mse')
  process = build(model)
  result = tff_partial.train(process, clients, rounds=1, clients_per_round=2)
  with pytest.raises(ProgramError, match='would have the same model'):
    tff_partial.personalise(result, clients, 'u3')
  tuning = algorithms.build_fine_tuning_eval(
    model, personalise=tff_partial.Phase()
  )
  tuned = tff_partial.personalise(result, clients, 'u3', evaluation=tuning)
  assert np.any(
    _predicted(tuned) != _predicted(model.to_keras(result.best_weights))
  )


def test_a_client_may_be_named_by_a_number(recon):
  given = {'x': np.arange(4), 'y': np.ones([4, 1])}
  clients = tff_partial.pack({'1': given}, recon.process.example_spec)
  mine, same = (
    _predicted(tff_partial.personalise(recon, clients, name))
    for name in (1, '1')
  )
  np.testing.assert_array_equal(mine, same)


# ---- the best of some candidates ---------------------------------------------


def _scorer(shape: tuple[int, ...] = ()) -> tf.keras.Model:
  """A model that scores a candidate by the negative of its sum."""
  given = tf.keras.Input(shape)
  total = tf.reduce_sum(tf.reshape(given, [tf.shape(given)[0], -1]), 1)
  return tf.keras.Model(given, -total)


def test_the_best_come_first_and_equals_in_their_order():
  found = top_candidates.top_n(_scorer(), [2.0, 1.0, 3.0, 1.0], 3)
  assert found == [(1.0, -1.0), (1.0, -1.0), (2.0, -2.0)]
  assert found[0].candidate == 1.0 and found[0].score == -1.0


def test_scores_without_a_sign_are_sorted_like_others():
  given = tf.keras.Input([], dtype=tf.uint8)
  found = top_candidates.top_n(
    tf.keras.Model(given, tf.identity(given)), np.array([0, 5, 3], np.uint8), 2
  )
  assert [choice.candidate for choice in found] == [5, 3]


@pytest.mark.parametrize(
  ('outputs', 'best'),
  [({'near': 1.0, 'far': -1.0}, {'near': 1.0, 'far': 3.0}), ([1, -1], [1, 3])],
)
def test_one_of_several_outputs_ranks(outputs, best):
  given = tf.keras.Input([1])
  model = tf.keras.Model(
    given, tf.nest.map_structure(lambda sign: -sign * given, outputs)
  )
  for output in best if isinstance(best, dict) else range(2):
    (found,) = top_candidates.top_n(model, [2.0, 1.0, 3.0], 1, output=output)
    assert found.candidate == best[output]
  known = list(outputs) if isinstance(outputs, dict) else [0, 1]
  for output in (None, 'nera'):
    with pytest.raises(ProgramError, match=f'outputs {re.escape(str(known))}'):
      top_candidates.top_n(model, [2.0, 1.0], 1, output=output)
  with pytest.raises(ProgramError, match='the model has one output'):
    top_candidates.top_n(_scorer(), [2.0, 1.0], 1, output='near')


@pytest.mark.parametrize('unseen', [False, True])
def test_values_of_a_vocabulary_are_named(unseen):
  words = tff_partial.Vocabulary(['b', 'a', 'c'], unseen=unseen)
  found = top_candidates.top_n(_scorer(), words, 2, exclude=['a'])
  assert [choice.candidate for choice in found] == ['b', 'c']
  assert [choice.score for choice in found] == [-1.0 - unseen, -2.0 - unseen]


@pytest.mark.parametrize('kind', [int, str])
def test_numbers_exclude_texts_that_read_alike(kind):
  words = tff_partial.Vocabulary(map(kind, [1, 2, 3, 4]))
  for exclude in ([1, 2], ['1', '2'], np.array([1.0, 2.0])):
    found = top_candidates.top_n(_scorer(), words, 2, exclude=exclude)
    assert [choice.candidate for choice in found] == [kind(3), kind(4)]


def test_a_misspelt_candidate_excludes_nothing_and_is_named(caplog):
  films = ['Alien', 'Brazil', 'Heat']
  with pytest.raises(
    ProgramError,
    match="^exclude: unknown candidate 'Aline'; did you mean 'Alien'\\?",
  ):
    top_candidates.top_n(
      _scorer(), tff_partial.Vocabulary(films), 1, exclude=['Heat', 'Aline']
    )
  known = tff_partial.Vocabulary(films, unseen=True)
  # What a client has had may be a value that the vocabulary never saw.
  found = top_candidates.top_n(_scorer(), known, 1, exclude=['Heat', 'Jaws'])
  assert found[0].candidate == 'Alien'
  assert "unknown candidate 'Jaws'." in caplog.text


def test_other_inputs_are_the_same_for_all_candidates():
  item, hour = (tf.keras.Input([], name=name) for name in ('item', 'hour'))
  keras_model = tf.keras.Model({'item': item, 'hour': hour}, item * hour)
  found = top_candidates.top_n(
    keras_model, np.array([1.0, 2.0]), 1, context={'hour': -3.0}
  )
  assert found == [(1.0, -3.0)]
  with pytest.raises(ProgramError, match=r"inputs \['hour', 'item'\]|in"):
    top_candidates.top_n(keras_model, [1.0], 1, context={'day': 1.0})


@pytest.mark.parametrize(
  'candidates, number, exclude, expected',
  [
    ([], 1, ['x'], 'there are no candidates'),
    ([1.0, 2.0], 3, [], 'cannot name 3 of the 2 candidates'),
    ([1.0, 2.0], 2, [2.0], 'cannot name 2 of the 1 candidates'),
    ([1.0, np.nan], 1, [], 'one finite number'),
    (
      ['a', 'b'],
      1,
      [],
      r'cannot read candidates of the shape \[\]: .*`predict`',
    ),
  ],
)
def test_what_cannot_be_chosen_is_refused(
  candidates, number, exclude, expected
):
  keras_model = _scorer((1,) if np.ndim(candidates) == 2 else ())
  with pytest.raises(ProgramError, match=expected):
    top_candidates.top_n(keras_model, candidates, number, exclude=exclude)


def test_an_item_beyond_the_table_is_named():
  item = tf.keras.Input([], dtype=tf.int32)
  score = tf.keras.layers.Embedding(2, 1)(item)
  with pytest.raises(
    ProgramError, match=r'indices\[2\] = 2 is not in \[0, 2\)'
  ):
    top_candidates.top_n(tf.keras.Model(item, score), range(3), 1)


# ---- the runtime that is taken -----------------------------------------------


def test_without_a_runtime_a_cohort_runtime_is_taken_and_kept(recon):
  del recon  # It was trained under none.
  stack = tff.framework.get_context_stack()
  default = stack.current
  with tff_partial.runtimes.ours() as first:
    assert stack.current is first
    assert isinstance(first, type(tff_partial.runtimes.cohort()))
    assert first.num_compiled  # The fixtures' rounds.
    with tff_partial.runtimes.ours() as inner:
      assert inner is first
  assert stack.current is default
  with tff_partial.runtimes.ours() as second:
    assert second is first


@pytest.mark.parametrize(
  'make', [tff_partial.runtimes.cohort, tff_partial.runtimes.native]
)
def test_a_runtime_that_was_chosen_stays(make):
  with make() as chosen, tff_partial.runtimes.ours() as found:
    assert found is chosen


@pytest.mark.parametrize(
  'make',
  [
    tff.backends.native.create_sync_local_cpp_execution_context,
    lambda: tff_partial.runtimes.cohort(asynchronous=True),
  ],
)
def test_one_that_cannot_run_cohorts_does_not(make, recon, clients):
  with tff.framework.get_context_stack().install(make()):
    again = tff_partial.train(
      recon.process, clients, rounds=2, clients_per_round=3
    )
  tf.nest.map_structure(
    np.testing.assert_array_equal, again.weights, recon.weights
  )


# ---- tables that are larger than a client needs ------------------------------


def _with_table(rows: int) -> tff_partial.PartialModel:
  def build() -> tf.keras.Model:
    user = tf.keras.Input([], dtype=tf.int32, name='user')
    item = tf.keras.Input([], dtype=tf.int32, name='item')
    own = tf.keras.layers.Embedding(rows, 1, name='user_embedding')(user)
    height = tf.keras.layers.Embedding(_ITEMS, 1, name='items')(item)
    return tf.keras.Model({'user': user, 'item': item}, own + height)

  return tff_partial.from_keras(build, loss='mse', local='user_embedding')


@pytest.mark.parametrize(
  'rows, users, is_warned_of',
  [(3, [0, 1, 2], True), (1, [0, 0, 0], False), (3, [0, 1, [1, 0]], False)],
)
def test_a_table_of_all_users_at_each_client_is_warned_of(
  rows, users, is_warned_of, caplog
):
  model = _with_table(rows)
  clients = tff_partial.pack(
    {
      f'u{place}': {
        'x': {'user': np.zeros(2, int) + user, 'item': np.arange(2)},
        'y': np.zeros(2),
      }
      for place, user in enumerate(users)
    },
    model.example_spec,
  )
  with caplog.at_level(logging.WARNING, 'absl'):
    for _ in range(2):
      clients.check(model.example_spec)
  told = [r.message for r in caplog.records if 'PrivateVector' in r.message]
  assert len(told) == is_warned_of
  if told:
    assert "table 'user_embedding' of 3 rows" in told[0]
    assert "'x.user'" in told[0]
