"""Recordings of words by known speakers, from a folder of wav files.

Two layouts are read. That of the Free Spoken Digit Dataset: all files in one
folder, named `WORD_SPEAKER_TAKE.wav`, such as `7_jackson_32.wav`. Or one folder
per speaker, with the speaker's name and files `WORD_TAKE.wav` or `WORD.wav`;
files of two speakers with the same word say the same, so that voices between
them can be made.

The division of each speaker's recordings is fixed. In the order of takes, and
of words within a take, the first tenth is for tests, as the Free Spoken Digit
Dataset recommends (takes 0 to 4 of 50), the next tenth for choosing the best
round, and the rest for training.
"""

from collections.abc import Sequence
import dataclasses
import io
import os
import pathlib
import re
from typing import Any
import warnings

import numpy as np
from scipy.io import wavfile

from tasks import task
from tasks.errors import DataError
from tasks.preference.task import SIZES

# Path down to the files, as far as these folders exist.
FOLDERS = ('speech', 'fsdd', 'recordings')

_REMEDY = (
  'Fetch the Free Spoken Digit Dataset by hand and put it into the folder '
  "'speech/fsdd' below --data_dir or $TFF_PARTIAL_DATA_DIR, or give a folder "
  'that has one of wav files for each speaker, or use --data=synthetic, which '
  'needs no files.'
)
_FSDD_NAME = re.compile(r'(?P<word>.+)_(?P<speaker>[^_]+)_(?P<take>\d+)')
_SPEAKERS_NAME = re.compile(r'(?P<word>.+?)(_(?P<take>\d+))?')

# Number of different liked recordings that a user needs in each part.
LEAST = {part: size // 2 for part, size in SIZES.items()}
_LEAST_RATE = 4_000


@dataclasses.dataclass(frozen=True, eq=False)
class Recording:
  """A recording of a word by a speaker.

  Attributes:
    speaker: The speaker.
    word: The word.
    take: Distinguishes recordings of the same word by the same speaker.
    samples: float32 `[samples]`, between -1 and 1.
  """

  speaker: str
  word: str
  take: int
  samples: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
  """Recordings of all speakers.

  Attributes:
    name: Source of the recordings.
    rate: Samples per second.
    recordings: All of them, by speaker, then take, then word.
  """

  name: str
  rate: int
  recordings: tuple[Recording, ...]

  @property
  def speakers(self) -> list[str]:
    return sorted({recording.speaker for recording in self.recordings})


def divide(corpus: Corpus) -> dict[tuple[str, str], list[Recording]]:
  """Divide the recordings of each speaker into parts.

  Returns recordings by speaker and part, in order.
  """
  speakers = corpus.speakers
  if len(speakers) < 2:
    raise DataError(
      f'{corpus.name}: all recordings are of {speakers[0]!r}. Nobody can '
      'prefer one voice of one; add another speaker.'
    )
  divided = {}
  for speaker in speakers:
    mine = [r for r in corpus.recordings if r.speaker == speaker]
    if len(mine) < sum(LEAST.values()):
      raise DataError(
        f'{corpus.name}: speaker {speaker!r} has {len(mine)} recordings, and '
        f'{sum(LEAST.values())} are the least: {LEAST[task.TRAIN]} to train '
        f'with, {LEAST[task.VALIDATION]} to choose the best round, '
        f'{LEAST[task.TEST]} to test. Record more, or take the speaker out.'
      )
    tenth = len(mine) // 10
    until_test = max(tenth, LEAST[task.TEST])
    until_validation = until_test + max(tenth, LEAST[task.VALIDATION])
    divided[speaker, task.TEST] = mine[:until_test]
    divided[speaker, task.VALIDATION] = mine[until_test:until_validation]
    divided[speaker, task.TRAIN] = mine[until_validation:]
  return divided


def load(data_dir: str | os.PathLike[str] | None) -> Corpus:
  """Read all recordings below a folder; see the module.

  Args:
    data_dir: Holds `speech/fsdd/recordings`, or is a folder on that path, or
      holds or is a folder of folders of speakers.

  Raises:
    DataError: If there are no wav files, or one is misnamed, damaged, of
      another format, or of another sampling rate; names it.
  """
  if not data_dir:
    raise DataError(f'Speech: no data folder is named. {_REMEDY}')
  folder = pathlib.Path(os.path.expanduser(data_dir))
  for name in FOLDERS:
    if (folder / name).is_dir():
      folder = folder / name
  if not folder.is_dir():
    raise DataError(f'{folder}: there is no such folder. {_REMEDY}')
  described = _describe_all(folder)
  first, rate = described[0]['path'], 0
  recordings = []
  for fields in described:
    path = fields['path']
    samples, found = read_wav(path)
    if found < _LEAST_RATE:
      raise DataError(
        f'{path}: {found} samples a second tell no voices apart; {_LEAST_RATE} '
        'are the least.'
      )
    rate = rate or found
    if found != rate:
      raise DataError(
        f'{path}: {found} samples a second, but {first} has {rate}. Convert '
        'all files to one sampling rate.'
      )
    recordings.append(
      Recording(
        fields['speaker'], fields['word'], int(fields['take'] or 0), samples
      )
    )
  name = folder.parent.name if folder.name == FOLDERS[-1] else folder.name
  return build_corpus(name, rate, recordings)


def build_corpus(
  name: str, rate: int, recordings: Sequence[Recording]
) -> Corpus:
  """Make a corpus of recordings in order."""
  return Corpus(
    name,
    rate,
    tuple(sorted(recordings, key=lambda r: (r.speaker, r.take, r.word))),
  )


def read_wav(path: pathlib.Path) -> tuple[np.ndarray, int]:
  """Read a file; average several channels.

  Returns float32 `[samples]` between -1 and 1, and the sampling rate.
  """
  try:
    with warnings.catch_warnings():
      # What cannot be understood may be the rest of the sound.
      warnings.simplefilter('error', wavfile.WavFileWarning)
      rate, samples = wavfile.read(io.BytesIO(path.read_bytes()))
    if not samples.size or samples.dtype not in (np.uint8, np.int16):
      raise ValueError(f'{len(samples)} samples of type {samples.dtype}')
  except Exception as error:  # Of many kinds, for headers are not checked.
    raise DataError(
      f'{path}: no whole wav file ({error}). Fetch it again, convert it to '
      'uncompressed PCM of 8 or 16 bits, or take it out of the folder.'
    ) from error
  # Of 8 bits, 128 is silence.
  silence, full = (128, 128) if samples.dtype == np.uint8 else (0, 32768)
  floats = (samples.astype(np.float32) - silence) / full
  return floats.reshape(len(floats), -1).mean(axis=1), rate


def _describe_all(folder: pathlib.Path) -> list[dict[str, Any]]:
  """Find the files of a folder in either layout, and parse their names."""
  described = [
    _describe(path, _FSDD_NAME, 'WORD_SPEAKER_TAKE.wav')
    for path in _wav_files(folder)
  ] or [
    {**_describe(path, _SPEAKERS_NAME, 'WORD.wav'), 'speaker': own.name}
    for own in sorted(folder.iterdir())
    if own.is_dir()
    for path in _wav_files(own)
  ]
  if not described:
    raise DataError(
      f'{folder}: there are no wav files, neither in it nor in folders of '
      f'speakers. {_REMEDY}'
    )
  return described


def _wav_files(folder: pathlib.Path) -> list[pathlib.Path]:
  """Return the wav files of a folder, in order, except hidden ones."""
  return sorted(
    path
    for path in folder.iterdir()
    if path.suffix.lower() == '.wav' and not path.name.startswith('.')
  )


def _describe(
  path: pathlib.Path, pattern: re.Pattern[str], form: str
) -> dict[str, Any]:
  """Parse a file's name: word, speaker and take."""
  match = pattern.fullmatch(path.stem)
  if match is None:
    raise DataError(
      f'{path}: expected a name of the form {form}. Rename the file, or put '
      'files into one folder for each speaker.'
    )
  return {'path': path, **match.groupdict()}
