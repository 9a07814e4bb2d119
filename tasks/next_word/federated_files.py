"""Client texts from the files of TFF's federated data sets.

TFF fetches SQLite files: the table `client_metadata` (client_id, split_name,
num_examples) has the clients of each part, the table `examples` (client_id,
split_name, serialized_example_proto) their examples, each a serialized
`tf.train.Example`. TFF's own loader queries one client at a time, which reads
the whole file for each of them; here all of them are one query.

Stack Overflow has, among others, the fields `tokens`, separated by spaces, and
`creation_date`; Shakespeare has `snippets` of the lines of a role, in order and
without a time.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import os
import pathlib
import sqlite3
import tempfile
from typing import Any, NamedTuple
import urllib.parse

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tasks.errors import DataError
from tasks.next_word.sentences import Limits
from tasks.next_word.sentences import Message
from tasks.next_word.sentences import NO_TIME

# Rows to process together.
_ROWS = 1024
# Long enough for 2010-01-08 09:34:05.1 UTC without fractions.
_DATE = 'S19'

# (cache_dir=) -> the parts of the data set, which are ignored here.
_LoadData = Callable[..., Any]


class DataSet(NamedTuple):
  """One of TFF's data sets.

  Attributes:
    name: Name of its file and folder.
    parts: The names of the parts to read, in this order.
    text: The field with the text of an example.
    date: The field with its time, or None.
    load_data: TFF's loader, which fetches it.
    size: Size of the download, for messages.
  """

  name: str
  parts: tuple[str, ...]
  text: str
  date: str | None
  load_data: _LoadData
  size: str

  @property
  def file(self) -> str:
    """Name of its file."""
    return f'{self.name}.sqlite'


# Sentences before 2018 of 342,477 users. Held-out and later ones are not read:
# users are divided here.
STACKOVERFLOW = DataSet(
  'stackoverflow',
  ('train',),
  'tokens',
  'creation_date',
  tff.simulation.datasets.stackoverflow.load_data,
  'some gigabytes',
)
# Each role has snippets in both parts.
SHAKESPEARE = DataSet(
  'shakespeare',
  ('train', 'test'),
  'snippets',
  None,
  tff.simulation.datasets.shakespeare.load_data,
  'some megabytes',
)


def read(
  data_set: DataSet, folder: str | os.PathLike[str], limits: Limits
) -> Iterator[Message]:
  """Read the texts of clients, one client after another.

  Args:
    data_set: The data set.
    folder: Holds its file, or a folder of its name that does.
    limits: Draws the clients to read.

  Returns:
    An iterator over the texts, which may also raise the errors below.

  Raises:
    DataError: If the file is missing, damaged, or of another format; names it,
      and a remedy.
  """
  root = pathlib.Path(os.path.expanduser(folder))
  for place in (root / data_set.name, root):
    path = place / data_set.file
    if path.is_file():
      return _messages(data_set, path, limits)
  raise DataError(
    f'{root}: there is no file {data_set.file} in the folder or in its '
    f'sub-folder {data_set.name!r}. {_remedy(data_set)}'
  )


def download(
  data_set: DataSet,
  folder: str | os.PathLike[str],
  load_data: _LoadData | None = None,
) -> pathlib.Path:
  """Have TFF fetch a data set unless its file exists.

  The file appears whole or not at all.

  Args:
    data_set: The data set.
    folder: Receives a folder of its name with the file.
    load_data: Loads it; TFF's loader by default.

  Returns:
    The file.

  Raises:
    DataError: If it cannot be fetched or written.
  """
  place = pathlib.Path(os.path.expanduser(folder)) / data_set.name
  path = place / data_set.file
  if path.is_file():
    return path
  try:
    place.mkdir(parents=True, exist_ok=True)
    # TFF would later take a partial file for a complete one.
    with tempfile.TemporaryDirectory(
      dir=place, prefix=f'.{data_set.name}-', suffix='.part'
    ) as scratch:
      (load_data or data_set.load_data)(cache_dir=scratch)
      os.rename(pathlib.Path(scratch, path.name), path)
  except Exception as error:
    # Any exception of the loader: network, disk, or a broken archive.
    raise DataError(
      f'{path}: TFF cannot fetch it ({error}). Check the connection and the '
      'folder, and try again. What was fetched is deleted.'
    ) from error
  return path


def _remedy(data_set: DataSet) -> str:
  return (
    f"Have TFF fetch it ({data_set.size}) with --download, put TFF's file "
    'there, name another folder with --data_dir or $TFF_PARTIAL_DATA_DIR, or '
    'use --data=synthetic, which needs no files.'
  )


def _messages(
  data_set: DataSet, path: pathlib.Path, limits: Limits
) -> Iterator[Message]:
  address = f'file:{urllib.parse.quote(str(path.resolve()))}?mode=ro'
  marks = ', '.join('?' * len(data_set.parts))
  try:
    with contextlib.closing(sqlite3.connect(address, uri=True)) as database:
      found = database.execute(
        'SELECT DISTINCT client_id FROM client_metadata '
        f'WHERE split_name IN ({marks})',
        data_set.parts,
      )
      clients = limits.draw([client for (client,) in found])
      if not clients:
        raise DataError(
          f'{path}: has no client of the parts {data_set.parts}. '
          f'{_remedy(data_set)}'
        )
      # SQLite uses an index of clients if the file has one.
      database.execute('CREATE TEMP TABLE drawn (client_id PRIMARY KEY)')
      database.executemany(
        'INSERT INTO drawn VALUES (?)', ((client,) for client in clients)
      )
      for part in data_set.parts:
        cursor = database.execute(
          'SELECT client_id, serialized_example_proto FROM examples '
          'WHERE split_name = ? AND client_id IN drawn',
          (part,),
        )
        while rows := cursor.fetchmany(_ROWS):
          yield from _parsed(data_set, path, rows)
  except sqlite3.Error as error:
    raise DataError(
      f'{path}: is no SQLite file of TFF, or damaged ({error}). Delete it. '
      f'{_remedy(data_set)}'
    ) from error


def _parsed(
  data_set: DataSet, path: pathlib.Path, rows: Sequence[tuple[str, bytes]]
) -> Iterator[Message]:
  """Yield the messages of rows, each a client and a serialized example."""
  wanted = [name for name in (data_set.text, data_set.date) if name]
  times = np.full(len(rows), NO_TIME)
  try:
    fields = tf.io.parse_example(
      tf.constant([example for _, example in rows], tf.string),
      {name: tf.io.FixedLenFeature([], tf.string) for name in wanted},
    )
    if data_set.date is not None:
      written = fields[data_set.date].numpy().astype(_DATE).astype(np.str_)
      times = written.astype('datetime64[s]').astype(np.int64)
      if (times < 0).any():
        raise ValueError('a time is missing')
    texts = fields[data_set.text].numpy()
    for (client, _), time, text in zip(
      rows, times.tolist(), texts, strict=True
    ):
      yield Message(client, time, text.decode())
  except (tf.errors.InvalidArgumentError, TypeError, ValueError) as error:
    raise DataError(
      f'{path}, from the examples of client {rows[0][0]!r} on: the fields '
      f'{" and ".join(wanted)} are missing or damaged ({error!s:.100}). Delete '
      f'it. {_remedy(data_set)}'
    ) from error
