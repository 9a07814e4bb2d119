"""Phases, in which a client trains some tiers on some examples.

A client's work is a list of phases, run one after another. A phase that trains
nothing only measures. Phases of an `Interleaved` take turns on each batch.
Between phases, clients of a model with groups choose theirs (`groups.py`).
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import re
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial import contexts
from tff_partial import errors
from tff_partial import groups
from tff_partial import tiers
from tff_partial.arguments import checked_numbers
from tff_partial.arguments import optimizers
from tff_partial.arguments import spelling
from tff_partial.data import splits
from tff_partial.model import losses
from tff_partial.solvers.exact import Exact

Optimizer: TypeAlias = tff.learning.optimizers.Optimizer
# How weights are trained: by steps, or by an exact solve.
Trainer: TypeAlias = Optimizer | Exact
# An extra loss term: (the client's context) -> scalar. See `terms.py`.
Term = Callable[[contexts.ClientContext], tf.Tensor]
# (the client's context, with its batch) -> predictions that replace the
# model's. See `memories.py`.
PredictFn: TypeAlias = Callable[[contexts.ClientContext], Any]
# Completed rounds -> epochs, or factor on learning rates, in the next one.
Epochs: TypeAlias = Callable[[tf.Tensor], tf.Tensor]
RateFactor: TypeAlias = Callable[[tf.Tensor], tf.Tensor]

# Treatment of optimizer slots after a client's round.
RESET, KEPT = 'reset', 'kept'
# Key of the learning rate in TFF's optimizers.
RATE = tff.learning.optimizers.LEARNING_RATE_KEY


def sgd(learning_rate: float) -> Optimizer:
  """Build plain gradient descent, as used by the FedRecon paper's clients.

  Raises:
    PhaseError: If the learning rate is negative or not finite.
  """
  if wrong := checked_numbers.why_negative(learning_rate):
    raise PhaseError(f'sgd: learning_rate: {wrong}.')
  return tff.learning.optimizers.build_sgdm(learning_rate)


class PhaseError(errors.UserError, ValueError):
  """Raised for invalid settings of a phase."""


@dataclasses.dataclass(frozen=True)
class Phase:
  """Training of some tiers' weights on one part of a client's examples.

  Attributes:
    train: The tiers to train; an empty tuple only measures.
    on: The examples and their order.
    optimizer: Any TFF optimizer, or one for each tier; or `Exact`, which solves
      for the weights instead of taking steps: batches, epochs and order then
      make no difference. Plain gradient descent touches only the rows of an
      embedding table that a batch reads. The schedule of
      `tff.learning.optimizers.schedule_learning_rate` counts the steps of a
      client, not rounds: `slots` sets since when.
    slots: Treatment of optimizer slots, such as moments and the step count.
      'reset', the default, initializes them again in each round, so that a
      schedule counts steps within a round. 'kept' keeps those of LOCAL and
      PERSONAL weights with the client, so that a schedule counts steps over a
      client's life; those of other weights are reset. An optimizer with a
      schedule requires one of the two.
    rate_factor: Factor on learning rates; or a function from the number of
      completed rounds, an int32 scalar, to the factor: a schedule by round.
    batch_size: Examples per step; the last batch of an epoch may be smaller.
      None uses all examples in each step; padding then changes rounding.
    drop_remainder: True to drop the last batch of an epoch if it is smaller. A
      client with fewer examples than a batch then takes no step, and has the
      weight zero if the phase is measured.
    epochs: Maximum number of passes over the examples; or a function from the
      number of completed rounds, an int32 scalar, to it.
    max_steps: Maximum number of batches; None for no limit. 0 skips the phase.
    steps_per_batch: Steps on each batch.
    shuffle: True to reorder the examples in each epoch.
    variable_filter: A regular expression over whole variable names: others are
      not trained.
    terms: Losses to add to the model's own.
    loss: A loss or its name in place of the model's, with the same arguments.
    use_model_loss: False to train only on terms, not on the loss.
    weights_fn: The weights that the model reads, computed from those that the
      client holds. The default is `tiers.personal_copy` for phases that train
      PERSONAL, and `tiers.server_and_local_weights` for others.
    measured: True if the phase's predictions count in the metrics and its
      examples in the client's weight. Predictions are made before each step on
      a batch.
    predict_fn: Computes predictions that replace the model's, from these and
      the rest of the client's context; for phases that train nothing, or only
      on terms.
    through: A phase with `Exact` that solves for LOCAL weights. Before each
      step they are solved for again, and the gradient passes through the
      solution: it includes how the solution moves with the weights that are
      trained. By default, other weights are constants. The client's own LOCAL
      weights stay as they are.
  """

  train: tuple[str, ...] = (tiers.GLOBAL,)
  on: splits.Part = dataclasses.field(default_factory=splits.everything)
  optimizer: Trainer | Mapping[str, Trainer] = dataclasses.field(
    default_factory=lambda: sgd(0.1)
  )
  batch_size: int | None = 20
  drop_remainder: bool = False
  epochs: int | Epochs = 1
  max_steps: int | None = None
  steps_per_batch: int = 1
  shuffle: bool = False
  variable_filter: str | None = None
  terms: tuple[Term, ...] = ()
  loss: losses.LossFn | None = None
  use_model_loss: bool = True
  weights_fn: tiers.WeightsFn | None = None
  measured: bool = False
  predict_fn: PredictFn | None = None
  through: 'Phase | None' = None
  slots: str | None = None
  rate_factor: float | RateFactor = 1.0

  def __post_init__(self) -> None:
    train = tiers.check_tiers(self.train, 'Phase(train=...)')
    object.__setattr__(self, 'train', train)
    half = 'one part of a split, such as `splits.halves().support`'
    spelling.check_kind('on', self.on, splits.Part, half, PhaseError)
    read = "a function of the client's weights, such as `tiers.personal_copy`"
    spelling.check_kind(
      'weights_fn', self.weights_fn, Callable | None, read, PhaseError
    )
    names = self.variable_filter
    if isinstance(names, str) and (wrong := spelling.why_no_pattern(names)):
      raise PhaseError(f'variable_filter={wrong}')
    several = 'functions in brackets, such as `(terms.proximal(0.1),)`'
    spelling.check_kind('terms', self.terms, list | tuple, several, PhaseError)
    self._check_predict_fn()
    self._check_through()
    is_read = self.read is not tiers.personal_copy or self.terms
    if tiers.GLOBAL in train and not is_read:
      raise PhaseError(
        f'train={train}: the loss does not depend on the {tiers.GLOBAL!r} '
        "weights where the model reads the client's own copy of them, so that "
        'they would stay as they are. Train them in a phase of their own, or '
        'name terms that depend on them.'
      )
    for name in ('batch_size', 'epochs', 'steps_per_batch', 'max_steps'):
      value = getattr(self, name)
      is_open = value is None and name in ('batch_size', 'max_steps')
      if is_open or (callable(value) and name == 'epochs'):
        continue
      least = 0 if name == 'max_steps' else None
      checked_numbers.check_whole(PhaseError, least, **{name: value})
      if name != 'max_steps' and value < 1:
        raise PhaseError(
          f'{name} must be positive, found {value}. To skip a phase, pass '
          'max_steps=0.'
        )
    if self.drop_remainder and self.batch_size is None:
      raise PhaseError(
        'drop_remainder=True with batch_size=None: a batch of all examples has '
        'no remainder. Give a batch size.'
      )
    if train and not (self.use_model_loss or self.terms):
      raise PhaseError(
        'The phase trains on nothing: use_model_loss=False, and no terms.'
      )
    if isinstance(self.optimizer, Mapping):
      tiers.check_tiers(self.optimizer, 'Phase(optimizer=...)')
    self._check_rates()
    if any(isinstance(self.optimizer_of(t), Exact) for t in self._optimized()):
      self._check_exact()
      return
    for tier in train:
      self._check_optimizer(tier)

  def __repr__(self) -> str:
    """Return the settings that differ from the defaults, as a short text."""
    chosen = {'train': self.train, 'on': self.on.name}
    said = {*chosen} if self.train else {*chosen, 'optimizer'}
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name not in said and value != field.default:
        chosen[field.name] = optimizers.in_words(value)
    return f'Phase({", ".join(f"{k}={v}" for k, v in chosen.items())})'

  def _check_predict_fn(self) -> None:
    answer = 'a function from a `ClientContext` to predictions'
    spelling.check_kind(
      'predict_fn', self.predict_fn, Callable | None, answer, PhaseError
    )
    if self.predict_fn and self.train and self.use_model_loss:
      raise PhaseError(
        f'train={self.train}: a phase that trains learns from the predictions '
        'of the model, so that it has no `predict_fn`. Measure in a phase of '
        'its own, with train=().'
      )

  def _check_through(self) -> None:
    if (solve := self.through) is None:
      return
    solves = isinstance(solve, Phase) and solve.exact and solve.max_steps != 0
    if not solves or solve.train != (tiers.LOCAL,):
      raise PhaseError(
        f'through={solve!r}: gradients pass through the solution of '
        f'Phase(train=({tiers.LOCAL!r},), optimizer=Exact()).'
      )
    if not self.train or self.exact or tiers.LOCAL in self.train:
      raise PhaseError(
        f'train={self.train}: a phase whose gradients pass through the '
        f'solution for {tiers.LOCAL!r} weights trains others, by an optimizer.'
      )

  def _check_rates(self) -> None:
    if self.slots not in (None, RESET, KEPT):
      raise PhaseError(
        f'slots={self.slots!r}: what an optimizer remembers is {RESET!r} in '
        f'each round, or {KEPT!r} with the client.'
      )
    if not callable(self.rate_factor) and (
      wrong := checked_numbers.why_negative(self.rate_factor)
    ):
      raise PhaseError(f'rate_factor: {wrong}.')

  def _optimized(self) -> tuple[str, ...]:
    """Return the trained tiers that have an optimizer."""
    if isinstance(self.optimizer, Mapping):
      return tuple(tier for tier in self.train if tier in self.optimizer)
    return self.train

  def _check_exact(self) -> None:
    """Refuse settings that have no effect on an exact solve."""
    if len({id(self.optimizer_of(tier)) for tier in self._optimized()}) > 1 or (
      set(self._optimized()) != set(self.train)
    ):
      raise PhaseError(
        f'train={self.train}: weights that are solved for exactly and weights '
        'that an optimizer trains are in phases of their own, one after '
        'another.'
      )
    if tiers.CLIENT_VALUES in self.train:
      raise PhaseError(
        'Exact solves for variables of the model, not for '
        f'{tiers.CLIENT_VALUES!r}.'
      )
    if self.measured:
      raise PhaseError(
        'measured=True: an exact solve has no batches that could be measured '
        'before a step. Measure in a phase of its own, with train=().'
      )
    for name, idle in (
      *(('epochs', 1), ('steps_per_batch', 1), ('rate_factor', 1.0)),
      *(('shuffle', False), ('drop_remainder', False), ('slots', RESET)),
      ('max_steps', 0),
    ):
      value = getattr(self, name)
      if value not in (idle, None):
        raise PhaseError(
          f'{name}={optimizers.in_words(value)} has no effect on an exact '
          'solve, which takes no steps. Leave it out.'
        )

  def _check_optimizer(self, tier: str) -> None:
    optimizer = self.optimizer_of(tier)
    if not isinstance(optimizer, tff.learning.optimizers.Optimizer):
      raise PhaseError(f'A phase takes {optimizers.instead_of(optimizer)}')
    if self.slots is None and optimizers.is_scheduled(optimizer):
      raise PhaseError(
        'A schedule of `tff.learning.optimizers` counts the steps of a client, '
        f'not rounds. Say since when: slots={RESET!r} for steps within a '
        f"round, slots={KEPT!r} for steps over a client's life. For a schedule "
        'by round, give the optimizer itself, and rate_factor=lambda done: ...'
      )
    if self.rate_factor != 1.0 and not optimizers.has_rate(optimizer):
      raise PhaseError(
        f'rate_factor: {type(optimizer).__name__.strip("_")}, which trains '
        f'{tier!r}, has no learning rate that could be multiplied. Take an '
        'optimizer of `tff.learning.optimizers` without a schedule of its own, '
        'or leave `rate_factor` out.'
      )

  @property
  def read(self) -> tiers.WeightsFn:
    """Function from the client's weights to those that the model reads."""
    if self.weights_fn is None and tiers.PERSONAL in self.train:
      return tiers.personal_copy
    return self.weights_fn or tiers.server_and_local_weights

  @property
  def exact(self) -> Exact | None:
    """The exact solve that replaces steps; None if the phase takes steps."""
    for tier in self._optimized():
      optimizer = self.optimizer_of(tier)
      return optimizer if isinstance(optimizer, Exact) else None
    return None

  def optimizer_of(self, tier: str) -> Any:
    """Return the optimizer of a tier.

    Raises:
      PhaseError: If there are some for other tiers alone.
    """
    if not isinstance(self.optimizer, Mapping):
      return self.optimizer
    if tier not in self.optimizer:
      raise PhaseError(
        f'The phase trains {tier!r} but has optimizers for '
        f'{list(self.optimizer)} alone.'
      )
    return self.optimizer[tier]

  def trains(self, name: str) -> bool:
    """Return True if a variable of a trained tier is trained."""
    return (
      self.variable_filter is None
      or re.fullmatch(self.variable_filter, name) is not None
    )


class Interleaved(NamedTuple):
  """Phases that take turns on each batch, instead of one after another.

  Attributes:
    phases: They must have the same batches: `on`, `batch_size`,
      `drop_remainder`, `epochs`, `max_steps` and `shuffle`.
  """

  phases: tuple[Phase, ...]


Part: TypeAlias = (
  Phase
  | Interleaved
  | groups.Assign
  | contexts.Compute
  | contexts.OverwriteWeights
)
Work: TypeAlias = Sequence[Part]

# What interleaved phases have in common: their batches.
SCHEDULE = (
  *('on', 'batch_size', 'drop_remainder', 'epochs', 'max_steps', 'shuffle'),
)


def interleaved_phases(part: Phase | Interleaved) -> tuple[Phase, ...]:
  """Return the phases that take turns on each batch."""
  return part.phases if isinstance(part, Interleaved) else (part,)


def changed(phase: Phase, **settings: Any) -> Phase:
  """Return a phase with other settings; raise an error for what is none."""
  if not isinstance(phase, Phase):
    found = type(phase).__name__
    if isinstance(phase, Optimizer):
      found = f'the optimizer {optimizers.in_words(phase)} alone'
    raise PhaseError(
      f'A phase of training is expected, found {found}. Pass '
      '`Phase(optimizer=...)`, with one of `tff.learning.optimizers`.'
    )
  return dataclasses.replace(phase, **settings)


def placed(part: Any, on: splits.Part) -> Any:
  """Return a part of a client's work on other examples, if it chose none."""
  if isinstance(part, Interleaved):
    return Interleaved(tuple(placed(phase, on) for phase in part.phases))
  if hasattr(part, '_replace'):  # It is between phases.
    return part._replace(on=on)
  phase = changed(part, on=on)
  if part.on.name not in (splits.everything().name, on.name):
    raise PhaseError(
      f'Phase(on={part.on.name}): its examples are those that `split` '
      f'chooses, {on.name}. Leave `on` out, or change `split`.'
    )
  return phase


def all_phases(work: Work) -> list[Phase]:
  """Return all phases of a client's work."""
  return [
    phase
    for part in work
    if isinstance(part, Phase | Interleaved)
    for phase in interleaved_phases(part)
  ]
