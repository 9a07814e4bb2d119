"""The flags of the EMNIST task.

Those that say where data come from are `DataFlags`, and the seed is the run's.
"""

from absl import flags

from tasks import emnist
from tasks import emnist_models
from tasks import task as tasks_lib

FLAGS = flags.FLAGS


class EmnistFlags:
  """The EMNIST task."""

  def __init__(self) -> None:
    """Defines the flags."""
    default = emnist.Options()
    flags.DEFINE_enum(
      'emnist_edition',
      emnist.MNIST,
      emnist.EDITIONS,
      "MNIST, or TFF's federated EMNIST, which needs --download.",
    )
    flags.DEFINE_enum(
      'emnist_partition',
      default.partition,
      emnist.PARTITIONS,
      'Whether users hold a few labels each, or what they wrote.',
    )
    flags.DEFINE_enum(
      'emnist_protocol',
      default.protocol,
      tasks_lib.PROTOCOLS,
      'Measure further images of users who took part, or users who did not.',
    )
    flags.DEFINE_integer(
      'emnist_users',
      default.num_users,
      'Users of the partition labels.',
      lower_bound=1,
    )
    flags.DEFINE_integer(
      'emnist_labels_per_user',
      default.labels_per_user,
      'Labels of a user of the partition labels.',
      lower_bound=1,
    )
    flags.DEFINE_float(
      'emnist_size_deviation',
      default.size_deviation,
      'How much the sizes of users of the partition labels differ: the '
      'deviation of their logarithm.',
      lower_bound=0.0,
    )
    flags.DEFINE_integer(
      'emnist_max_examples', 0, 'Images used of a user; 0 for all.'
    )
    flags.DEFINE_enum(
      'emnist_model',
      default.model,
      emnist_models.MODELS,
      'Logistic regression, one hidden layer, or convolutions.',
    )
    flags.DEFINE_integer(
      'emnist_hidden',
      default.hidden,
      'Units of the hidden layer of the dense model.',
      lower_bound=1,
    )
    flags.DEFINE_string(
      'emnist_local',
      default.local,
      "What is the user's where a part of the model is, as a regular "
      'expression over names of layers and variables; by default the last '
      'layer, and its biases in logistic regression.',
    )

  def get(self) -> emnist.Emnist:
    """Loads the data and returns the task."""
    options = emnist.Options(
      partition=FLAGS.emnist_partition,
      protocol=FLAGS.emnist_protocol,
      num_users=FLAGS.emnist_users,
      labels_per_user=FLAGS.emnist_labels_per_user,
      size_deviation=FLAGS.emnist_size_deviation,
      max_examples=FLAGS.emnist_max_examples or None,
      model=FLAGS.emnist_model,
      hidden=FLAGS.emnist_hidden,
      local=FLAGS.emnist_local,
    )
    return emnist.load(
      data=FLAGS.data,
      data_dir=FLAGS.data_dir,
      edition=FLAGS.emnist_edition,
      download=FLAGS.download,
      seed=FLAGS.seed,
      options=options,
    )
