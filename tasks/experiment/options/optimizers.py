"""Options of an optimizer, of clients or of the server."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from tasks.errors import OptionError
from tasks.options import option
from tasks.options import Options
import tff_partial
from tff_partial_programs import spelling

if TYPE_CHECKING:
  from tff_partial import phases

# Solves for weights instead; for weights that clients do not send.
EXACT = 'exact'
# Optimizers of TFF, which calls the first one sgdm, and the numbers that may
# follow their names, as in sgd:momentum=0.9.
_NUMBERS = {
  'sgd': ('momentum',),
  'adagrad': ('epsilon',),
  'adam': ('epsilon', 'beta_2'),
  'rmsprop': ('epsilon',),
  'yogi': ('epsilon', 'beta_2'),
  EXACT: ('ridge',),
}
_OPTIMIZERS = sorted(set(_NUMBERS) - {EXACT})
# With a beta_2 of 1, the corrected second moment is 0/0, and no step is taken.
_LARGEST = {'momentum': (1.0, ' to 1'), 'beta_2': (1.0 - 2**-24, ' to below 1')}


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
    'Optimizer for {0.what}. One of {0.kinds}; with numbers after colons, as '
    'in sgd:momentum=0.9 or yogi:beta_2=0.99:epsilon=1e-4.',
  )
  learning_rate: float = option(
    0.1, 'Learning rate for {0.what}.', at_least=0, is_common=True
  )

  @property
  def flag_prefix(self) -> str:  # type: ignore[override]
    return f'{self.name}_'

  def __post_init__(self) -> None:
    """Refuse unknown optimizers, and numbers that one does not have."""
    super().__post_init__()
    flag = f'--{self.name}_optimizer'
    if self.kind not in _NUMBERS:
      raise OptionError(
        f'{flag}={self.kind:.80}: '
        f'{spelling.choose(self.kind, self.kinds.split(", "))}'
      )
    if self.kind == EXACT and self.name != 'reconstruction':
      raise OptionError(
        f'{flag}={EXACT}: only weights that stay with a client are solved for. '
        'Give --reconstruction_optimizer=exact.'
      )
    for name, number in self._numbers().items():
      if name not in _NUMBERS[self.kind]:
        others = [kind for kind, known in _NUMBERS.items() if name in known]
        raise OptionError(
          f'{flag}={self.kind}:{name}: {self.kind} has no {name}. Leave it '
          f'out, or choose {", ".join(others)}.'
        )
      largest, in_words = _LARGEST.get(name, (math.inf, ''))
      is_least = number > 0 if name == 'ridge' else number >= 0
      if not (is_least and number <= largest and math.isfinite(number)):
        raise OptionError(
          f'{flag}={self.kind}:{name}={number:g}: give a number '
          f'{"above" if name == "ridge" else "from"} 0{in_words}.'
        )

  @property
  def kinds(self) -> str:
    """The names to choose from; only local weights can be solved for."""
    is_local = self.name == 'reconstruction'
    return ', '.join(sorted(_NUMBERS) if is_local else _OPTIMIZERS)

  @property
  def kind(self) -> str:
    """The optimizer's name, without numbers."""
    return self.optimizer.partition(':')[0]

  def _numbers(self) -> dict[str, float]:
    numbers = {}
    known = {name for names in _NUMBERS.values() for name in names}
    for text in self.optimizer.split(':')[1:]:
      name, _, number = text.partition('=')
      try:
        if name not in known:
          raise ValueError
        numbers[name] = float(number)
      except ValueError:
        raise OptionError(
          f'--{self.name}_optimizer={self.optimizer:.80}: give numbers such as '
          f'momentum=0.9; the names are {", ".join(sorted(known))}.'
        ) from None
    return numbers

  def build(self) -> phases.Trainer:
    """Build TFF's optimizer, or the exact solve."""
    numbers = self._numbers()
    if self.kind == EXACT:
      return tff_partial.Exact(ridge=numbers.get('ridge', 1.0))
    import tensorflow_federated as tff

    name = 'sgdm' if self.kind == 'sgd' else self.kind
    build = getattr(tff.learning.optimizers, f'build_{name}')
    return build(learning_rate=self.learning_rate, **numbers)
