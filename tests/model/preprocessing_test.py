"""Lookups and normalization that stand first, lifted off the model."""

from collections.abc import Callable
import pickle
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from tests.support import planted
import tff_partial
from tff_partial import algorithms
from tff_partial import splits
from tff_partial.data import client_files
from tff_partial.data import examples
from tff_partial.data import packing
from tff_partial.dp import clipping
from tff_partial.dp import privacy_plans
from tff_partial.exchange import messages
from tff_partial.model import models

layers = tf.keras.layers

_FILMS = ['Alien', 'Heat', 'Up']
_TEXTS = layers.TextVectorization(output_sequence_length=3, name='words')
_TEXTS.adapt(['so bad', 'bad'])  # 2 is 'bad', the more frequent one.
_SCALED = layers.Normalization(name='scaled')
_SCALED.adapt(np.array([[1.0], [3.0]]))  # Mean 2, variance 1.
_HALF = layers.Normalization(name='half', dtype='mixed_bfloat16')
_HALF.adapt(np.array([[1.0], [3.0]]))


def _chain(
  first: Callable[[], layers.Layer] | None,
  dtype: tf.DType,
  shape: tuple[int, ...] = (),
  mean: bool = False,
) -> Callable[[], tf.keras.Model]:
  """A model whose first layer may be one that is lifted off."""

  def build() -> tf.keras.Model:
    inputs = tf.keras.Input(shape, dtype=dtype)
    hidden = first()(inputs) if first else inputs
    if hidden.dtype == tf.int64:
      hidden = layers.Embedding(5, 2, mask_zero=mean, name='table')(hidden)
      end = layers.GlobalAveragePooling1D() if mean else layers.Flatten()
      hidden = end(hidden)
    return tf.keras.Model(inputs, layers.Dense(1, name='own')(hidden))

  return build


def _from(
  build: Callable[[], tf.keras.Model], local: str | None = 'own'
) -> models.PartialModel:
  return tff_partial.from_keras(build, local=local, loss='mse')


def _packed(model: models.PartialModel, inputs: Any) -> np.ndarray:
  """What a client's inputs become."""
  fields = {'x': inputs, 'y': np.zeros([len(inputs), 1], np.float32)}
  clients = packing.pack({'ann': fields}, model.example_spec)
  (client,) = clients.cohort(['ann'], np.zeros([1, 2], np.int32))
  return np.asarray(client['examples']['x'])[: len(inputs)]


def _films() -> layers.Layer:
  return layers.StringLookup(vocabulary=_FILMS, name='film')


_KINDS = {
  'strings': (_chain(_films, tf.string), ['Heat', 'Jaws'], [2, 0]),
  'integers': (
    _chain(lambda: layers.IntegerLookup(vocabulary=[50, 70]), tf.int64),
    [70, 8],
    [2, 0],
  ),
  'texts': (
    _chain(lambda: _TEXTS, tf.string),
    ['So BAD!', 'bad as bad gets'],
    [[3, 2, 0], [2, 1, 2]],
  ),
  'texts of any length': (
    _chain(
      lambda: layers.TextVectorization(vocabulary=['bad', 'good']),
      tf.string,
      mean=True,
    ),
    ['good', 'bad, so bad'],
    [[3, 0, 0], [2, 1, 2]],
  ),
  'several hot': (
    _chain(
      lambda: layers.StringLookup(
        vocabulary=_FILMS, num_oov_indices=0, output_mode='multi_hot'
      ),
      tf.string,
      (2,),
    ),
    [['Up', 'Up'], ['Heat', 'Alien']],
    [[0, 0, 1], [1, 1, 0]],
  ),
  'statistics': (
    _chain(lambda: _SCALED, tf.float32, (1,)),
    [[5.0], [1.0]],
    [[3.0], [-1.0]],
  ),
}


@pytest.mark.parametrize('kind', _KINDS)
def test_examples_pass_through_the_first_layer_once(kind):
  build, raw, expected = _KINDS[kind]
  model = _from(build, local=None)
  assert _packed(model, np.array(raw)).tolist() == expected
  assert pickle.loads(pickle.dumps(model.example_spec)).lifted == (
    model.example_spec.lifted
  )
  weights = model.initial_weights('global', [0, 1])
  predicted, _ = model.predict(
    {'global': weights},
    {},
    tf.constant(expected, model.example_spec['x'].dtype),
    training=False,
    seed=[0, 0],
  )
  whole = model.to_keras(weights)
  np.testing.assert_array_equal(predicted, whole(tf.constant(raw)))


_RATED = {
  'ann': (['Heat', 'Up', 'Alien', 'Up'], [1.0, 2.0, 3.0, 2.0]),
  'bob': (['Jaws', 'Heat', 'Heat', 'Alien'], [0.0, 2.0, 1.0, 4.0]),
}
_IDS = {'Jaws': 0, 'Alien': 1, 'Heat': 2, 'Up': 3}


def _clients(spec: examples.ExampleSpec, as_ids: bool = False) -> Any:
  clients = {}
  for client, (films, ratings) in _RATED.items():
    inputs = [_IDS[film] for film in films] if as_ids else films
    clients[client] = inputs, np.array(ratings, np.float32)[:, np.newaxis]
  return packing.pack(clients, spec)


@pytest.mark.slow
@pytest.mark.parametrize('runtime', ['no jit', 'native'])
def test_trains_as_the_rest_of_the_model_on_integers(runtime):
  found = []
  for first, dtype in ((_films, tf.string), (None, tf.int64)):
    process = algorithms.build_fed_recon(
      _from(_chain(first, dtype)), reconstruct=tff_partial.Phase(batch_size=2)
    )
    clients = _clients(process.example_spec, as_ids=first is None)
    with planted.RUNTIMES[runtime]():
      result = tff_partial.train(
        process, clients, rounds=2, clients_per_round=2
      )
    found.append((result, clients))
  (result, clients), (plain, plain_clients) = found
  planted.assert_same(
    result.weights.trainable['global'], plain.weights.trainable['global']
  )
  if runtime == 'native':
    return
  own = tff_partial.personalise(result, clients, 'bob')
  rest = tff_partial.personalise(plain, plain_clients, 'bob')
  names = np.array(list(_IDS))
  expected = rest.predict(np.arange(4), verbose=0)
  np.testing.assert_array_equal(own.predict(names, verbose=0), expected)
  predictor = tff_partial.Predictor(result, clients)
  np.testing.assert_allclose(
    predictor.predict('bob', names), expected, rtol=1e-6
  )
  (best,) = tff_partial.top_n(own, names, 1)
  assert best.candidate == names[np.argmax(expected)]


@pytest.mark.slow
def test_texts_of_several_lengths_may_be_predicted_together():
  build, _, _ = _KINDS['texts of any length']
  process = algorithms.build_fed_recon(
    _from(build), reconstruct=tff_partial.Phase(batch_size=2)
  )
  texts = {'ann': ['good', 'so bad'], 'bob': ['bad, so bad', 'so good', 'bad']}
  clients = packing.pack(
    {name: (rows, np.ones([len(rows), 1])) for name, rows in texts.items()},
    process.example_spec,
    lengths=[2, 3],
  )
  with tff_partial.runtimes.cohort(jit=False):
    trained = tff_partial.train(process, clients, rounds=2, clients_per_round=2)
    own = tff_partial.personalise(trained, clients, 'bob')
  said = np.array(texts['bob'])
  one_by_one = [own.predict(said[[n]], verbose=0)[0] for n in range(3)]
  together = own.predict(said, verbose=0)
  np.testing.assert_allclose(together, one_by_one, rtol=1e-6)


@pytest.mark.slow
def test_sources_of_clients_agree(tmp_path):
  model = _from(_chain(_films, tf.string))
  spec = model.example_spec
  packed = _clients(spec)
  rows = [
    (client, film, rating)
    for client, (films, ratings) in _RATED.items()
    for film, rating in zip(films, ratings, strict=True)
  ]
  frame = pd.DataFrame(rows, columns=['user', 'film', 'rating'])
  of_frame = tff_partial.from_pandas(
    frame, spec, client_id='user', inputs='film', labels='rating'
  )
  assert of_frame.fingerprint() == packed.fingerprint()
  of_data_sets = packing.pack(
    {
      client: tf.data.Dataset.from_tensor_slices(
        (films, np.array(ratings, np.float32)[:, np.newaxis])
      )
      for client, (films, ratings) in _RATED.items()
    },
    spec,
  )
  assert of_data_sets.fingerprint() == packed.fingerprint()
  fields = {
    client: {'x': films, 'y': ratings}
    for client, (films, ratings) in _RATED.items()
  }
  client_files.write_clients(tmp_path / 'clients', fields.items(), spec)
  opened = client_files.open_clients(tmp_path / 'clients', spec)
  seeds = np.zeros([2, 2], np.int32)
  for one, other in zip(
    packed.cohort(list(_RATED), seeds),
    opened.cohort(list(_RATED), seeds),
    strict=True,
  ):
    np.testing.assert_array_equal(one['examples']['x'], other['examples']['x'])
  evaluation = algorithms.build_fed_recon_eval(
    model, split=splits.by_mark('is_query')
  )
  marked = packing.pack(fields, evaluation.example_spec, query=fields)
  (ann,) = marked.cohort(['ann'], seeds[:1])
  assert ann['examples']['x'][:8].tolist() == [2, 3, 1, 3] * 2


def test_inputs_keep_their_names_and_a_trained_model_gives_its_values():
  def build() -> tf.keras.Model:
    age = tf.keras.Input([1], name='age')
    film = tf.keras.Input([], dtype=tf.string, name='film')
    lookup = layers.StringLookup(vocabulary=_FILMS)
    rows = layers.Embedding(lookup.vocabulary_size(), 2)
    joined = layers.Concatenate()([_SCALED(age), rows(lookup(film))])
    return tf.keras.Model([film, age], layers.Dense(1, name='own')(joined))

  trained = build()
  model = tff_partial.from_keras(
    build, local='own', loss='mse', initial_weights=trained
  )
  spec = model.example_spec
  assert {name: each.dtype for name, each in spec['x'].items()} == {
    'film': tf.int64,
    'age': tf.float32,
  }
  inputs = {'film': np.array(['Up', 'Jaws']), 'age': np.array([[1.0], [4.0]])}
  clients = packing.pack({'ann': {**inputs, 'y': [[1.0], [2.0]]}}, spec)
  (ann,) = clients.cohort(['ann'], np.zeros([1, 2], np.int32))
  packed = ann['examples']['x']
  assert packed['film'].tolist() == [3, 0]
  assert packed['age'].tolist() == [[-1.0], [2.0]]
  same = model.to_keras(model.given_values)
  np.testing.assert_array_equal(
    same.predict(inputs, verbose=0), trained.predict(inputs, verbose=0)
  )


def _read_twice() -> tf.keras.Model:
  film = tf.keras.Input([1], dtype=tf.string)
  numbers = _films()(film), layers.Hashing(4, name='hashed')(film)
  rows = [layers.Embedding(4, 1)(each) for each in numbers]
  return tf.keras.Model(film, layers.Add()(rows))


@pytest.mark.parametrize(
  ('build', 'message'),
  [
    (
      _chain(lambda: layers.StringLookup(name='film'), tf.string),
      r"'film' \(StringLookup\) was not adapted. Give what it would learn, "
      r'`StringLookup\(vocabulary=\[...\]\)`, or call `adapt`',
    ),
    (
      _chain(lambda: layers.Normalization(name='age'), tf.float32, (1,)),
      r"'age' \(Normalization\) was not adapted.*mean=...",
    ),
    (
      _chain(
        lambda: layers.TextVectorization(
          vocabulary=['a'], ragged=True, name='text'
        ),
        tf.string,
        mean=True,
      ),
      r"'text' \(TextVectorization\) is one with `ragged`, ",
    ),
    (
      _chain(
        lambda: layers.StringLookup(
          vocabulary=['a'], idf_weights=[1.0], output_mode='tf_idf', name='t'
        ),
        tf.string,
        (1,),
      ),
      "'t' .*has the output mode 'tf_idf'.*'multi_hot'",
    ),
    (
      _chain(lambda: _HALF, tf.float32, (1,)),
      r"'half' \(Normalization\) returns bfloat16.*dtype='float32'",
    ),
    (_read_twice, r"'film' \(StringLookup\) is also read by \['hashed'\]"),
  ],
)
def test_layers_that_cannot_be_lifted_are_refused(build, message):
  with pytest.raises(models.ModelError, match=message):
    tff_partial.from_keras(build, loss='mse')


def test_specs_of_inputs_are_refused_beside_a_first_layer():
  with pytest.raises(models.ModelError, match='Leave `inputs` out'):
    tff_partial.from_keras(
      _chain(_films, tf.string), loss='mse', inputs=tf.TensorSpec([], tf.string)
    )


def test_client_data_that_a_layer_cannot_read_are_refused():
  model = _from(
    _chain(
      lambda: layers.StringLookup(
        vocabulary=_FILMS, num_oov_indices=0, name='film'
      ),
      tf.string,
    )
  )
  with pytest.raises(
    examples.ClientDataError,
    match=r"Client 'ann', x: the layer 'film' \(StringLookup\) cannot read it",
  ):
    _packed(model, ['Heat', 'Jaws'])
  with pytest.raises(
    examples.ClientDataError, match='expected values of type string'
  ):
    _packed(model, [1, 2])


def test_clients_of_another_vocabulary_are_refused():
  clients = _clients(_from(_chain(_films, tf.string)).example_spec)
  other = _from(
    _chain(lambda: layers.StringLookup(vocabulary=['Jaws']), tf.string)
  )
  with pytest.raises(examples.ClientDataError, match='with another vocabulary'):
    clients.check(other.example_spec)


@pytest.mark.slow
def test_a_private_run_names_what_layers_have_learned():
  plan = privacy_plans.plan(
    clipping.FixedClip(1.0),
    noise_multiplier=1.0,
    delta=1e-3,
    population=2,
    rounds=1,
    clients_per_round=1,
  )
  process = algorithms.build_fed_recon(
    _from(_chain(_films, tf.string)),
    aggregation=tff_partial.Aggregation(
      plan.mean(noise_seed=1), client_weighting=messages.ClientWeighting.UNIFORM
    ),
  )
  with tff_partial.runtimes.cohort(jit=False):
    result = tff_partial.train(
      process,
      _clients(process.example_spec),
      rounds=1,
      clients_per_round=1,
      privacy=privacy_plans.PrivacyLedger(plan, simulation=True),
    )
  assert result.privacy is not None
  assert result.privacy['assumed_public'] == [
    'population',
    'vocabulary of the layer film',
  ]
