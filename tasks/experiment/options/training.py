"""Options of local training.

`update_*` is for global weights, or for all weights trained at once;
`reconstruction_*` is for local weights, if an algorithm trains them separately,
and for personalising before clients are evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any, ClassVar, TYPE_CHECKING

from tasks.errors import OptionError
from tasks.experiment.options.optimizers import EXACT
from tasks.experiment.options.optimizers import Optimizer
from tasks.experiment.options.privacy import OF_ADAPTIVE
from tasks.options import detail
from tasks.options import option
from tasks.options import Options
from tasks.shared_options import SYNTHETIC
import tff_partial

if TYPE_CHECKING:
  from tff_partial import phases
  from tff_partial.data import splits

# Settings of the steps of local weights, which an exact solve does not take.
OF_STEPS = (
  *('reconstruction_epochs', 'reconstruction_steps'),
  *('evaluation_reconstruction_epochs', 'evaluation_reconstruction_steps'),
  'evaluation_reconstruction_learning_rate',
)
# Splits whose share of the support set is chosen.
_WITH_SHARE = ('fraction', 'by_time')
# Flags beside some values of which others have no use.
DECIDING = ('reconstruction_optimizer', 'split', 'clip', 'data')


def unread_beside(values: Mapping[str, Any]) -> tuple[str, ...]:
  """Return the flags that have no use beside some values of DECIDING."""
  optimizer, split, clip, data = map(values.get, DECIDING)
  unread: tuple[str, ...] = ()
  if str(optimizer).startswith(EXACT):
    unread += OF_STEPS
  if split not in (None, *_WITH_SHARE):
    unread += ('support_share',)
  if clip is not None:
    unread += OF_ADAPTIVE
  if data == SYNTHETIC:
    unread += ('data_set',)
  return unread


@dataclasses.dataclass(frozen=True)
class LocalTraining(Options):
  """Options of splitting a client's examples and of training on them."""

  title: ClassVar[str] = 'Training and optimizers'

  update: Optimizer = Optimizer('update', 'global weights', learning_rate=0.5)
  reconstruction: Optimizer = Optimizer('reconstruction', 'local weights')
  batch_size: int = option(5, 'Examples in a step.', at_least=1, is_common=True)
  update_epochs: int = option(
    1,
    'The most passes of the update over its examples.',
    at_least=1,
    is_common=True,
  )
  update_steps: int | None = option(
    50,
    'The most steps of the update; -1 for no limit.',
    at_least=0,
    for_none=-1,
  )
  reconstruction_epochs: int = option(
    5,
    'The most passes of the reconstruction over its examples.',
    at_least=1,
    is_common=True,
  )
  reconstruction_steps: int | None = option(
    50,
    'The most steps of the reconstruction; -1 for no limit.',
    at_least=0,
    for_none=-1,
  )
  evaluation_reconstruction_steps: int | None = option(
    None,
    'The most steps of reconstruction in evaluations, if not as in training; '
    '-1 for no limit.',
    at_least=-1,
  )
  evaluation_reconstruction_epochs: int | None = option(
    None,
    'The most passes of reconstruction in evaluations, if not as in training.',
    at_least=1,
  )
  evaluation_reconstruction_learning_rate: float | None = option(
    None,
    'Learning rate of reconstruction in evaluations, if not as in training.',
    at_least=0,
  )
  evaluation_batch_size: int | None = option(
    None,
    'Examples in a step of reconstruction in evaluations, and in a batch of '
    '--split=alternating, if not as in training.',
    at_least=1,
  )
  tuned: str | None = option(
    None,
    'For fine-tuning: regular expression over whole names of the variables '
    'that clients tune, such as bucket_embedding/.*; by default all.',
  )
  tuning_learning_rate: float | None = option(
    None,
    'Learning rate of global weights that clients tune before they are '
    'measured: after reconstruction, by default as in training, or before they '
    'predict by a memory, by default none. Steps: as in reconstruction.',
    at_least=0,
  )
  personalise_seen: bool = option(
    False,
    'Before clients who took part are measured, have them train their own '
    'weights, from what they remember, on their training examples.',
  )
  repeats: int = detail(5, 'Steps of pFedMe on each batch, K.', at_least=1)
  shuffle: bool = option(False, 'Take examples in a new order in each pass.')
  drop_remainder: bool = detail(
    False, 'Drop the last batch of a pass if it is smaller than the others.'
  )
  split: str = option(
    'halves',
    'Support and query set: first and second half; first share and the rest; '
    'even and odd batches; all examples in both; older share and the rest.',
    choices=('halves', 'fraction', 'alternating', 'same', 'by_time'),
    group='Method',
    is_common=True,
  )
  support_share: float = option(
    0.5, 'Share of the support set, for --split=fraction and by_time.'
  )
  shuffle_split: bool = option(
    False, 'Split in a new random order in every round.'
  )

  def __post_init__(self) -> None:
    """Check the share of the support set."""
    super().__post_init__()
    if not 0.0 < self.support_share < 1.0:
      raise OptionError(
        f'--support_share={self.support_share}: the share must lie between 0 '
        'and 1. For one set of all examples use --split=same.'
      )
    if self.reconstruction.kind == EXACT:
      self.refuse_set(
        OF_STEPS,
        'with --reconstruction_optimizer=exact no steps are taken. Leave it '
        'out.',
      )
    if self.split not in _WITH_SHARE:
      self.refuse_set(
        ('support_share',),
        f'--split={self.split} has no share to choose. Give --split=fraction '
        'or --split=by_time, or leave it out.',
      )

  def build_split(self, batch_size: int | None = None) -> splits.Split:
    """Build the split of examples into support and query set.

    Args:
      batch_size: Examples of a batch that is dealt out; by default those of a
        step of training.
    """
    splits, share = tff_partial.splits, self.support_share
    makers: dict[str, Callable[[], splits.Split]] = {
      'halves': splits.halves,
      'fraction': functools.partial(splits.fraction, share),
      'alternating': functools.partial(
        splits.alternating, batch_size or self.batch_size
      ),
      'same': splits.same,
      'by_time': functools.partial(splits.by_time, 'time', share),
    }
    split = makers[self.split]()
    return splits.shuffled(split) if self.shuffle_split else split

  def split_when_measured(self) -> splits.Split:
    """Build the split of examples of clients that are measured."""
    return self.build_split(self.evaluation_batch_size)

  def global_phase(self) -> phases.Phase:
    """Build the phase that trains global weights."""
    return self._phase('update', self.update.build())

  def _phase(self, name: str, optimizer: phases.Optimizer) -> phases.Phase:
    """Build a phase with the steps of the flags `update_*` or others."""
    return tff_partial.Phase(
      optimizer=optimizer,
      batch_size=self.batch_size,
      epochs=getattr(self, f'{name}_epochs'),
      max_steps=getattr(self, f'{name}_steps'),
      shuffle=self.shuffle,
      drop_remainder=self.drop_remainder,
    )

  def local_phase(self) -> phases.Phase:
    """Build the phase that trains local weights."""
    optimizer = self.reconstruction.build()
    if isinstance(optimizer, tff_partial.Exact):
      return tff_partial.Phase(optimizer=optimizer)
    return self._phase('reconstruction', optimizer)

  def joint_phase(self, shared: str = 'global') -> phases.Phase:
    """Build the phase that trains global weights and the client's at once.

    Args:
      shared: The tier of global weights, or of clients' copies of them.
    """
    optimizers = {
      tff_partial.tiers.LOCAL: self.reconstruction.build(),
      tff_partial.tiers.PERSONAL: self.reconstruction.build(),
      shared: self.update.build(),
    }
    return dataclasses.replace(
      self.global_phase(), train=(shared,), optimizer=optimizers
    )

  def personal_model_phase(self) -> phases.Phase:
    """Build the phase in which clients train their own models.

    Their copies of global weights are trained as if they were sent.
    """
    tiers = tff_partial.tiers
    return dataclasses.replace(
      self.joint_phase(tiers.PERSONAL), train=(tiers.PERSONAL, tiers.LOCAL)
    )

  def whole_model_phase(self) -> phases.Phase:
    """Build the phase of global weights with the optimizer of local ones."""
    return self._phase('update', self.reconstruction.build())

  def tuning_phase(self) -> phases.Phase:
    """Build the phase that fine-tunes all weights, or those of `tuned`."""
    return dataclasses.replace(self.local_phase(), variable_filter=self.tuned)

  def global_tuning_phase(self) -> phases.Phase:
    """Build the phase that fine-tunes global weights before an evaluation."""
    rate = self.tuning_learning_rate
    if rate is None:
      rate = self.update.learning_rate
    optimizer = dataclasses.replace(self.update, learning_rate=rate).build()
    return dataclasses.replace(
      self.when_measured(self._phase('reconstruction', optimizer)),
      variable_filter=self.tuned,
      optimizer=optimizer,
    )

  def repeated_phase(self) -> phases.Phase:
    """Build pFedMe's phase, which repeats its steps on each batch."""
    return dataclasses.replace(
      self.whole_model_phase(), steps_per_batch=self.repeats
    )

  def when_measured(self, phase: phases.Phase) -> phases.Phase:
    """Adapt the phase that personalises in training to evaluations."""
    steps = self.evaluation_reconstruction_steps
    rate = self.evaluation_reconstruction_learning_rate
    changes: dict[str, Any] = {}
    if steps is not None:
      changes['max_steps'] = None if steps < 0 else steps
    if self.evaluation_batch_size and phase.batch_size:
      changes['batch_size'] = self.evaluation_batch_size
    if self.evaluation_reconstruction_epochs is not None:
      changes['epochs'] = self.evaluation_reconstruction_epochs
    if rate is not None:
      optimizer = dataclasses.replace(
        self.reconstruction, learning_rate=rate
      ).build()
      if isinstance(phase.optimizer, Mapping):
        # What trains other tiers are flags `update_*`.
        optimizer = {**phase.optimizer, tff_partial.tiers.LOCAL: optimizer}
      changes['optimizer'] = optimizer
    return dataclasses.replace(phase, **changes)
