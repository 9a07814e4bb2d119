"""The speaker preference task of FedEmbed, section 4.3.

A user likes one voice and dislikes all others, whatever they say. The paper's
900 users choose among 20 voices made of eight speakers of LibriTTS; ours come
from any folder of recordings, such as six speakers of the Free Spoken Digit
Dataset, as `speech_voices` says, and are shown as smaller spectrograms
(`speech_spectrograms`).

900 users with 15 liked utterances each need more than there are, so utterances
repeat from user to user. But those of tests, and all that they are mixed from,
are nobody's to train with.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any, ClassVar

from tasks.options import option
from tasks.preference import speech_models
from tasks.preference import speech_recordings
from tasks.preference import speech_synthetic
from tasks.preference import speech_voices
from tasks.preference.task import BALANCED
from tasks.preference.task import Options
from tasks.preference.task import PreferenceTask
from tasks.task import Data

NAME = 'speech_preference'

# Of the imbalanced users so many like the voices number 0 and 5.
_COMMON_SHARES = {0: 0.2, 5: 0.08}
_PAPER_USERS, _FEW_USERS = 900, 200


@dataclasses.dataclass(frozen=True)
class SpeechOptions(Options):
  """What can be chosen about the task; the defaults are the paper's."""

  name: ClassVar[str] = NAME

  num_voices: int = option(
    20,
    'Voices that users choose among: those of all speakers, and others that '
    'lie between two of them.',
    flag='speech_voices',
    at_least=3,
  )

  def load(self, data: Data, seed: int) -> 'SpeechPreference':
    """Load the recordings, makes the voices and the task.

    Args:
      data: Where they come from: the folder holds `speech`, see
        `speech_recordings.load`. Invented ones need no files.
      seed: The run's seed.

    Raises:
      DataError: If recordings are missing or damaged, or too few; says where
        and what to do.
      OptionError: If there are too few utterances for the users, or too few
        speakers for the voices.
    """
    if data.is_synthetic:
      corpus, num_users = speech_synthetic.invent(), _FEW_USERS
    else:
      corpus = speech_recordings.load(data.data_dir)
      num_users = _PAPER_USERS
    utterances = speech_voices.speak(corpus, self.num_voices)
    return SpeechPreference(utterances, self, num_users, seed)


class SpeechPreference(PreferenceTask):
  """Users as clients, who like one voice each.

  Attributes:
    voices: The voices by the numbers of their sub-populations.
  """

  name = NAME

  def __init__(
    self,
    utterances: speech_voices.Utterances,
    options: SpeechOptions,
    num_users: int,
    seed: int,
  ):
    """Draws the users' utterances.

    Args:
      utterances: What all voices say.
      options: What can be chosen.
      num_users: All users, if the options do not say.
      seed: The run's seed: utterances are drawn by it, and the weights start
        from it.

    Raises:
      OptionError: If there are too few utterances or users.
    """
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
    """How much of everything there is, for the result."""
    return {**super().counts, 'voices': [str(voice) for voice in self.voices]}


def shares_of(shares: str, num_voices: int) -> list[float]:
  """The share of the users that like each voice.

  Args:
    shares: BALANCED; or IMBALANCED, where a fifth likes voice 0, 8 % like voice
      5, or the last if there are fewer, and all others are equally common.
    num_voices: How many voices there are, at least 3.
  """
  if shares == BALANCED:
    return [1 / num_voices] * num_voices
  rest = 1 - sum(_COMMON_SHARES.values())
  found = [rest / (num_voices - len(_COMMON_SHARES))] * num_voices
  for voice, share in _COMMON_SHARES.items():
    found[min(voice, num_voices - 1)] = share
  return found
