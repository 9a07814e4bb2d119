"""Client texts from the files of TFF's federated data sets.

TFF fetches SQLite files: the table `client_metadata` (client_id, split_name,
num_examples) has the clients of each part, the table `examples` (client_id,
split_name, serialized_example_proto) their examples, each a serialized
`tf.train.Example`. TFF's own loader queries one client at a time, which reads
the whole file for each of them; here all of them are one query.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import os
import pathlib
import sqlite3
import tempfile
from typing import Any, NamedTuple

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


class DataSet(NamedTuple):
  """One of TFF's data sets.

  Attributes:
    name: Name of its folder, and of its file without the suffix.
    parts: The names of the parts to read, in this order.
    text: The field with the text of an example.
    date: The field with its time, or None.
    load_data: TFF's loader, which fetches it into its `cache_dir`.
    size: Size of the download, for messages.
  """

  name: str
  parts: tuple[str, ...]
  text: str
  date: str | None
  load_data: Callable[..., Any]
  size: str


# Sentences before 2018 of 342,477 users, with spaces between the tokens.
# Held-out and later ones are not read: users are divided here.
STACKOVERFLOW = DataSet(
  'stackoverflow',
  ('train',),
  'tokens',
  'creation_date',
  tff.simulation.datasets.stackoverflow.load_data,
  'some gigabytes',
)
# The lines of a role, in order and without a time, in both parts.
SHAKESPEARE = DataSet(
  'shakespeare',
  ('train', 'test'),
  'snippets',
  None,
  tff.simulation.datasets.shakespeare.load_data,
  'some megabytes',
)


def read(
  data_set: DataSet,
  folder: str | os.PathLike[str],
  limits: Limits,
  *,
  download: bool = False,
) -> Iterator[Message]:
  """Yield the texts of clients, one client after another.

  Args:
    data_set: The data set.
    folder: Holds its file, or a folder of its name that does.
    limits: Draws the clients to read.
    download: True to have TFF fetch a missing file.

  Raises:
    DataError: If the file is missing, damaged, or of another format, or cannot
      be fetched; names it, and a remedy.
  """
  root = pathlib.Path(folder).expanduser()
  places = [root / data_set.name, root]
  paths = [place / f'{data_set.name}.sqlite' for place in places]
  found = [path for path in paths if path.is_file()]
  if not found and download:
    _download(data_set, paths[0])
    found = paths
  if not found:
    raise DataError(
      f'{root}: there is no file {paths[0].name} in the folder or in its '
      f'sub-folder {data_set.name!r}. {_remedy(data_set)}'
    )
  try:
    uri = f'{found[0].resolve().as_uri()}?mode=ro'
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as database:
      for rows in _rows(data_set, database, limits):
        yield from _parsed(data_set, rows)
  except sqlite3.Error as error:
    raise DataError(
      f'{found[0]}: is no SQLite file of TFF, or damaged ({error}). Delete it. '
      f'{_remedy(data_set)}'
    ) from error
  except (tf.errors.InvalidArgumentError, TypeError, ValueError) as error:
    raise DataError(
      f'{found[0]}: the fields {data_set.text} and {data_set.date} of examples '
      f'are missing or damaged ({error!s:.100}). Delete it. '
      f'{_remedy(data_set)}'
    ) from error


def _download(data_set: DataSet, path: pathlib.Path) -> None:
  """Have TFF fetch a file, which appears whole or not at all."""
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    # TFF would later take a partial file for a complete one.
    with tempfile.TemporaryDirectory(
      dir=path.parent, prefix=f'.{data_set.name}-', suffix='.part'
    ) as scratch:
      data_set.load_data(cache_dir=scratch)
      os.rename(pathlib.Path(scratch, path.name), path)
  except Exception as error:
    # Any exception of the loader: network, disk, or a broken archive.
    raise DataError(
      f'{path}: TFF cannot fetch it ({error}). Check the connection and the '
      'folder, and try again. What was fetched is deleted.'
    ) from error


def _remedy(data_set: DataSet) -> str:
  return (
    f"Have TFF fetch it ({data_set.size}) with --download, put TFF's file "
    'there, name another folder with --data_dir or $TFF_PARTIAL_DATA_DIR, or '
    'use --data=synthetic, which needs no files.'
  )


def _rows(
  data_set: DataSet, database: sqlite3.Connection, limits: Limits
) -> Iterator[Sequence[tuple[str, bytes]]]:
  """Yield clients and serialized examples of the drawn clients, by part."""
  found = database.execute(
    'SELECT DISTINCT client_id FROM client_metadata WHERE split_name IN '
    f'({", ".join("?" * len(data_set.parts))})',
    data_set.parts,
  )
  clients = limits.draw([client for (client,) in found])
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
      yield rows


def _parsed(
  data_set: DataSet, rows: Sequence[tuple[str, bytes]]
) -> Iterator[Message]:
  """Yield the messages of rows, each a client and a serialized example."""
  wanted = [name for name in (data_set.text, data_set.date) if name]
  fields = tf.io.parse_example(
    tf.constant([example for _, example in rows], tf.string),
    {name: tf.io.FixedLenFeature([], tf.string) for name in wanted},
  )
  times = np.full(len(rows), NO_TIME)
  if data_set.date is not None:
    written = fields[data_set.date].numpy().astype(_DATE).astype(np.str_)
    times = written.astype('datetime64[s]').astype(np.int64)
    if (times < 0).any():
      raise ValueError('a time is missing')
  texts = fields[data_set.text].numpy()
  for (client, _), time, text in zip(rows, times.tolist(), texts, strict=True):
    yield Message(client, time, text.decode())
