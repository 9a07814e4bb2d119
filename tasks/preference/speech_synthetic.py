"""Invented recordings, by speakers whose voices differ.

A speaker has a pitch and a length of the vocal tract; the shorter, the higher
all formants. A word glides from one vowel to another. The sound is the sum of
the harmonics of the pitch, each louder the nearer it is to a formant, and a
little noise. Takes of a word differ in length, pitch, loudness and formants by
a few per cent, less than speakers do.
"""

import numpy as np

from tasks.preference import speech_recordings
from tff_partial import random_bits

_RATE = 8_000
# Means of the first three formants of men in Hertz (Peterson and Barney, 1952):
# heed, hid, head, had, hod, hawed, hood, who'd, heard.
_VOWELS = np.array(
  [
    [270, 2290, 3010],
    [390, 1990, 2550],
    [530, 1840, 2480],
    [660, 1720, 2410],
    [730, 1090, 2440],
    [570, 840, 2410],
    [440, 1020, 2240],
    [300, 870, 2240],
    [490, 1350, 1690],
  ]
)
_BANDWIDTHS = np.array([80.0, 110.0, 160.0])
_LOUDNESS = np.array([1.0, 0.5, 0.25])
_PITCHES, _TRACTS = (90.0, 240.0), (0.85, 1.2)
_SECONDS = (0.3, 0.6)
# Formant updates per second; loudness is interpolated between them.
_SETTINGS = 50


def generate(
  num_speakers: int = 6, num_words: int = 5, num_takes: int = 20, seed: int = 0
) -> speech_recordings.Corpus:
  """Invent recordings at 8 kHz of each word by each speaker in each take."""
  choose = random_bits.generator(seed, 'speech')
  pitches = np.geomspace(*_PITCHES, num_speakers)
  tracts = choose.permutation(np.geomspace(*_TRACTS, num_speakers))
  words = [choose.choice(_VOWELS, 2, replace=False) for _ in range(num_words)]
  return speech_recordings.build_corpus(
    'synthetic',
    _RATE,
    [
      speech_recordings.Recording(
        f'speaker{speaker}',
        f'word{word}',
        take,
        _speak(
          pitches[speaker],
          words[word] / tracts[speaker],
          random_bits.generator(seed, 'take', speaker, word, take),
        ),
      )
      for speaker in range(num_speakers)
      for word in range(num_words)
      for take in range(num_takes)
    ],
  )


def _speak(
  pitch: float, formants: np.ndarray, vary: np.random.Generator
) -> np.ndarray:
  """Synthesize two vowels, `[2, 3]` formants, as float32 `[samples]`."""
  number = round(_RATE * vary.uniform(*_SECONDS))
  pitch *= vary.normal(1.0, 0.03)
  formants = formants * vary.normal(1.0, 0.02, formants.shape)
  # The pitch falls by a tenth, as at the end of a sentence.
  phase = 2 * np.pi * np.cumsum(pitch * np.linspace(1.05, 0.95, number)) / _RATE
  harmonics = np.arange(1, int(_RATE / 2 / (1.05 * pitch)) + 1)
  times = np.arange(number)
  settings = np.linspace(0, number, 1 + number * _SETTINGS // _RATE)
  way = np.linspace(0, 1, len(settings))[:, np.newaxis]
  glide = (1 - way) * formants[0] + way * formants[1]
  distances = pitch * harmonics[:, np.newaxis, np.newaxis] - glide
  loudness = (_LOUDNESS / (1 + (distances / _BANDWIDTHS) ** 2)).sum(axis=-1)
  sound = sum(
    np.interp(times, settings, loudness[place]) * np.sin(harmonic * phase)
    for place, harmonic in enumerate(harmonics)
  )
  sound *= np.hanning(number) * vary.uniform(0.2, 0.8) / np.abs(sound).max()
  return (sound + vary.normal(0.0, 0.003, number)).astype(np.float32)
