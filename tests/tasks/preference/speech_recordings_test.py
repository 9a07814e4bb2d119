"""Laws of recordings: wav files, their spectrograms, and voices between two."""

import collections
import itertools
import os
import pathlib
import wave

import numpy as np
import pytest
from scipy import spatial
from sklearn import discriminant_analysis

from tasks.errors import DataError
from tasks.errors import OptionError
from tasks.preference import speech_recordings
from tasks.preference import speech_spectrograms
from tasks.preference import speech_synthetic
from tasks.preference import speech_voices
from tasks.preference.speech_recordings import Recording

_REAL = os.environ.get('TFF_PARTIAL_DATA_DIR')
_RATE = 8_000


def _write(
  path: pathlib.Path,
  samples=(0, 100, -100, 200),
  *,
  rate: int = _RATE,
  width: int = 2,
  channels: int = 1,
) -> pathlib.Path:
  path.parent.mkdir(parents=True, exist_ok=True)
  with wave.open(str(path), 'wb') as file:
    file.setnchannels(channels)
    file.setsampwidth(width)
    file.setframerate(rate)
    dtype = {1: 'u1', 2: '<i2', 3: 'V3'}[width]
    file.writeframes(np.array(samples).astype(dtype).tobytes())
  return path


def _tone(hertz: float, seconds: float = 0.5) -> np.ndarray:
  times = np.arange(round(seconds * _RATE)) / _RATE
  return np.sin(2 * np.pi * hertz * times).astype(np.float32)


def _corpus(speakers, words, takes: int) -> speech_recordings.Corpus:
  """Noise, a tenth of a second each, which tells all recordings apart."""
  draw = np.random.default_rng(0)
  recordings = [
    Recording(*place, draw.normal(0, 0.1, _RATE // 10).astype('f4'))
    for place in itertools.product(speakers, words, range(takes))
  ]
  return speech_recordings.build_corpus('noise', _RATE, recordings)


# ---- files -------------------------------------------------------------------


def test_samples_lie_between_minus_one_and_one(tmp_path):
  path = _write(tmp_path / 'a.wav', [0, 16384, -32768])
  samples, rate = speech_recordings.read_wav(path)
  assert (samples.dtype, rate) == (np.float32, _RATE)
  np.testing.assert_array_equal(samples, [0, 0.5, -1])
  path = _write(tmp_path / 'b.wav', [128, 192, 0], width=1, rate=16_000)
  samples, rate = speech_recordings.read_wav(path)
  assert rate == 16_000
  np.testing.assert_array_equal(samples, [0, 0.5, -1])


def test_channels_are_averaged(tmp_path):
  path = _write(tmp_path / 'a.wav', [0, 16384, -16384, 16384], channels=2)
  samples, _ = speech_recordings.read_wav(path)
  np.testing.assert_array_equal(samples, [0.25, 0])


def test_digits_are_found_from_any_folder_on_the_way(tmp_path):
  folder = tmp_path / 'speech' / 'fsdd' / 'recordings'
  for name in ('7_theo_10', '7_theo_2', '0_lucas_0', '1_theo_2'):
    _write(folder / f'{name}.wav')
  (folder / '._7_theo_2.wav').write_bytes(b'of another system')
  (folder / 'notes.txt').write_text('of somebody')
  for start in (tmp_path, tmp_path / 'speech', folder.parent, folder):
    corpus = speech_recordings.load(start)
    assert (corpus.name, corpus.rate) == ('fsdd', _RATE)
    # By speaker, take as a number, and word.
    assert [(r.speaker, r.take, r.word) for r in corpus.recordings] == [
      ('lucas', 0, '0'),
      ('theo', 2, '1'),
      ('theo', 2, '7'),
      ('theo', 10, '7'),
    ]


def test_a_speaker_may_be_a_folder(tmp_path):
  _write(tmp_path / 'speech' / 'ada' / 'good_morning_3.wav')
  _write(tmp_path / 'speech' / 'ada' / 'arctic-a0001.WAV')
  _write(tmp_path / 'speech' / 'bob' / 'good_morning_0.wav')
  corpus = speech_recordings.load(tmp_path)
  assert corpus.speakers == ['ada', 'bob']
  assert [(r.speaker, r.word, r.take) for r in corpus.recordings] == [
    ('ada', 'arctic-a0001', 0),
    ('ada', 'good_morning', 3),
    ('bob', 'good_morning', 0),
  ]


def _damage(path: pathlib.Path, place: int, value: bytes) -> None:
  """Of 44 bytes of header and 8 of sound; the format is from byte 20 on."""
  data = bytearray(_write(path, [1, 2, 3, 4]).read_bytes())
  assert len(data) == 52
  data[place : place + len(value)] = value
  path.write_bytes(data)


def _write_two(path: pathlib.Path) -> None:
  _write(path.with_name('7_ada_0.wav'))
  _write(path, rate=16_000)


@pytest.mark.parametrize(
  ('write', 'said'),
  [
    (lambda path: path.parent.rmdir(), 'data: there is no such folder'),
    # Without sound.
    (
      lambda path: path.with_name('speech').mkdir(),
      'speech: there are no wav files',
    ),
    *(
      (
        lambda path, damage=damage: _damage(path, *damage),
        '7_theo_0.wav: no whole wav file .* Fetch it again',
      )
      for damage in ((0, b'A word'), (22, b'\0'))
    ),
    (
      lambda path: _write(path, [b'abc'], width=3),
      'samples of type int32.* convert it',
    ),
    (_write_two, 'theo_0.wav: 16000 samples a second, but .*ada_0.* 8000'),
  ],
)
def test_other_folders_and_files_are_refused(tmp_path, write, said):
  with pytest.raises(DataError, match='no data folder is named.*synthetic'):
    speech_recordings.load(None)
  (tmp_path / 'data').mkdir()
  write(tmp_path / 'data' / '7_theo_0.wav')
  with pytest.raises(DataError, match=said):
    speech_recordings.load(tmp_path / 'data')


# ---- parts -------------------------------------------------------------------


@pytest.mark.slow
def test_a_tenth_is_for_tests_the_first_takes():
  words = [str(digit) for digit in range(10)]
  divided = speech_recordings.divide(_corpus(['ada', 'bob'], words, 50))
  for speaker in ('ada', 'bob'):
    takes = {
      part: {r.take for r in divided[speaker, part]}
      for part in ('train', 'validation', 'test')
    }
    assert takes['test'] == set(range(5))  # As its publishers ask for.
    assert takes['validation'] == set(range(5, 10))
    assert takes['train'] == set(range(10, 50))


def test_a_speaker_with_too_few_recordings_is_refused():
  full = _corpus(['ada', 'bob'], ['yes'], 20)
  few = speech_recordings.build_corpus('few', _RATE, full.recordings[:-1])
  with pytest.raises(DataError, match="few: speaker 'bob' has 19 .* 20 are"):
    speech_recordings.divide(few)


# ---- spectrograms ------------------------------------------------------------


def _middle_of_band(band: int) -> float:
  """In Hertz: 41 equal steps of mel lead from 80 Hz to 4 kHz."""
  low, high = (1127 * np.log(1 + f / 700) for f in (80, 4_000))
  mel = low + (high - low) * (band + 1) / 41
  return 700 * (np.exp(mel / 1127) - 1)


@pytest.mark.parametrize('band', [0, 7, 20, 39])
def test_a_pure_tone_lights_its_band(band):
  found = speech_spectrograms.log_mel(_tone(_middle_of_band(band)), _RATE)
  assert found.shape == (25, 40)
  inner = found[1:-3]  # Windows that are full of it.
  assert (inner.argmax(axis=1) == band).all()
  assert inner[:, band].min() > -1  # Alike at all times, as loud as anything.
  far = np.abs(np.arange(40) - band) > 3
  assert inner[:, far].max() < -20


def test_loudness_is_not_seen():
  tone = _tone(1_000.0)
  np.testing.assert_allclose(
    speech_spectrograms.log_mel(tone, _RATE),
    speech_spectrograms.log_mel(tone / 4, _RATE),
    atol=0.01,
  )


def test_a_frame_begins_every_20_milliseconds():
  for samples, frames in [(1, 1), (160, 1), (161, 2), (50_000, 48)]:
    noise = np.random.default_rng(0).normal(size=samples).astype(np.float32)
    # And the same again.
    found, again = (speech_spectrograms.log_mel(noise, _RATE) for _ in range(2))
    assert found.shape == (frames, 40)
    np.testing.assert_array_equal(found, again)


def test_a_picture_is_low_to_high_and_left_to_right():
  decibels = np.full([3, 40], -80.0)
  decibels[0, 0], decibels[2, 39], decibels[1, 5] = 0, -40, -79.9
  picture = speech_spectrograms.to_picture(decibels)
  assert (picture.shape, picture.dtype) == ((40, 48), np.uint8)
  assert (picture[0, 0], picture[39, 2]) == (255, 128)
  assert picture.astype(int).sum() == 255 + 128
  assert speech_spectrograms.to_picture(np.zeros([60, 40])).min() == 255


# ---- voices ------------------------------------------------------------------


def test_speakers_come_first_then_the_middles_of_pairs():
  voices = speech_voices.choose('abcdef', 20)
  assert [str(v) for v in voices[:8]] == [
    *'abcdef',
    '0.5 a + 0.5 b',
    '0.5 b + 0.5 c',
  ]
  speakers = [s for v in voices[6:] for s in (v.first, v.second)]
  assert sorted(map(speakers.count, 'abcdef')) == [4, 4, 5, 5, 5, 5]


@pytest.mark.parametrize('number', [5, 52])
def test_other_numbers_of_voices_are_refused(number):
  with pytest.raises(OptionError, match=f'6 to 51 voices, not {number}'):
    speech_voices.choose('abcdef', number)


def _words(*lengths: int) -> list[np.ndarray]:
  draw = np.random.default_rng(1)
  return [
    speech_spectrograms.from_loudest(draw.uniform(-60, 0, [length, 40]))
    for length in lengths
  ]


def test_no_other_path_is_shorter():
  ones, others = _words(5, 6), _words(4, 3)[::-1]
  paths = speech_voices.align(ones, others)

  def centred(word):
    return word - word.mean(axis=0)

  for one, other, path in zip(ones, others, paths, strict=True):
    distances = spatial.distance.cdist(centred(one), centred(other))

    def least(row, column, distances=distances):
      before = [
        least(row - down, column - right)
        for down, right in ((1, 1), (1, 0), (0, 1))
        if row >= down and column >= right
      ]
      return distances[row, column] + min(before, default=0)

    assert set(map(tuple, np.diff(path, axis=0))) <= {(1, 1), (1, 0), (0, 1)}
    taken = distances[path[:, 0], path[:, 1]].sum()
    expected = least(len(one) - 1, len(other) - 1)
    assert taken == pytest.approx(expected, rel=1e-4)


def test_a_mix_lies_between_its_words():
  # Frame by frame, of words that go together one by one.
  rise = np.array([[-60, -60], [0, -60], [-60, 0]], np.float32)
  fall = rise - np.array([[0, 0], [0, -10], [0, 0]], np.float32)
  (mixed,) = speech_voices.mix([rise], [fall], 0.25)
  np.testing.assert_allclose(mixed, 0.75 * rise + 0.25 * fall, atol=1e-4)
  # In length.
  (word,) = _words(20)
  (mixed,) = speech_voices.mix([word], [np.repeat(word, 2, axis=0)], 0.25)
  assert len(mixed) == 25


def test_nothing_crosses_parts():
  corpus = _corpus(['ada', 'bob'], ['yes', 'no'], 20)
  spoken = speech_voices.speak(corpus, 3)
  np.testing.assert_array_equal(spoken.images.labels, np.repeat(range(3), 40))
  counts = collections.Counter(spoken.part_of.tolist())
  assert counts == {'train': 3 * 30, 'validation': 3 * 5, 'test': 3 * 5}
  # Another noise in a recording that is for tests: bob's first one.
  changed = list(corpus.recordings)
  said = [(r.speaker, r.word, r.take) for r in changed]
  place = said.index(('bob', 'no', 0))
  changed[place] = Recording(*said[place], changed[place].samples[::-1] ** 2)
  other = speech_voices.speak(
    speech_recordings.build_corpus('other', _RATE, changed), 3
  )
  differs = np.flatnonzero(
    (spoken.images.pixels != other.images.pixels).any(axis=(1, 2))
  )
  # Seen by bob's voice, and by the one between both.
  assert spoken.images.labels[differs].tolist() == [1, 2]
  assert spoken.part_of[differs].tolist() == ['test', 'test']


def test_speakers_without_common_words_have_no_voice_between_them():
  ones = _corpus(['ada'], ['yes'], 20).recordings
  others = _corpus(['bob'], ['no'], 20).recordings
  corpus = speech_recordings.build_corpus('own', _RATE, [*ones, *others])
  assert len(speech_voices.speak(corpus, 2).images) == 40
  said = 'voice 0.5 ada . 0.5 bob: .* have 0 .* as many voices as'
  with pytest.raises(DataError, match=said):
    speech_voices.speak(corpus, 3)


def _recognised(spoken: speech_voices.Utterances) -> float:
  """The share of test utterances whose voice a linear model finds out.

  It knows of each band the mean and the deviation over time.
  """
  pixels = spoken.images.pixels.astype(np.float32)
  seen = [p[:, p.any(axis=0)] for p in pixels]
  known = np.stack(
    [np.concatenate([p.mean(axis=1), p.std(axis=1)]) for p in seen]
  )
  labels, is_test = spoken.images.labels, spoken.part_of == 'test'
  model = discriminant_analysis.LinearDiscriminantAnalysis()
  model.fit(known[~is_test], labels[~is_test])
  return model.score(known[is_test], labels[is_test])


@pytest.mark.slow
def test_invented_voices_can_be_told_apart():
  corpus, again = (
    speech_synthetic.generate(num_speakers=4, num_words=3, num_takes=10)
    for _ in range(2)
  )
  for one, other in zip(corpus.recordings, again.recordings, strict=True):
    np.testing.assert_array_equal(one.samples, other.samples)
    assert np.abs(one.samples).max() <= 1
  # By chance it would be one of ten.
  assert _recognised(speech_voices.speak(corpus, 10)) > 0.8


@pytest.mark.slow
@pytest.mark.skipif(not _REAL, reason='needs TFF_PARTIAL_DATA_DIR')
def test_the_voices_of_spoken_digits():
  corpus = speech_recordings.load(_REAL)
  assert corpus.name == 'fsdd'
  assert len(corpus.recordings) == 3_000
  assert len(corpus.speakers) == 6
  spoken = speech_voices.speak(corpus, 20)
  np.testing.assert_array_equal(np.bincount(spoken.images.labels), [500] * 20)
  assert (spoken.part_of == 'test').sum() == 20 * 50
  # By chance it would be one of 20.
  assert _recognised(spoken) > 0.8
