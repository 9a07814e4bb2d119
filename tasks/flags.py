"""Flags of the binaries, grouped as objects that make what they describe.

A group defines its flags when it is made and reads them in `get()`. Only the
modules of `tasks` read flags.
"""

from collections.abc import Callable, Sequence
import functools
import os
from typing import Any

from absl import flags
import tensorflow_federated as tff

from tasks import movielens
from tasks import task as tasks_lib
from tasks.errors import OptionError
from tff_partial import aggregators
from tff_partial import composition
from tff_partial import messages
from tff_partial import phases
from tff_partial.data import splits

FLAGS = flags.FLAGS

_OPTIMIZERS: dict[str, Callable[..., phases.Optimizer]] = {
  'sgd': tff.learning.optimizers.build_sgdm,
  'adagrad': tff.learning.optimizers.build_adagrad,
  'adam': tff.learning.optimizers.build_adam,
  'rmsprop': tff.learning.optimizers.build_rmsprop,
  'yogi': tff.learning.optimizers.build_yogi,
}

# May differ from those of a run that is gone on with: they change no number.
FREE_FLAGS = frozenset(
  (
    'checkpoint_every',
    'data_dir',
    'download',
    'output_dir',
    'progress',
    'rounds',
    'tensorboard',
  )
)


class OptimizerFlags:
  """The flags of one optimizer, `--<name>_optimizer` and others."""

  def __init__(self, name: str, what: str, learning_rate: float):
    """Defines the flags.

    Args:
      name: Begins the names of the flags.
      what: Says in the help what the optimizer trains.
      learning_rate: The default.
    """
    self._name = name
    flags.DEFINE_enum(
      f'{name}_optimizer', 'sgd', sorted(_OPTIMIZERS), f'Trains {what}.'
    )
    flags.DEFINE_float(
      f'{name}_learning_rate',
      learning_rate,
      f'Learning rate for {what}.',
      lower_bound=0.0,
    )
    flags.DEFINE_float(
      f'{name}_momentum',
      0.0,
      f'Momentum for {what}; for sgd alone.',
      lower_bound=0.0,
      upper_bound=1.0,
    )
    flags.DEFINE_float(
      f'{name}_epsilon',
      None,
      f'Epsilon for {what}; for adaptive optimizers alone.',
      lower_bound=0.0,
    )

  def get(self, learning_rate: float | None = None) -> phases.Optimizer:
    """Returns the optimizer.

    Args:
      learning_rate: Another than that of the flag.

    Raises:
      OptionError: If a flag is set that the optimizer does not have.
    """
    kind = FLAGS[f'{self._name}_optimizer'].value
    momentum = FLAGS[f'{self._name}_momentum'].value
    epsilon = FLAGS[f'{self._name}_epsilon'].value
    extra: dict[str, Any] = {}
    if kind == 'sgd':
      extra['momentum'] = momentum or None
    elif momentum:
      raise OptionError(
        f'--{self._name}_momentum: {kind} has no momentum of this kind. Leave '
        f'the flag out, or use --{self._name}_optimizer=sgd.'
      )
    if epsilon is not None:
      if kind == 'sgd':
        raise OptionError(
          f'--{self._name}_epsilon: sgd has no epsilon. Leave the flag out, or '
          'choose an adaptive optimizer.'
        )
      extra['epsilon'] = epsilon
    if learning_rate is None:
      learning_rate = FLAGS[f'{self._name}_learning_rate'].value
    return _OPTIMIZERS[kind](learning_rate=learning_rate, **extra)


class SplitFlags:
  """How a client's examples are split into support and query set."""

  def __init__(self) -> None:
    """Defines the flags."""
    flags.DEFINE_enum(
      'split',
      'halves',
      ['halves', 'fraction', 'alternating', 'same', 'by_time'],
      'Support and query set of a client: first and second half; a first '
      'share and the rest; even and odd batches; both all examples; the older '
      'share and the rest.',
    )
    flags.DEFINE_float(
      'support_share',
      0.5,
      'Share of the support set, for the splits fraction and by_time.',
    )
    flags.DEFINE_bool(
      'shuffle_split', False, 'Split in a new random order every round.'
    )

  def get(self, batch_size: int) -> splits.Split:
    """Returns the split, for phases of this batch size."""
    share = FLAGS.support_share
    if not 0.0 < share < 1.0:
      raise OptionError(
        f'--support_share={share}: the share must lie between 0 and 1. For '
        'one set of all examples use --split=same.'
      )
    makers: dict[str, Callable[[], splits.Split]] = {
      'halves': splits.halves,
      'fraction': functools.partial(splits.fraction, share),
      'alternating': functools.partial(splits.alternating, batch_size),
      'same': splits.same,
      'by_time': functools.partial(splits.by_time, 'time', share),
    }
    split = makers[FLAGS.split]()
    return splits.shuffled(split) if FLAGS.shuffle_split else split


class AggregatorFlags:
  """How the clients' updates are joined."""

  def __init__(self) -> None:
    """Defines the flags."""
    flags.DEFINE_enum(
      'aggregator',
      'mean',
      ['mean', 'robust'],
      'Joins updates: the weighted mean, or that mean after TFF has clipped '
      'long updates and zeroed extreme ones by adaptive bounds.',
    )
    flags.DEFINE_float(
      'clip_norm',
      0.0,
      'Scales down client updates to this norm; 0 for no limit. A remedy '
      'where single clients make a run diverge.',
      lower_bound=0.0,
    )
    flags.DEFINE_enum(
      'client_weighting',
      None,
      ['examples', 'uniform'],
      'Whether a client counts by its query examples (the default) or once (if '
      'the run is private).',
    )

  def get(self) -> composition.AggregationFactory:
    """Returns the aggregation factory."""
    if FLAGS.aggregator == 'robust':
      if FLAGS.clip_norm:
        raise OptionError(
          '--clip_norm: the robust aggregator finds its own norm to clip to. '
          'Leave one of the two flags out.'
        )
      return aggregators.robust()
    if FLAGS.clip_norm:
      return aggregators.MeanFactory(
        lambda mean: tff.aggregators.clipping_factory(FLAGS.clip_norm, mean)
      )
    return aggregators.MeanFactory()

  def weighting(self) -> messages.ClientWeighting:
    """Returns what a client counts by."""
    if FLAGS.client_weighting == 'uniform':
      return messages.ClientWeighting.UNIFORM
    return messages.ClientWeighting.NUM_EXAMPLES


class MovieLensFlags:
  """The MovieLens task."""

  def __init__(self) -> None:
    """Defines the flags."""
    paper = movielens.Options()
    flags.DEFINE_string(
      'data_set',
      '',
      'Edition of MovieLens, such as ml-1m or ml-100k; by default the one '
      'found in --data_dir, and ml-1m to download.',
    )
    flags.DEFINE_enum(
      'protocol',
      paper.protocol,
      tasks_lib.PROTOCOLS,
      'Measure users that never took part, or later ratings of those who did.',
    )
    flags.DEFINE_integer(
      'max_examples',
      paper.max_examples,
      'Ratings used of each user; 0 for all.',
      lower_bound=0,
    )
    flags.DEFINE_integer(
      'min_examples',
      paper.min_examples,
      'Users with fewer ratings are left out.',
      lower_bound=1,
    )
    flags.DEFINE_integer(
      'num_factors',
      paper.num_factors,
      'Length of item and user vectors.',
      lower_bound=1,
    )
    flags.DEFINE_bool('biases', paper.biases, 'Give items and users biases.')
    flags.DEFINE_bool(
      'centred', paper.centred, 'Predict around the mean training rating.'
    )
    flags.DEFINE_float(
      'public_mean',
      paper.public_mean,
      'Predict around this number, which is known without the data.',
    )
    flags.DEFINE_float(
      'l2', paper.l2, 'L2 regularization of user weights.', lower_bound=0.0
    )
    flags.DEFINE_float(
      'item_l2',
      paper.item_l2,
      'L2 regularization of item weights; dense, so it takes time.',
      lower_bound=0.0,
    )
    flags.DEFINE_bool(
      'clip_predictions',
      paper.clip_predictions,
      'Clip predictions to the rating scale when measuring.',
    )
    flags.DEFINE_float(
      'initial_scale',
      paper.initial_scale,
      'Vectors start uniform between plus and minus this.',
      lower_bound=0.0,
    )

  def get(self) -> movielens.MovieLens:
    """Loads the data and returns the task."""
    options = movielens.Options(
      protocol=FLAGS.protocol,
      max_examples=FLAGS.max_examples or None,
      min_examples=FLAGS.min_examples,
      num_factors=FLAGS.num_factors,
      biases=FLAGS.biases,
      centred=FLAGS.centred,
      public_mean=FLAGS.public_mean,
      l2=FLAGS.l2,
      item_l2=FLAGS.item_l2,
      clip_predictions=FLAGS.clip_predictions,
      initial_scale=FLAGS.initial_scale,
    )
    return movielens.load(
      data=FLAGS.data,
      data_dir=FLAGS.data_dir,
      data_set=FLAGS.data_set,
      download=FLAGS.download,
      seed=FLAGS.seed,
      options=options,
    )


class DataFlags:
  """Where data come from."""

  def __init__(self) -> None:
    """Defines the flags."""
    flags.DEFINE_enum(
      'data',
      'real',
      ['real', 'synthetic'],
      'Real data of the task, or invented data of the same form.',
    )
    flags.DEFINE_string(
      'data_dir',
      os.environ.get('TFF_PARTIAL_DATA_DIR'),
      'Folder with a folder for each task. Default: $TFF_PARTIAL_DATA_DIR.',
    )
    flags.DEFINE_bool(
      'download',
      False,
      'Fetch the data from their official address into --data_dir if they are '
      'not there.',
    )


class RunFlags:
  """The run itself."""

  def __init__(self) -> None:
    """Defines the flags."""
    flags.DEFINE_string(
      'output_dir', None, 'Folder for everything that the run writes.'
    )
    flags.DEFINE_integer('rounds', 500, 'Rounds of training.', lower_bound=1)
    flags.DEFINE_integer(
      'clients_per_round',
      100,
      'Clients whose updates a round joins.',
      lower_bound=1,
    )
    flags.DEFINE_float(
      'oversample',
      1.0,
      'How many times as many clients are asked, since some drop out.',
      lower_bound=1.0,
    )
    flags.DEFINE_float(
      'dropout_rate',
      0.0,
      'Probability that a client that was asked does not answer.',
      lower_bound=0.0,
      upper_bound=1.0,
    )
    flags.DEFINE_enum(
      'user_form',
      None,
      tasks_lib.USER_FORMS,
      "Where the model has what belongs to one user: the user's own, a row "
      'of a table at the server, or nowhere. By default as the algorithm '
      'needs it.',
    )
    flags.DEFINE_integer('seed', 0, 'Everything that is drawn follows from it.')
    flags.DEFINE_integer(
      'evaluate_every',
      50,
      'Rounds between evaluations on validation clients.',
      lower_bound=1,
    )
    flags.DEFINE_integer(
      'checkpoint_every',
      None,
      'Rounds between checkpoints; by default as --evaluate_every.',
      lower_bound=1,
    )
    flags.DEFINE_integer(
      'early_stopping_patience',
      None,
      'End the run when so many evaluations in a row were no better than the '
      'best one before; by default it has all its rounds.',
      lower_bound=1,
    )
    flags.DEFINE_float(
      'early_stopping_min_delta',
      0.0,
      'By more than how much an evaluation must be better, for early stopping.',
      lower_bound=0.0,
    )
    flags.register_multi_flags_validator(
      ['early_stopping_min_delta', 'early_stopping_patience'],
      lambda given: (
        not given['early_stopping_min_delta']
        or given['early_stopping_patience'] is not None
      ),
      'without --early_stopping_patience no run ends early. Give both or none.',
    )
    flags.DEFINE_enum(
      'runtime',
      'cohort',
      ['cohort', 'native'],
      "Whether a round is one compiled program or runs in TFF's own worker.",
    )
    flags.DEFINE_enum(
      'jit',
      'auto',
      ['auto', 'true', 'false'],
      'Whether the cohort runtime compiles with XLA; auto measures both.',
    )
    flags.DEFINE_float(
      'divergence_factor',
      3.0,
      'Stop when the loss stays above this many times the first one.',
      lower_bound=1.0,
    )
    flags.DEFINE_bool('tensorboard', True, 'Write TensorBoard events.')
    flags.DEFINE_bool(
      'progress', None, 'Show a progress bar; by default on a terminal.'
    )


def given_flags(module_flags: Sequence[str]) -> dict[str, Any]:
  """Returns the values of some flags by name."""
  return {name: FLAGS[name].value for name in module_flags}
