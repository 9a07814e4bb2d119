"""The base of all errors that are made for users to read."""


class UserError(Exception):
  """An error whose message says what is wrong, where, and what to do.

  Programs print the message alone; a traceback would only hide it.
  """
