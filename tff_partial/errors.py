"""The base of all errors that are made for users to read."""

from typing import Any, Self


class UserError(Exception):
  """An error whose message says what is wrong, where, and what to do.

  Programs print the message alone; a traceback would only hide it. It may
  travel from process to process, whatever its constructor takes.
  """

  def __reduce__(self) -> tuple[Any, ...]:
    return type(self)._again, (str(self), vars(self))

  @classmethod
  def _again(cls, message: str, attributes: dict[str, Any]) -> Self:
    error = cls.__new__(cls)
    error.args = (message,)
    vars(error).update(attributes)
    return error
