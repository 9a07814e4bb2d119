"""Options of the tasks whose users like one kind of examples."""

import dataclasses
from typing import ClassVar

from tasks import shared_options as shared
from tasks.options import detail
from tasks.options import option
from tasks.shared_options import TaskOptions

BALANCED, IMBALANCED = 'balanced', 'imbalanced'


@dataclasses.dataclass(frozen=True)
class PreferenceOptions(TaskOptions):
  """Options of such a task; the defaults are the paper's."""

  title: ClassVar[str] = 'Tasks mnist_preference and speech_preference'
  flag_prefix: ClassVar[str] = 'preference_'

  shares: str = option(
    BALANCED,
    'How common each preference is among users.',
    choices=(BALANCED, IMBALANCED),
  )
  num_users: int | None = shared.users(None)
  embedding_size: int = option(
    0,
    'Length of the personal embedding, at most the width of an image or the '
    'height of a spectrogram. 0 means none, and with FedEmbed that maximum.',
    at_least=0,
  )
  num_groups: int | None = detail(
    None,
    'Heads, prototypes, nodes or centers to choose among; by default one for '
    'each sub-population. More are an overestimate (FedEmbed, section 6); '
    'fewer are for the map and for the head of least loss.',
    flag='preference_groups',
    at_least=2,
  )
  activation: str = detail(
    '',
    'Activation between the layers of the encoder; the paper prints none.',
    choices=('', 'relu', 'elu', 'gelu', 'tanh'),
  )
  type_head: bool = option(
    True, "Train FedEmbed's model by its type head, too; Figure 4 varies this."
  )
  embedding_spread: float = option(
    1.0,
    "FedEmbed's first embeddings and prototypes are uniform from 0 to this.",
    at_least=1e-6,
  )
  prototypical_share: float = option(
    0.1,
    "Share of each sub-population's users who are prototypical; at least one.",
    at_least=0,
    at_most=1,
  )


@dataclasses.dataclass(frozen=True)
class MnistOptions(PreferenceOptions):
  """Options of the task; the defaults are the paper's."""

  name: ClassVar[str] = 'mnist_preference'
  loader: ClassVar[str] = 'tasks.preference.mnist:load'


@dataclasses.dataclass(frozen=True)
class SpeechOptions(PreferenceOptions):
  """Options of the task; the defaults are the paper's."""

  name: ClassVar[str] = 'speech_preference'
  loader: ClassVar[str] = 'tasks.preference.speech:load'

  num_voices: int = detail(
    20,
    'Number of voices that users choose among: those of all speakers, and '
    'others between two of them.',
    flag='speech_voices',
    at_least=3,
  )
