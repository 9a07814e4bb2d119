"""The speaker preference task of FedEmbed, section 4.3.

A user likes one voice and dislikes all others, whatever they say. The paper's
900 users choose among 20 voices made of eight speakers of LibriTTS; ours come
from any folder of recordings, such as six speakers of the Free Spoken Digit
Dataset (see `speech_voices`), as smaller spectrograms (`speech_spectrograms`).

900 users with 15 liked utterances each need more than there are, so utterances
repeat between users. But no user trains on test utterances, or on the
recordings that they are mixed from.
"""

from collections.abc import Sequence
from typing import Any

from tasks.preference import speech_models
from tasks.preference import speech_recordings
from tasks.preference import speech_synthetic
from tasks.preference import speech_voices
from tasks.preference.options import BALANCED
from tasks.preference.options import SpeechOptions
from tasks.preference.task import PreferenceTask
from tasks.task import Data

# Shares of users who like the voices 0 and 5, for imbalanced users.
_COMMON_SHARES = {0: 0.2, 5: 0.08}
_PAPER_USERS, _FEW_USERS = 900, 200


class SpeechPreference(PreferenceTask):
  """Users as clients; each likes one voice.

  Attributes:
    voices: The voices by the numbers of their sub-populations.
  """

  name = SpeechOptions.name

  def __init__(
    self,
    utterances: speech_voices.Utterances,
    options: SpeechOptions,
    num_users: int,
    seed: int,
  ):
    self.voices: Sequence[speech_voices.Voice] = utterances.voices
    super().__init__(
      utterances.images,
      shares_of(options.shares, len(self.voices)),
      num_users,
      options,
      seed,
      part_of=utterances.part_of,
      build_encoder=speech_models.build_encoder,
    )

  @property
  def counts(self) -> dict[str, Any]:
    return {**super().counts, 'voices': [str(voice) for voice in self.voices]}


def shares_of(shares: str, num_voices: int) -> list[float]:
  """Return the share of the users that like each voice.

  Args:
    shares: BALANCED; or IMBALANCED, where a fifth likes voice 0, 8 % like voice
      5, or the last if there are fewer, and all others are equally common.
    num_voices: Number of voices, at least 3.
  """
  if shares == BALANCED:
    return [1 / num_voices] * num_voices
  rest = 1 - sum(_COMMON_SHARES.values())
  found = [rest / (num_voices - len(_COMMON_SHARES))] * num_voices
  for voice, share in _COMMON_SHARES.items():
    found[min(voice, num_voices - 1)] = share
  return found


def load(options: SpeechOptions, data: Data, seed: int) -> SpeechPreference:
  """Load the recordings, make the voices and the task.

  Recordings are in the folder `speech` below `data_dir`.
  """
  if data.is_synthetic:
    corpus, num_users = speech_synthetic.generate(), _FEW_USERS
  else:
    corpus = speech_recordings.load(data.data_dir)
    num_users = _PAPER_USERS
  utterances = speech_voices.speak(corpus, options.num_voices)
  return SpeechPreference(utterances, options, num_users, seed)
