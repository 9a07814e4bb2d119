"""What can be chosen, each choice said once: its default, text and limits.

A class of options is a frozen dataclass whose fields come from `option`, or are
options themselves. In Python one fills its fields; on the command line each
choice is a flag (`tasks/experiment/flags.py` derives them). Both refuse the
same values.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import math
import numbers
from typing import (
  Any,
  cast,
  ClassVar,
  get_args,
  get_type_hints,
  NamedTuple,
  Self,
)

import numpy as np

from tasks.errors import OptionError
from tff_partial_programs import spelling

_OPTION = 'option'
# What values of a type may be, and how messages call them.
_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
  bool: ((bool, np.bool_), 'True or False'),
  int: ((numbers.Integral,), 'a whole number'),
  float: ((numbers.Real,), 'a number'),
  str: ((str,), 'a text'),
  tuple[int, ...]: ((tuple,), 'a tuple of whole numbers'),
  tuple[str, ...]: ((tuple,), 'a tuple of texts'),
}
_LARGEST_INTEGER = 2**31


@dataclasses.dataclass(frozen=True)
class Option:
  """What a class of options says of a field.

  Attributes:
    text: What it is for.
    flag: The name of its flag; by default that of the field.
    choices: All values that it may have, if these are few.
    at_least: The smallest value.
    at_most: The largest one.
    for_none: What the command line says for None.
    may_be_infinite: Whether a number may be infinite.
    is_repeated: Whether each of several texts has a flag of its own; otherwise
      all stand behind one, with commas.
    differs_by_task: Whether tasks have defaults of their own.
    may_change: Whether a run may go on with another value, since it changes no
      number.
    group: Under which its flag stands in the help, if not with its class.
    is_common: Whether the short help shows it, too.
  """

  text: str
  flag: str | None = None
  choices: tuple[str, ...] | None = None
  at_least: float | None = None
  at_most: float | None = None
  for_none: int | None = None
  may_be_infinite: bool = False
  is_repeated: bool = False
  differs_by_task: bool = False
  may_change: bool = False
  group: str | None = None
  is_common: bool = False


def option(
  default: Any, text: str, *, choices: Sequence[str] = (), **limits: Any
) -> Any:
  """Make a field of a class of options.

  Args:
    default: The value if nothing is chosen.
    text: What it is for. `{0.name}` stands for another field.
    choices: All values that it may have, if these are few.
    **limits: What else an `Option` says.
  """
  said = Option(text, choices=tuple(choices) or None, **limits)
  return dataclasses.field(default=default, metadata={_OPTION: said})


@dataclasses.dataclass(frozen=True)
class Choice:
  """A choice among options.

  Attributes:
    path: The names of the fields that lead to it.
    flag: The name of its flag.
    title: Under which the flag stands in the help.
    text: What it is for.
    value: What is chosen.
    kind: bool, int, float, str, or a tuple of int or str.
    may_be_none: Whether None can be chosen.
    option: What else the class says of it.
  """

  path: tuple[str, ...]
  flag: str
  title: str
  text: str
  value: Any
  kind: Any
  may_be_none: bool
  option: Option

  @property
  def on_command_line(self) -> Any:
    """The value as its flag says it."""
    if self.value is None:
      return self.option.for_none
    if isinstance(self.value, tuple) and not self.option.is_repeated:
      return ','.join(map(str, self.value))
    return self.value

  def checked(self) -> Any:
    """The value as its type, or a refusal of what cannot be chosen.

    Raises:
      OptionError: With the name of the flag, and what is possible.
    """
    value, said = self.value, self.option
    if value is None and self.may_be_none:
      return None
    name = f'--{self.flag}={value!s:.80}'
    if said.choices is not None and value not in said.choices:
      raise OptionError(f'{name}: {spelling.choose(value, said.choices)}')
    allowed, wanted = _KINDS[self.kind]
    is_truth = isinstance(value, (bool, np.bool_))
    if not isinstance(value, allowed) or is_truth != (self.kind is bool):
      raise OptionError(f'{name}: give {wanted}.')
    if self.kind in (int, float):
      self._check_number(name, value)
      return self.kind(value)
    return bool(value) if self.kind is bool else value

  def _check_number(self, name: str, value: Any) -> None:
    said = self.option
    if self.kind is int and abs(value) >= _LARGEST_INTEGER:
      raise OptionError(f'{name}: give a number below {_LARGEST_INTEGER}.')
    if math.isnan(value) or math.isinf(value) and not said.may_be_infinite:
      raise OptionError(f'{name}: give a finite number.')
    if said.at_least is not None and not value >= said.at_least:
      raise OptionError(f'{name}: give at least {said.at_least:g}.')
    if said.at_most is not None and not value <= said.at_most:
      raise OptionError(f'{name}: give at most {said.at_most:g}.')


class Leak(NamedTuple):
  """A choice by which data would leave clients without noise.

  Attributes:
    flag: The flag of the choice.
    value: What is chosen.
    why: Which data leave, and how.
    remedy: What to do in a private run.
  """

  flag: str
  value: Any
  why: str
  remedy: str


class Options:
  """The base of all classes of options.

  Attributes:
    title: Under which their flags stand in the help.
  """

  title: ClassVar[str] = ''

  def __post_init__(self) -> None:
    """Check each choice by itself, and makes numbers of its type.

    Raises:
      OptionError: If one is impossible.
    """
    for choice in self.own_choices():
      object.__setattr__(self, choice.path[0], choice.checked())
    for field, kind in get_type_hints(type(self)).items():
      is_part = isinstance(kind, type) and issubclass(kind, Options)
      if is_part and not isinstance(getattr(self, field), kind):
        raise OptionError(
          f'{field}: give a {kind.__name__}, found '
          f'{getattr(self, field)!r:.80}.'
        )

  def flag_prefix(self) -> str:
    """Begins the names of their flags."""
    return ''

  def own_choices(self) -> Iterator[Choice]:
    """The choices of the class, without those of options in its fields."""
    types = get_type_hints(type(self))
    for field in dataclasses.fields(cast(Any, self)):
      said = field.metadata.get(_OPTION)
      if said is None:
        continue
      kind, may_be_none = types[field.name], False
      if type(None) in get_args(kind):
        (kind,) = (each for each in get_args(kind) if each is not type(None))
        may_be_none = True
      yield Choice(
        path=(field.name,),
        flag=said.flag or f'{self.flag_prefix()}{field.name}',
        title=said.group or self.title,
        text=said.text.format(self),
        value=getattr(self, field.name),
        kind=kind,
        may_be_none=may_be_none,
        option=said,
      )

  def choices(self) -> Iterator[Choice]:
    """All choices, with those of options in its fields."""
    yield from self.own_choices()
    for field in dataclasses.fields(cast(Any, self)):
      part = getattr(self, field.name)
      if isinstance(part, Options):
        for choice in part.choices():
          yield dataclasses.replace(
            choice,
            path=(field.name, *choice.path),
            title=choice.title or self.title,
          )

  def flags(self) -> dict[str, Any]:
    """What is chosen, as flags say it, by their names."""
    return {choice.flag: choice.on_command_line for choice in self.choices()}

  def may_change(self) -> set[str]:
    """The flags that a run may go on with other values of."""
    return {c.flag for c in self.choices() if c.option.may_change}

  def leaks(self) -> Iterator[Leak]:
    """Yield what a private run may not choose."""
    yield from ()

  def with_flags(self, values: Mapping[str, Any]) -> Self:
    """Return the same but for some choices.

    Args:
      values: Their values by the names of their flags.

    Raises:
      OptionError: If there is no such flag, or the value is impossible.
    """
    known = {choice.flag: choice.path for choice in self.choices()}
    for flag in values:
      if flag not in known:
        raise OptionError(
          f'--{flag}: there is no such flag here.'
          f'{spelling.hint(flag, known, "--")}'
        )
    return _changed(self, {known[flag]: v for flag, v in values.items()})


def _changed(options: Any, values: Mapping[tuple[str, ...], Any]) -> Any:
  """Options with new values by the paths that lead to them."""
  inner: dict[str, dict[tuple[str, ...], Any]] = {}
  changes: dict[str, Any] = {}
  for (first, *rest), value in values.items():
    if rest:
      inner.setdefault(first, {})[tuple(rest)] = value
    else:
      changes[first] = value
  for name, of_part in inner.items():
    changes[name] = _changed(getattr(options, name), of_part)
  return dataclasses.replace(options, **changes)
