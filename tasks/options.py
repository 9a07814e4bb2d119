"""Classes of options, which define default, text and limits of each option.

A class of options is a frozen dataclass whose fields come from `option`, or are
options themselves. In Python these are fields; on the command line each is a
flag, or for those of `detail` a value of `--set`
(`tasks/experiment/command_line/flags.py` derives them). Both refuse the same
values.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
import dataclasses
import functools
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

# The flag that sets the options that have none.
SET = 'set'
_OPTION = 'option'
# Allowed types of the values of an option's type, and their name in messages.
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
  """The definition of an option, which is a field of a class of options.

  Attributes:
    text: Its purpose, for the help.
    flag: The name of its flag, or its name in `--set`; by default that of the
      field. Tasks share a flag by giving it the same name.
    python_only: True if it has no flag of its own; `--set=NAME=VALUE` sets it.
    choices: All allowed values, if they are few.
    at_least: The smallest allowed value.
    at_most: The largest allowed value.
    for_none: The value that stands for None on the command line.
    may_be_infinite: True if a number may be infinite.
    is_repeated: True if the flag is repeated for each of several strings;
      otherwise they are separated by commas.
    differs_by_task: True if its default depends on the task.
    may_change: True if a run may resume with another value, since it changes no
      result.
    group: The title of its group in the help, if not that of its class.
    is_common: True if the short help shows it.
  """

  text: str
  flag: str | None = None
  python_only: bool = False
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
    default: The default value.
    text: Its purpose, for the help. `{0.name}` inserts another field.
    choices: All allowed values, if they are few.
    **limits: Further attributes of `Option`.
  """
  said = Option(text, choices=tuple(choices) or None, **limits)
  return dataclasses.field(default=default, metadata={_OPTION: said})


def detail(default: Any, text: str, **limits: Any) -> Any:
  """Make a field of a class of options that has no flag, but `--set`."""
  return option(default, text, python_only=True, **limits)


class Choice(NamedTuple):
  """An option with its value.

  Attributes:
    path: The names of the fields that lead to it.
    flag: The name of its flag.
    title: The title of its group in the help.
    text: Its purpose, for the help.
    value: The chosen value.
    kind: bool, int, float, str, or a tuple of int or str.
    may_be_none: True if the value may be None.
    option: The definition of the option.
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
  def argument(self) -> str:
    """How the command line names it, without a value."""
    return (
      f'--{SET}={self.flag}' if self.option.python_only else f'--{self.flag}'
    )

  @property
  def on_command_line(self) -> Any:
    """The value in the form of its flag."""
    if self.value is None:
      return self.option.for_none
    if isinstance(self.value, tuple) and not self.option.is_repeated:
      return ','.join(map(str, self.value))
    return self.value

  def checked(self) -> Any:
    """Return the value, converted to its type, if it is allowed.

    Raises:
      OptionError: If it is not; names the flag and the allowed values.
    """
    value, said = self.value, self.option
    if value is None and self.may_be_none:
      return None
    name = f'{self.argument}={value!s:.80}'
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
  """A setting by which data would leave clients without noise.

  Attributes:
    flag: The flag of the setting.
    value: Its value.
    why: The data that leave, and how.
    remedy: The remedy in a private run.
  """

  flag: str
  value: Any
  why: str
  remedy: str


@functools.cache
def _types(kind: Any) -> dict[str, Any]:
  """Return the types of a class's fields; slow where they are strings."""
  return get_type_hints(kind)


@functools.cache
def _declared(kind: Any) -> list[tuple[str, Option, Any, bool]]:
  """Return field, definition, type and "may be None" of own options."""
  found = []
  for field in dataclasses.fields(kind):
    if (said := field.metadata.get(_OPTION)) is not None:
      type_of = _types(kind)[field.name]
      if may_be_none := type(None) in get_args(type_of):
        (type_of,) = {*get_args(type_of)} - {type(None)}
      found.append((field.name, said, type_of, may_be_none))
  return found


class Options:
  """The base of all classes of options.

  Attributes:
    title: The title of their flags in the help.
    flag_prefix: The prefix of their flags' names.
  """

  title: ClassVar[str] = ''
  flag_prefix: ClassVar[str] = ''

  def __post_init__(self) -> None:
    """Check each value by itself, and convert numbers to their types."""
    for choice in self.own_choices():
      object.__setattr__(self, choice.path[0], choice.checked())
    for field, kind in _types(cast(Any, type(self))).items():
      is_part = isinstance(kind, type) and issubclass(kind, Options)
      if is_part and not isinstance(getattr(self, field), kind):
        raise OptionError(
          f'{field}: give a {kind.__name__}, found '
          f'{getattr(self, field)!r:.80}.'
        )

  def argument(self, field: str) -> str:
    """Return how the command line names one of its own fields."""
    (found,) = (c for c in self.own_choices() if c.path == (field,))
    return found.argument

  def refuse_set(self, fields: Collection[str], why: str) -> None:
    """Refuse its own fields that are set although nothing would read them.

    Args:
      fields: Their names; those that the class does not have are left out.
      why: Ends the message.
    """
    for choice in self.own_choices():
      (field,) = choice.path
      if field in fields and choice.value != getattr(type(self), field):
        raise OptionError(f'{choice.argument}={choice.value}: {why}')

  def own_choices(self) -> Iterator[Choice]:
    """Yield the choices of the class, without those of nested options."""
    for name, said, kind, may_be_none in _declared(cast(Any, type(self))):
      yield Choice(
        path=(name,),
        flag=said.flag or f'{self.flag_prefix}{name}',
        title=said.group or self.title,
        text=said.text.format(self),
        value=getattr(self, name),
        kind=kind,
        may_be_none=may_be_none,
        option=said,
      )

  def choices(self) -> Iterator[Choice]:
    """Yield all choices, including those of nested options."""
    yield from self.own_choices()
    for field in dataclasses.fields(cast(Any, self)):
      part = getattr(self, field.name)
      if isinstance(part, Options):
        for choice in part.choices():
          yield choice._replace(
            path=(field.name, *choice.path), title=choice.title or self.title
          )

  def flags(self) -> dict[str, Any]:
    """Return the values of all choices in the form of flags, by name."""
    return {choice.flag: choice.on_command_line for choice in self.choices()}

  def may_change(self) -> set[str]:
    """Return the flags that may change when a run is resumed."""
    return {c.flag for c in self.choices() if c.option.may_change}

  def leaks(self) -> Iterator[Leak]:
    """Yield the settings that a private run may not have."""
    yield from ()

  def with_flags(self, values: Mapping[str, Any]) -> Self:
    """Return a copy with some choices changed.

    Args:
      values: New values by flag name.

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
  """Return options with new values, given by the paths of fields to them."""
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
