"""Flags of local training and of joining, which all algorithms share.

`update_*` is how clients train what is sent, or everything at once;
`reconstruction_*` how they train what is their own: where an algorithm trains
it apart, and where clients personalise before they are measured.
"""

import copy
import dataclasses
from typing import Any, Self

from absl import flags
import tensorflow as tf
import tensorflow_federated as tff

from tasks import flags as flag_groups
from tasks.fed_embed_flags import FedEmbedFlags
from tasks.privacy_flags import PrivacyFlags
from tff_partial import composition
from tff_partial import phases
from tff_partial import statistics
from tff_partial import tiers
from tff_partial.data import splits
from tff_partial.dp import privacy_audit
from tff_partial.dp import privacy_plans

FLAGS = flags.FLAGS


class TrainingFlags:
  """How clients train, and how the server joins what they send.

  Attributes:
    reconstruction: The optimizer of local weights.
    update: The optimizer of global weights.
    fed_embed: How clients of FedEmbed come to their sub-population.
    privacy: Whether and how the run is private.
    num_clients: How many may take part; 0 where nobody asked.
    ledger: Counts what it costs; None if it is not private.
    canaries: Clients that hide among the others, to audit the run; or None.
  """

  num_clients: int = 0
  ledger: privacy_plans.PrivacyLedger | None = None
  canaries: privacy_audit.Canaries | None = None

  def __init__(self) -> None:
    """Defines the flags."""
    self._split = flag_groups.SplitFlags()
    self._aggregator = flag_groups.AggregatorFlags()
    self.reconstruction = flag_groups.OptimizerFlags(
      'reconstruction', 'local weights', 0.1
    )
    self.update = flag_groups.OptimizerFlags('update', 'global weights', 0.5)
    self._server = flag_groups.OptimizerFlags(
      'server', 'the joined update', 1.0
    )
    flags.DEFINE_integer(
      'server_decay_rounds',
      0,
      "Rounds in which the server's learning rate falls to nothing, by equal "
      'steps; 0 to keep it.',
      lower_bound=0,
    )
    self.fed_embed = FedEmbedFlags()
    self.privacy = PrivacyFlags()
    flags.DEFINE_integer('batch_size', 5, 'Examples of a step.', lower_bound=1)
    for phase, epochs in (('reconstruction', 5), ('update', 1)):
      flags.DEFINE_integer(
        f'{phase}_epochs',
        epochs,
        f'Passes of the {phase} over its examples, at most.',
        lower_bound=1,
      )
      flags.DEFINE_integer(
        f'{phase}_steps',
        50,
        f'Steps of the {phase}, at most; -1 for no limit.',
        lower_bound=-1,
      )
    flags.DEFINE_integer(
      'evaluation_reconstruction_steps',
      None,
      'Steps of reconstruction when measuring, if not as in training.',
      lower_bound=-1,
    )
    flags.DEFINE_integer(
      'evaluation_reconstruction_epochs',
      None,
      'Passes of reconstruction when measuring, if not as in training.',
      lower_bound=1,
    )
    flags.DEFINE_float(
      'evaluation_reconstruction_learning_rate',
      None,
      'Learning rate of reconstruction when measuring, if not as in training.',
      lower_bound=0.0,
    )
    flags.DEFINE_bool(
      'personalise_seen',
      False,
      'Have clients who took part train what is their own, from what they '
      'remember, on what they trained with before they are measured.',
    )
    flags.DEFINE_bool(
      'joint',
      False,
      'Train local weights in the update phase of FedRecon, too.',
    )
    flags.DEFINE_bool(
      'shuffle', False, 'Take examples in a new order in each pass.'
    )
    flags.DEFINE_float(
      'penalty',
      None,
      'mu of FedProx, lambda of Ditto, pFedMe and FedProto; by default the '
      "algorithm's.",
      lower_bound=0.0,
    )
    flags.DEFINE_integer(
      'repeats', 5, 'Steps of pFedMe on each batch, K.', lower_bound=1
    )
    flags.DEFINE_enum(
      'scaffold_option',
      '2',
      ['1', '2'],
      'How clients of SCAFFOLD renew their control variate: by the gradient of '
      'all their examples (option I), or by how far their training led them '
      '(option II).',
    )
    flags.DEFINE_float(
      'mixture',
      0.5,
      "alpha of APFL: the share of a client's own model in what it uses.",
      lower_bound=0.0,
      upper_bound=1.0,
    )
    flags.DEFINE_float(
      'mixture_learning_rate',
      0.0,
      'Rate at which clients of APFL learn alpha; 0 for a fixed one.',
      lower_bound=0.0,
    )
    flags.DEFINE_enum(
      'private_rule',
      'keep',
      ['keep', 'scaled'],
      'What clients of FURL remember: what training came to (Eq. 7), or that '
      "share of their step which is their share of the cohort's examples "
      '(Eq. 6).',
    )

  def split(self) -> splits.Split:
    """Returns support and query set."""
    return self._split.get(FLAGS.batch_size)

  def _phase(self, name: str, **settings: Any) -> phases.Phase:
    return phases.Phase(
      optimizer=getattr(self, name).get(),
      batch_size=FLAGS.batch_size,
      epochs=FLAGS[f'{name}_epochs'].value,
      max_steps=_limit(FLAGS[f'{name}_steps'].value),
      shuffle=FLAGS.shuffle,
      **settings,
    )

  def shared(self) -> phases.Phase:
    """How clients train what is sent."""
    return self._phase('update')

  def together(self) -> phases.Phase:
    """How clients train what is sent and what is their own at once."""
    optimizers = {
      tiers.GLOBAL: self.update.get(),
      tiers.LOCAL: self.reconstruction.get(),
    }
    return dataclasses.replace(self.shared(), optimizer=optimizers)

  def own(self) -> phases.Phase:
    """How clients train what is their own."""
    return self._phase('reconstruction')

  def own_by_turns(self) -> phases.Phase:
    """The same for pFedMe: so many steps on each batch of an update."""
    return dataclasses.replace(
      self.shared(),
      optimizer=self.reconstruction.get(),
      repeats=FLAGS.repeats,
    )

  def personalising(self, phase: phases.Phase) -> phases.Phase:
    """How clients train what is their own before they are measured."""
    steps = FLAGS.evaluation_reconstruction_steps
    epochs = FLAGS.evaluation_reconstruction_epochs
    rate = FLAGS.evaluation_reconstruction_learning_rate
    changes: dict[str, Any] = {}
    if steps is not None:
      changes['max_steps'] = _limit(steps)
    if epochs is not None:
      changes['epochs'] = epochs
    if rate is not None:
      changes['optimizer'] = self.reconstruction.get(rate)
    return dataclasses.replace(phase, **changes)

  def planned_for(self, population: int) -> Self:
    """The same for a run on so many clients, with a ledger if it is private.

    Args:
      population: How many clients there are that may take part in training.

    Raises:
      UserError: If no such run can be as private as the flags say.
    """
    planned = copy.copy(self)
    if self.canaries is not None:
      population += self.canaries.number
    planned.num_clients = population
    if self.privacy.is_on:
      planned.ledger = self.privacy.ledger(population)
    return planned

  def with_canaries(self, canaries: privacy_audit.Canaries | None) -> Self:
    """The same for a run in which canaries hide.

    Args:
      canaries: The canaries, or None.
    """
    audited = copy.copy(self)
    audited.canaries = canaries
    return audited

  def averaging(self) -> composition.Averaging:
    """How updates are joined."""
    if self.ledger is not None:
      return self.privacy.averaging(self.ledger, self.canaries)
    return {
      'aggregator': self._aggregator.get(),
      'client_weighting': self._aggregator.weighting(),
    }

  def joining(self) -> composition.Joining:
    """How updates are joined, and what the server does with them."""
    optimizer = self._server.get()
    if FLAGS.server_decay_rounds:
      optimizer = tff.learning.optimizers.schedule_learning_rate(
        optimizer, self._falling_learning_rate
      )
    return {**self.averaging(), 'server_optimizer': optimizer}

  def _falling_learning_rate(self, round_number: tf.Tensor) -> tf.Tensor:
    """The server's learning rate after so many rounds."""
    done = tf.cast(round_number, tf.float32) / FLAGS.server_decay_rounds
    return self.server_learning_rate * tf.maximum(1.0 - done, 0.0)

  @property
  def server_learning_rate(self) -> float:
    """The rate of the server's optimizer, for algorithms that prescribe it."""
    return float(FLAGS.server_learning_rate)

  @property
  def update_learning_rate(self) -> float:
    """The rate of the update, for algorithms that prescribe its optimizer."""
    return float(FLAGS.update_learning_rate)

  @property
  def scaffold_option(self) -> int:
    """How clients of SCAFFOLD renew their control variate."""
    return int(FLAGS.scaffold_option)

  @property
  def mixture(self) -> dict[str, float]:
    """What APFL mixes, as arguments."""
    return {
      'mixture': FLAGS.mixture,
      'mixture_learning_rate': FLAGS.mixture_learning_rate,
    }

  @property
  def private_rule(self) -> statistics.Statistic | None:
    """What decides what clients remember, beside their training."""
    if FLAGS.private_rule == 'scaled':
      return statistics.SCALED_BY_SHARE
    return None

  @property
  def penalty(self) -> dict[str, float]:
    """The size of a penalty, as an argument, if it is given."""
    return {} if FLAGS.penalty is None else {'penalty': FLAGS.penalty}

  @property
  def joint(self) -> bool:
    """Whether FedRecon trains local weights in its update phase, too."""
    return bool(FLAGS.joint)


def _limit(steps: int) -> int | None:
  return None if steps < 0 else steps
