"""Options of an optimizer, of clients or of the server."""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING

from tasks.errors import OptionError
from tasks.options import detail
from tasks.options import option
from tasks.options import Options
import tff_partial
from tff_partial_programs import spelling

if TYPE_CHECKING:
  from tff_partial import phases

# Optimizers of TFF, which calls the first one sgdm.
SGD = 'sgd'
_OPTIMIZERS = ('adagrad', 'adam', 'rmsprop', SGD, 'yogi')
# Solves for weights instead; for weights that clients do not send.
EXACT = 'exact'
_HAVE_BETA_2 = ('adam', 'yogi')
# Options that may follow the optimizer's name, as in sgd:momentum=0.9.
_DETAILS = ('momentum', 'epsilon', 'beta_2', 'ridge')


@dataclasses.dataclass(frozen=True)
class Optimizer(Options):
  """An optimizer.

  Attributes:
    name: The prefix of its flags' names.
    what: The weights that it trains, for the flags' texts.
  """

  name: str
  what: str
  optimizer: str = option(
    'sgd',
    f'Trains {{0.what}}. One of {", ".join(_OPTIMIZERS)}; with numbers '
    'after colons, as in sgd:momentum=0.9 or yogi:beta_2=0.99:epsilon=1e-4.',
  )
  learning_rate: float = option(
    0.1, 'Learning rate for {0.what}.', at_least=0, is_common=True
  )
  momentum: float = detail(
    0.0, 'Momentum for {0.what}; for sgd alone.', at_least=0, at_most=1
  )
  epsilon: float | None = detail(
    None, 'Epsilon for {0.what}; for adaptive optimizers alone.', at_least=0
  )
  beta_2: float | None = detail(
    None,
    'Decay of the second moment for {0.what}; for adam and yogi alone.',
    at_least=0,
    at_most=1,
  )
  ridge: float = detail(
    1.0,
    'Weight of the squared distance of {0.what} to their prior mean; for exact '
    'alone.',
    at_least=0,
  )

  def flag_prefix(self) -> str:
    """Return the prefix of its flags' names."""
    return f'{self.name}_'

  def __post_init__(self) -> None:
    """Read the numbers after its name; refuse those that it does not have."""
    if isinstance(self.optimizer, str):
      optimizer, *details = self.optimizer.split(':')
      for detail in details:
        self._set(detail)
      object.__setattr__(self, 'optimizer', optimizer)
    super().__post_init__()
    if self.optimizer == EXACT:
      self._check_exact()
      return
    if self.ridge != 1.0:
      raise OptionError(
        f'--{self.name}_optimizer={self.optimizer}:ridge: {self.optimizer} has '
        f'no ridge. Leave it out, or choose {EXACT}.'
      )
    if self.optimizer not in _OPTIMIZERS:
      raise OptionError(
        f'--{self.name}_optimizer={self.optimizer:.80}: '
        f'{spelling.choose(self.optimizer, _OPTIMIZERS)}'
      )
    if self.optimizer != 'sgd' and self.momentum:
      raise OptionError(
        f'--{self.name}_optimizer={self.optimizer}:momentum: {self.optimizer} '
        'has no momentum of this kind. Leave it out, or choose sgd.'
      )
    if self.optimizer == 'sgd' and self.epsilon is not None:
      raise OptionError(
        f'--{self.name}_optimizer=sgd:epsilon: sgd has no epsilon. Leave it '
        'out, or choose an adaptive optimizer.'
      )
    if self.optimizer not in _HAVE_BETA_2 and self.beta_2 is not None:
      raise OptionError(
        f'--{self.name}_optimizer={self.optimizer}:beta_2: {self.optimizer} '
        f'has none. Leave it out, or choose one of {", ".join(_HAVE_BETA_2)}.'
      )

  def _check_exact(self) -> None:
    """Refuse an exact solve of weights that a client sends."""
    if self.name != 'reconstruction':
      raise OptionError(
        f'--{self.name}_optimizer={EXACT}: only weights that stay with a '
        'client are solved for. Give --reconstruction_optimizer=exact.'
      )
    if self.ridge <= 0:
      raise OptionError(
        f'--{self.name}_optimizer={EXACT}:ridge={self.ridge}: give a number '
        'above 0.'
      )

  def _set(self, detail: str) -> None:
    """Set one of the numbers after the optimizer's name."""
    name, _, number = detail.partition('=')
    try:
      if name not in _DETAILS:
        raise ValueError
      object.__setattr__(self, name, float(number))
    except ValueError:
      raise OptionError(
        f'--{self.name}_optimizer={self.optimizer:.80}: give numbers such as '
        f'momentum=0.9; the names are {", ".join(_DETAILS)}.'
      ) from None

  def build(self) -> phases.Trainer:
    """Build TFF's optimizer, or the exact solve."""
    if self.optimizer == EXACT:
      return tff_partial.Exact(ridge=self.ridge)
    import tensorflow_federated as tff

    extra: dict[str, Any] = {}
    if self.optimizer == 'sgd':
      extra['momentum'] = self.momentum or None
    elif self.epsilon is not None:
      extra['epsilon'] = self.epsilon
    if self.beta_2 is not None:
      extra['beta_2'] = self.beta_2
    name = 'sgdm' if self.optimizer == 'sgd' else self.optimizer
    build = getattr(tff.learning.optimizers, f'build_{name}')
    return build(learning_rate=self.learning_rate, **extra)
