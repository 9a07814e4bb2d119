"""Options of an optimizer, of clients or of the server."""

from collections.abc import Callable
import dataclasses
from typing import Any

import tensorflow_federated as tff

from tasks.errors import OptionError
from tasks.options import option
from tasks.options import Options
from tff_partial import phases

_OPTIMIZERS: dict[str, Callable[..., phases.Optimizer]] = {
  'sgd': tff.learning.optimizers.build_sgdm,
  'adagrad': tff.learning.optimizers.build_adagrad,
  'adam': tff.learning.optimizers.build_adam,
  'rmsprop': tff.learning.optimizers.build_rmsprop,
  'yogi': tff.learning.optimizers.build_yogi,
}
_HAVE_BETA_2 = ('adam', 'yogi')


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
    'sgd', 'Trains {0.what}.', choices=sorted(_OPTIMIZERS), is_common=True
  )
  learning_rate: float = option(
    0.1, 'Learning rate for {0.what}.', at_least=0, is_common=True
  )
  momentum: float = option(
    0.0, 'Momentum for {0.what}; for sgd alone.', at_least=0, at_most=1
  )
  epsilon: float | None = option(
    None, 'Epsilon for {0.what}; for adaptive optimizers alone.', at_least=0
  )
  beta_2: float | None = option(
    None,
    'Decay of the second moment for {0.what}; for adam and yogi alone.',
    at_least=0,
    at_most=1,
  )

  def flag_prefix(self) -> str:
    """Return the prefix of its flags' names."""
    return f'{self.name}_'

  def __post_init__(self) -> None:
    """Refuse options that the optimizer does not have."""
    super().__post_init__()
    if self.optimizer != 'sgd' and self.momentum:
      raise OptionError(
        f'--{self.name}_momentum: {self.optimizer} has no momentum of this '
        f'kind. Leave the flag out, or use --{self.name}_optimizer=sgd.'
      )
    if self.optimizer == 'sgd' and self.epsilon is not None:
      raise OptionError(
        f'--{self.name}_epsilon: sgd has no epsilon. Leave the flag out, or '
        'choose an adaptive optimizer.'
      )
    if self.optimizer not in _HAVE_BETA_2 and self.beta_2 is not None:
      raise OptionError(
        f'--{self.name}_beta_2: {self.optimizer} has none. Leave the flag out, '
        f'or choose one of {", ".join(_HAVE_BETA_2)}.'
      )

  def build(self) -> phases.Optimizer:
    """Build TFF's optimizer."""
    extra: dict[str, Any] = {}
    if self.optimizer == 'sgd':
      extra['momentum'] = self.momentum or None
    elif self.epsilon is not None:
      extra['epsilon'] = self.epsilon
    if self.beta_2 is not None:
      extra['beta_2'] = self.beta_2
    return _OPTIMIZERS[self.optimizer](
      learning_rate=self.learning_rate, **extra
    )
