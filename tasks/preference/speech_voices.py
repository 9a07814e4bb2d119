"""Voices of speakers, and mixtures between two of them.

FedEmbed has 20 voices of eight speakers, made by a text-to-speech network by
interpolation between voice embeddings. We have no such network and mix
recordings: two speakers say the same word, dynamic time warping aligns their
frames, and the mix has the weighted mean of both in length and, frame by frame,
in decibels of each band. This interpolates the spectral envelope and the pace,
but not the pitch: harmonics of both speakers remain, each at part of its height
above the rest. So a voice between two speakers has traits of both, and pairs
that share a speaker are alike, as in the paper. Mixes remain spectrograms and
cannot be listened to.

A mix has both of its recordings from the same part of the data, so that no part
of a test utterance is in training.
"""

from collections.abc import Iterator, Sequence
import dataclasses

import numpy as np
from scipy.spatial import distance

from tasks.errors import DataError
from tasks.errors import OptionError
from tasks.images import Images
from tasks.preference import speech_recordings
from tasks.preference import speech_spectrograms

# Shares of the second speaker in voices between two speakers.
_SHARES = (0.5, 0.25, 0.75)


@dataclasses.dataclass(frozen=True)
class Voice:
  """Voice of a speaker, or one between two speakers.

  Attributes:
    first: A speaker.
    second: Another one, or the same.
    share: Share of the second speaker in the voice.
  """

  first: str
  second: str
  share: float = 0.0

  def __str__(self) -> str:
    if not self.share:
      return self.first
    return f'{1 - self.share:g} {self.first} + {self.share:g} {self.second}'


@dataclasses.dataclass(frozen=True, eq=False)
class Utterances:
  """Utterances of voices, as images.

  Attributes:
    images: Spectrograms, labelled with their voices.
    part_of: `[images]`: the part of the data that each belongs to.
    voices: The voices by their labels.
  """

  images: Images
  part_of: np.ndarray
  voices: tuple[Voice, ...]


def choose(speakers: Sequence[str], num_voices: int) -> list[Voice]:
  """Choose voices: first all speakers, then those halfway between two.

  Pairs are ordered so that every speaker is in about as many: neighbours around
  a circle, then those with one between them, and so on. When all pairs have a
  voice in the middle, they get two more, a quarter and three quarters of the
  way.
  """
  number = len(speakers)
  pairs = [
    (speakers[place], speakers[(place + distance) % number])
    for distance in range(1, number // 2 + 1)
    # For an even number, the last distance meets each pair twice.
    for place in range(number if 2 * distance < number else distance)
  ]
  voices = [Voice(speaker, speaker) for speaker in speakers] + [
    Voice(first, second, share)
    for shares in (_SHARES[:1], _SHARES[1:])
    for first, second in pairs
    for share in shares
  ]
  if not number <= num_voices <= len(voices):
    raise OptionError(
      f'--set=speech_voices: {number} speakers make {number} to {len(voices)} '
      f'voices, not {num_voices}. Choose a number between.'
    )
  return voices[:num_voices]


def speak(corpus: speech_recordings.Corpus, num_voices: int) -> Utterances:
  divided = speech_recordings.divide(corpus)
  voices = choose(corpus.speakers, num_voices)
  spectrograms = {
    part: [speech_spectrograms.log_mel(r.samples, corpus.rate) for r in mine]
    for part, mine in divided.items()
  }
  pictures: list[np.ndarray] = []
  labels: list[int] = []
  part_of: list[str] = []
  for label, voice in enumerate(voices):
    for part, least in speech_recordings.LEAST.items():
      first, second = (voice.first, part), (voice.second, part)
      said = spectrograms[first]
      if voice.share:
        pairs = list(_same_words(divided[first], divided[second]))
        if len(pairs) < least:
          raise DataError(
            f'{corpus.name}: voice {voice}: the speakers have {len(pairs)} '
            f'recordings of the same words for the part {part}, and {least} '
            'are the least. Name files of the same words alike, or choose as '
            'many voices as there are speakers.'
          )
        said = mix(
          [spectrograms[first][place] for place, _ in pairs],
          [spectrograms[second][place] for _, place in pairs],
          voice.share,
        )
      pictures += map(speech_spectrograms.to_picture, said)
      labels += [label] * len(said)
      part_of += [part] * len(said)
  images = Images(
    corpus.name,
    np.stack(pictures),
    np.array(labels, np.int32),
    num_classes=len(voices),
    ink=speech_spectrograms.FULL_INK,
  )
  return Utterances(images, np.array(part_of), tuple(voices))


def _same_words(
  first: Sequence[speech_recordings.Recording],
  second: Sequence[speech_recordings.Recording],
) -> Iterator[tuple[int, int]]:
  """Yield positions of recordings of the same word, each at most once."""
  waiting: dict[str, list[int]] = {}
  for place, recording in reversed(list(enumerate(second))):
    waiting.setdefault(recording.word, []).append(place)
  for place, recording in enumerate(first):
    if waiting.get(recording.word):
      yield place, waiting[recording.word].pop()


def mix(
  first: Sequence[np.ndarray], second: Sequence[np.ndarray], share: float
) -> list[np.ndarray]:
  """Mix spectrograms of the same words, one by one.

  Of n and m frames there will be `(1 - share) * n + share * m`, rounded down at
  the end.
  """
  return [
    _mix_along(path, one, other, share)
    for path, one, other in zip(
      align(first, second), first, second, strict=True
    )
  ]


def _mix_along(
  path: np.ndarray, first: np.ndarray, second: np.ndarray, share: float
) -> np.ndarray:
  """Mix pairs of frames, then resample at whole frame numbers."""
  weights = np.array([1 - share, share])
  times = path @ weights
  mixed = weights[0] * first[path[:, 0]] + weights[1] * second[path[:, 1]]
  # Times increase with every pair, and the last whole one is within them.
  wanted = np.arange(int(times[-1] + 1e-9) + 1)
  after = np.minimum(np.searchsorted(times, wanted), len(times) - 1)
  before = np.maximum(after - 1, 0)
  gap = np.maximum(times[after] - times[before], 1e-9)
  part = np.clip((wanted - times[before]) / gap, 0, 1)[:, np.newaxis]
  return speech_spectrograms.from_loudest(
    (1 - part) * mixed[before] + part * mixed[after]
  )


def align(
  first: Sequence[np.ndarray], second: Sequence[np.ndarray]
) -> list[np.ndarray]:
  """Align frames by dynamic time warping.

  The path from both starts to both ends with the least sum of Euclidean
  distances between frames, each band without its mean over the word.
  """
  rows, columns = ([len(one) for one in ones] for ones in (first, second))
  # Least sum up to each pair of frames, with an infinite border.
  sums = np.full([max(rows) + 1, max(columns) + 1, len(rows)], np.inf)
  distances = np.zeros([max(rows), max(columns), len(rows)])
  for place, (one, other) in enumerate(zip(first, second, strict=True)):
    distances[: len(one), : len(other), place] = distance.cdist(
      one - one.mean(axis=0), other - other.mean(axis=0)
    )
  sums[0, 0] = 0
  for row in range(max(rows)):
    for column in range(max(columns)):
      before = np.minimum(sums[row, column], sums[row, column + 1])
      sums[row + 1, column + 1] = distances[row, column] + np.minimum(
        before, sums[row + 1, column]
      )
  return [
    _trace_back(sums[: rows[place] + 1, : columns[place] + 1, place])
    for place in range(len(rows))
  ]


def _trace_back(sums: np.ndarray) -> np.ndarray:
  """Return the path to the last pair of frames, the shorter one for ties."""
  row, column = sums.shape[0] - 1, sums.shape[1] - 1
  path = []
  while row and column:
    path.append((row - 1, column - 1))
    row, column = min(
      ((row - 1, column - 1), (row - 1, column), (row, column - 1)),
      key=lambda place: sums[place],
    )
  return np.array(path[::-1])
