"""Exports of models that begin with lookups: strings, or numbers and a file."""

import json

import numpy as np
import pytest
import tensorflow as tf

import tff_partial
from tff_partial.exporting import lookups
from tff_partial.exporting import running
from tff_partial.exporting.errors import ExportError
from tff_partial.model import models

layers = tf.keras.layers

_SCALED = layers.Normalization(name='scaled')
_SCALED.adapt(np.array([[1.0], [3.0]]))  # Mean 2, variance 1.


def _build(length: int | None) -> tf.keras.Model:
  film = tf.keras.Input([], dtype=tf.string, name='film')
  text = tf.keras.Input([], dtype=tf.string, name='text')
  age = tf.keras.Input([1], name='age')
  films = layers.StringLookup(vocabulary=['Alien', 'Heat'], name='films')
  words = layers.TextVectorization(
    vocabulary=['bad', 'good'], output_sequence_length=length, name='words'
  )
  of_film = layers.Embedding(films.vocabulary_size(), 2)(films(film))
  of_text = layers.Embedding(words.vocabulary_size(), 1, mask_zero=not length)(
    words(text)
  )
  as_one = layers.Flatten() if length else layers.GlobalAveragePooling1D()
  joined = [of_film, as_one(of_text), _SCALED(age)]
  rating = layers.Dense(1, name='own')(layers.Concatenate()(joined))
  return tf.keras.Model([film, text, age], rating)


_LENGTHS = [2, pytest.param(None, marks=pytest.mark.slow)]


@pytest.fixture(name='model', scope='module', params=_LENGTHS)
def fixture_model(request) -> models.PartialModel:
  return tff_partial.from_keras(
    lambda: _build(request.param), local='own', loss='mse'
  )


def test_files_of_vocabularies_have_a_line_for_each_id(model, tmp_path):
  lifted = model.example_spec.lifted
  lookups.write(lifted, lookups.tables(lifted), tmp_path)
  assert (tmp_path / 'x_film.txt').read_text() == '[UNK]\nAlien\nHeat\n'
  assert (tmp_path / 'x_text.txt').read_text() == '\n[UNK]\nbad\ngood\n'
  described = json.loads((tmp_path / 'lookups.json').read_text())
  assert list(described) == ['x_film', 'x_text']  # An age is computed with.
  text = described['x_text']
  assert text['vocabulary'] == 'x_text.txt'
  assert [text['shape']] == [model.example_spec['x']['text'].shape.as_list()]
  assert text['standardize'] == 'lower_and_strip_punctuation'


def test_values_of_two_lines_are_refused():
  def build() -> tf.keras.Model:
    film = tf.keras.Input([], dtype=tf.string)
    numbers = layers.StringLookup(vocabulary=['a', 'b\nc'], name='f')(film)
    return tf.keras.Model(film, layers.Embedding(3, 1)(numbers))

  model = tff_partial.from_keras(build, loss='mse')
  with pytest.raises(ExportError, match=r"layer 'f' has 'b\\nc', but its file"):
    lookups.tables(model.example_spec.lifted)


@pytest.mark.slow
def test_devices_read_strings_or_their_numbers(model, tmp_path):
  shared = model.initial_weights('global', [0, 1])
  steps = tff_partial.Phase(batch_size=2, epochs=2)
  exported = tff_partial.export(
    model, shared, tmp_path / 'exported', reconstruct=steps, num_support=4
  )
  ages = np.array([[1.0], [2.0], [3.0], [5.0]], np.float32)
  # The mean of no steps is no number: an empty text needs a fixed length.
  is_open = model.example_spec['x']['text'].shape[0] is None
  second, ids = ('so', [1, 0]) if is_open else ('', [0, 0])
  texts = {
    'x_film': ['Heat', 'Up', 'Alien', 'Alien'],
    'x_text': ['Good, BAD!', second, 'so bad', 'good'],
    'x_age': ages,
  }
  numbers = {
    'x_film': np.array([2, 0, 1, 1]),
    'x_text': np.array([[3, 2], ids, [1, 2], [3, 0]]),
    'x_age': ages,
  }
  labels = {'y': ages, 'count': np.int32(4)}
  own, predicted = {}, {}
  for form, inputs in (('saved_model', texts), ('tflite', numbers)):
    run = running.load(exported.paths[form])
    own[form] = run['reconstruct'](**inputs, **labels)
    predicted[form] = run['predict'](**inputs, **own[form])['predictions']
  for name, value in own['saved_model'].items():
    np.testing.assert_allclose(own['tflite'][name], value, atol=1e-6)
  found = predicted['saved_model']
  np.testing.assert_allclose(predicted['tflite'], found, atol=1e-6)
  local = {exported.local[n]: v for n, v in own['saved_model'].items()}
  keras_model = model.to_keras(shared, local)
  whole = {name.removeprefix('x_'): np.array(texts[name]) for name in texts}
  expected = keras_model.predict(whole, verbose=0)
  np.testing.assert_allclose(found, expected, atol=1e-6)
  keras_model.save(tmp_path / 'keras')
  again = tf.keras.models.load_model(tmp_path / 'keras')
  np.testing.assert_array_equal(again.predict(whole, verbose=0), expected)
  film = exported.signatures['predict']['inputs']['x_film']
  assert film == {'dtype': 'string', 'shape': [None]}
  assert (exported.folder / 'lookups.json').exists()
