"""The flags of the tasks of preference, which share most of them.

Those that say where data come from are `DataFlags`, and the seed is the run's.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from absl import flags

from tasks import mnist_preference
from tasks import preference_task
from tasks import speech_preference

FLAGS = flags.FLAGS


class PreferenceFlags:
  """Users and the model; defined once, for both tasks."""

  def __init__(self) -> None:
    """Defines the flags."""
    paper = preference_task.Options()
    flags.DEFINE_enum(
      'preference_shares',
      paper.shares,
      [preference_task.BALANCED, preference_task.IMBALANCED],
      'How common each preference is among users.',
    )
    flags.DEFINE_integer(
      'preference_users',
      0,
      "All users; 0 for the paper's 9,000 of digits and 900 of voices, and for "
      '300 and 200 of the synthetic data.',
      lower_bound=0,
    )
    flags.DEFINE_bool(
      'preference_repeat_images',
      paper.repeat_images,
      'Whether users may share images or utterances; else fewer users have '
      'some that nobody shares.',
    )
    flags.DEFINE_integer(
      'preference_validation_users',
      paper.validation_users,
      'Users who choose the best round.',
      lower_bound=1,
    )
    flags.DEFINE_integer(
      'preference_embedding_size',
      paper.embedding_size,
      'Length of the personal embedding, at most the width of an image and the '
      'height of a spectrogram; 0 for none, but for as much with FedEmbed.',
      lower_bound=0,
    )
    flags.DEFINE_string(
      'preference_local',
      paper.local,
      "What is the user's where a part of the model is, as a regular "
      'expression over names of layers and variables; by default the personal '
      'embedding, or the last layer where there is none.',
    )
    flags.DEFINE_enum(
      'preference_activation',
      paper.activation,
      ['', 'relu', 'elu', 'gelu', 'tanh'],
      'Between the layers of the encoder; the paper prints none.',
    )
    flags.DEFINE_bool(
      'preference_type_head',
      paper.type_head,
      "Whether FedEmbed's model learns from its type head; Figure 4 leaves it "
      'out.',
    )
    flags.DEFINE_float(
      'preference_embedding_spread',
      paper.embedding_spread,
      "Where the uniform distribution ends that FedEmbed's first embeddings "
      'and prototypes are drawn from; it begins at 0.',
    )
    flags.DEFINE_float(
      'preference_prototypical_share',
      paper.prototypical_share,
      "Which share of each sub-population's users are prototypical; one at "
      'least.',
      lower_bound=0.0,
      upper_bound=1.0,
    )

  def get(self) -> dict[str, Any]:
    """Returns the options of both tasks."""
    return {
      'shares': FLAGS.preference_shares,
      'num_users': FLAGS.preference_users or None,
      'repeat_images': FLAGS.preference_repeat_images,
      'validation_users': FLAGS.preference_validation_users,
      'embedding_size': FLAGS.preference_embedding_size,
      'local': FLAGS.preference_local,
      'activation': FLAGS.preference_activation,
      'type_head': FLAGS.preference_type_head,
      'embedding_spread': FLAGS.preference_embedding_spread,
      'prototypical_share': FLAGS.preference_prototypical_share,
    }


@dataclasses.dataclass(frozen=True)
class TaskOfPreference:
  """One of the tasks.

  Attributes:
    load: Loads the task.
    options: Returns its options.
  """

  load: Callable[..., preference_task.PreferenceTask]
  options: Callable[[], preference_task.Options]

  def get(self) -> preference_task.PreferenceTask:
    """Loads the data and returns the task."""
    return self.load(
      data=FLAGS.data,
      data_dir=FLAGS.data_dir,
      seed=FLAGS.seed,
      options=self.options(),
    )


def preference_tasks() -> dict[str, TaskOfPreference]:
  """Defines the flags and returns both tasks by their names."""
  common = PreferenceFlags()
  flags.DEFINE_integer(
    'speech_voices',
    speech_preference.SpeechOptions().num_voices,
    'Voices that users choose among: those of all speakers, and others that '
    'lie between two of them.',
    lower_bound=3,
  )
  return {
    mnist_preference.NAME: TaskOfPreference(
      mnist_preference.load, lambda: preference_task.Options(**common.get())
    ),
    speech_preference.NAME: TaskOfPreference(
      speech_preference.load,
      lambda: speech_preference.SpeechOptions(
        **common.get(), num_voices=FLAGS.speech_voices
      ),
    ),
  }
