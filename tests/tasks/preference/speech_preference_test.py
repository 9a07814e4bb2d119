"""Laws of the task of preferred voices, and of its encoder."""

import os

import numpy as np
import pytest
import tensorflow as tf

from tasks.errors import OptionError
from tasks.preference import models as preference_models
from tasks.preference import preferences
from tasks.preference import speech as speech_preference
from tasks.preference import speech_models
from tasks.task import Data
import tff_partial

_REAL = os.environ.get('TFF_PARTIAL_DATA_DIR')


def _load(data: str = 'synthetic', seed: int = 0, **options):
  chosen = speech_preference.SpeechOptions(**options)
  return chosen.load(Data(data=data, data_dir=_REAL), seed)


@pytest.fixture(scope='module', name='task')
def fixture_task():
  return _load(num_voices=7, num_users=30, embedding_size=40)


def test_the_paper_is_the_default():
  options = speech_preference.SpeechOptions()
  assert (options.shares, options.num_voices) == ('balanced', 20)
  balanced = speech_preference.shares_of('balanced', 20)
  assert preferences.numbers_of_users(900, balanced) == [45] * 20
  imbalanced = speech_preference.shares_of('imbalanced', 20)
  assert imbalanced == pytest.approx([0.2, *[0.04] * 4, 0.08, *[0.04] * 14])
  # As tables by prevalence need it: equal to the last bit.
  assert len(set(imbalanced)) == 3
  few = speech_preference.shares_of('imbalanced', 3)
  assert few == pytest.approx([0.2, 0.72, 0.08])


def test_parts_have_examples_of_their_own():
  kinds = np.tile(np.arange(4), 30)
  part_of = np.repeat(['train', 'validation', 'test'], 40)
  sizes = {'train': 8, 'validation': 4, 'test': 4}
  parts = preferences.draw(kinds, [1] * 4, sizes, part_of=part_of)
  for part, size in sizes.items():
    assert list(parts[part]) == [f'{kind}-0000' for kind in range(4)]
    for user, held in parts[part].items():
      assert len(set(held)) == size
      assert (part_of[held] == part).all()
      liked = kinds[held] == preferences.kind_liked_by(user)
      assert liked.sum() == size // 2


# ---- the model ---------------------------------------------------------------


def _outputs_of(encoder: tf.keras.Model, *kinds: str) -> list[tuple[int, ...]]:
  return [
    layer.output_shape[1:]
    for layer in encoder.layers
    if layer.name.split('_')[0] in kinds
  ]


def test_the_encoder_of_appendix_b_2():
  encoder = speech_models.build_encoder((200, 375), 2)
  # PyTorch names the channels first: 16 x 50 x 41, 32 x 7 x 6, 64 x 3 x 3.
  outputs = _outputs_of(encoder, 'normalization')
  assert outputs == [(50, 41, 16), (7, 6, 32), (3, 3, 64), (256,)]
  assert _outputs_of(encoder, 'flatten') == [(576,)]


def test_the_encoder_of_small_spectrograms():
  encoder = speech_models.build_encoder((40, 48), 2)
  outputs = _outputs_of(encoder, 'convolution', 'pool')
  assert outputs == [(20, 16, 16), (8, 6, 32), (3, 3, 64)]
  assert _outputs_of(encoder, 'flatten') == [(576,)]
  assert encoder.output_shape == (None, 256)
  # Weights and biases; a scale and a shift of each normalized number.
  convolutions = (2 * 15 + 1) * 16 + (16 * 25 + 1) * 32 + (32 * 6 + 1) * 64
  dense = 577 * 256
  normalizations = 2 * (20 * 16 * 16 + 8 * 6 * 32 + 576 + 256)
  assert encoder.count_params() == convolutions + dense + normalizations
  assert not _outputs_of(encoder, 'activation')
  active = speech_models.build_encoder((40, 48), 2, 'relu')
  assert len(_outputs_of(active, 'activation')) == 3


def test_features_are_normalized():
  encoder = speech_models.build_encoder((40, 48), 1)
  images = np.random.default_rng(0).normal(size=[3, 40, 48, 1])
  features = encoder(images.astype(np.float32)).numpy()
  np.testing.assert_allclose(features.mean(axis=1), 0.0, atol=1e-5)
  np.testing.assert_allclose(features.std(axis=1), 1.0, atol=1e-3)


def test_the_head_sees_features_and_embedding():
  def build(size: int) -> tf.keras.Model:
    encoder = speech_models.build_encoder
    return preference_models.build_preference(
      (40, 48), 255, size, encoder=encoder
    )

  # Of the paper's 256 + 200.
  assert build(40).get_layer('head').input_shape == (None, 256 + 40)
  with pytest.raises(OptionError, match='41 numbers do not fit'):
    build(41)


# ---- the task ----------------------------------------------------------------


@pytest.mark.slow
def test_nobody_trains_on_what_is_tested(task):
  counts = task.counts
  assert counts['test_images_trained_on_by_somebody'] == 0.0
  assert counts['users'] == sum(counts['users_of_sub_populations']) == 30
  assert counts['voices'][0] == 'speaker0'
  assert counts['voices'][6] == '0.5 speaker0 + 0.5 speaker1'
  users = [counts[part]['users'] for part in ('train', 'validation', 'test')]
  assert users == [30, 30, 30]
  assert task.attributes['6-0002'] == '6'
  assert task.num_groups == len(task.shares) == 7


@pytest.mark.slow
def test_it_trains(task):
  model = task.model_with('own')
  process = tff_partial.algorithms.build_fed_recon(
    model, reconstruct=tff_partial.Phase(batch_size=10)
  )
  clients = task.clients('train', process.example_spec)
  with tff_partial.runtimes.cohort(jit=False):
    trained = tff_partial.train(process, clients, rounds=1, clients_per_round=2)
  assert np.isfinite(trained.train['loss'])


@pytest.mark.slow
@pytest.mark.parametrize(
  'options, expected',
  [
    ({'num_voices': 2}, '--set=speech_voices=2: give at least 3'),
    ({'num_voices': 52}, '--set=speech_voices: 6 speakers make 6 to 51'),
    ({'num_users': 19}, '--users=19: so few users cannot like all 20'),
    ({'shares': 'equal'}, 'shares=equal: choose one of balanced, imbalanced'),
  ],
)
def test_impossible_options_are_refused(options, expected):
  with pytest.raises(OptionError, match=expected):
    _load(**options)


@pytest.mark.slow
@pytest.mark.skipif(not _REAL, reason='needs TFF_PARTIAL_DATA_DIR')
def test_the_papers_users():
  task = _load('real', shares='imbalanced')
  counts = task.counts
  assert counts['users'] == 900
  assert counts['users_of_sub_populations'][:6] == [180, 36, 36, 36, 36, 72]
  assert counts['test_images_trained_on_by_somebody'] == 0.0
  assert counts['train']['images'] == 18_000
