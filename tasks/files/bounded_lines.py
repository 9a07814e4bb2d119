"""Lines of a file, none longer than a bound."""

from collections.abc import Iterator
import pathlib
from typing import AnyStr, IO

from tasks.errors import DataError


def read(
  path: pathlib.Path, file: IO[AnyStr], longest: int, unit: str, remedy: str
) -> Iterator[tuple[int, AnyStr]]:
  """Yield the lines of an open file with their numbers, from 1.

  No line is read further than the bound, so that one line of a compressed file
  cannot fill the memory.

  Args:
    path: Names the file in messages.
    file: The file, of text or of bytes.
    longest: Maximum length of a line in characters or bytes.
    unit: 'characters' or 'bytes', for the message.
    remedy: Ends the message.

  Raises:
    DataError: If a line is longer, or a text is not in UTF-8.
  """
  number = 0
  try:
    while line := file.readline(longest + 1):
      number += 1
      if len(line) > longest:
        raise DataError(
          f'{path}, line {number}: longer than {longest:,} {unit}{remedy}'
        )
      yield number, line
  except UnicodeDecodeError as error:
    # Texts are decoded some lines ahead.
    raise DataError(
      f'{path}, after line {number}: byte 0x{error.object[error.start]:02x} is '
      'no UTF-8. Save the file as UTF-8.'
    ) from None
