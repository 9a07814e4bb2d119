"""Base class of all errors that are meant for users to read."""

from typing import Any, Self


class UserError(Exception):
  """An error whose message says what is wrong, where, and what to do.

  Programs print only the message; a traceback would hide it. The error can be
  pickled, whatever the arguments of its constructor.
  """

  def __reduce__(self) -> tuple[Any, ...]:
    return type(self)._again, (str(self), vars(self))

  @classmethod
  def _again(cls, message: str, attributes: dict[str, Any]) -> Self:
    error = cls.__new__(cls)
    error.args = (message,)
    vars(error).update(attributes)
    return error


class SettingError(UserError, ValueError):
  """Raised for an argument that is out of range, or does not fit the others."""


class PrivacyError(UserError, ValueError):
  """Raised if no guarantee of privacy is possible for the arguments."""
