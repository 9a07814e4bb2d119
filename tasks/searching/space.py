"""The search space: flags, and the values that they may have."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from tasks.errors import OptionError
from tff_partial_programs import spelling

_FORMS = (
  'flag=float:LOW:HIGH, flag=log:LOW:HIGH, flag=int:LOW:HIGH, '
  'flag=logint:LOW:HIGH or flag=choice:A,B,...'
)
_NUMBERS: dict[str, tuple[type[int] | type[float], bool]] = {
  'float': (float, False),
  'log': (float, True),
  'int': (int, False),
  'logint': (int, True),
}
_CHOICE = 'choice'
# The search decides these itself.
_TAKEN = ('rounds', 'output_dir')


@dataclasses.dataclass(frozen=True)
class Parameter:
  """A flag that is varied.

  Attributes:
    flag: Its name.
    text: Its `--search` argument.
    suggest: Draws its value for an Optuna trial.
  """

  flag: str
  text: str
  suggest: Callable[[Any], Any]


def parse(texts: Sequence[str], known: Sequence[str]) -> list[Parameter]:
  """Parse the flags to vary.

  Args:
    texts: Strings such as `server_learning_rate=log:0.01:1`.
    known: The flags that a run has.

  Raises:
    OptionError: If a string has none of the forms, or names a flag that does
      not exist, that is named twice, or that the search decides.
  """
  found: list[Parameter] = []
  for text in texts:
    flag, _, values = text.partition('=')
    if flag not in known:
      raise OptionError(
        f'--search={text}: tasks.train has no flag {flag!r}.'
        f'{spelling.hint(flag, known)} Say what to vary as {_FORMS}.'
      )
    if flag in _TAKEN:
      raise OptionError(
        f'--search={text}: the search itself decides --{flag}. Leave it out.'
      )
    if flag in (parameter.flag for parameter in found):
      raise OptionError(f'--search={text}: {flag} is searched twice.')
    found.append(_parameter(text, flag, values))
  return found


def _parameter(text: str, flag: str, values: str) -> Parameter:
  kind, _, rest = values.partition(':')
  if kind == _CHOICE:
    choices = rest.split(',')
    if len(set(choices)) < 2 or len(set(choices)) < len(choices):
      raise OptionError(
        f'--search={text}: give two different values or more, such as '
        f'{flag}=choice:A,B.'
      )
    return Parameter(
      flag, text, lambda trial: trial.suggest_categorical(flag, choices)
    )
  if kind not in _NUMBERS:
    raise OptionError(f'--search={text}: expected {_FORMS}.')
  number, is_log = _NUMBERS[kind]
  try:
    low, high = map(number, rest.split(':'))
  except ValueError:
    raise OptionError(
      f'--search={text}: give two numbers after {kind}:, such as '
      f'{flag}={kind}:1:10.'
    ) from None
  if not low < high < float('inf') or (is_log and low <= 0):
    raise OptionError(
      f'--search={text}: the lower end must lie below the upper one'
      f'{", and above 0" if is_log else ""}.'
    )

  def suggest(trial: Any) -> Any:
    if number is int:
      return trial.suggest_int(flag, low, high, log=is_log)
    return trial.suggest_float(flag, low, high, log=is_log)

  return Parameter(flag, text, suggest)
