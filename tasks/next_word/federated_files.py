"""Client texts from the files of TFF's federated data sets.

TFF publishes its data sets in two formats; both can be read:

*   SQLite, one file: the table `client_metadata` (client_id, split_name,
    num_examples) has the clients of each part, the table `examples` (client_id,
    split_name, serialized_example_proto) their examples, each a serialized
    `tf.train.Example`. This is what TFF 0.87 fetches.
*   HDF5, a file for each part: the group `examples/<client>` has an array for
    each field, with one entry an example. This is what TFF fetched before.

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

_SQLITE, _HDF5 = '.sqlite', '.h5'
# Rows to process together from a file without an index.
_ROWS = 1024
# Long enough for 2010-01-08 09:34:05.1 UTC without fractions.
_DATE = 'S19'

# (cache_dir=) -> the parts of the data set, which are ignored here.
_LoadData = Callable[..., Any]


class DataSet(NamedTuple):
  """One of TFF's data sets.

  Attributes:
    name: Name of its files and folder.
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
    folder: Holds its file or files, or a folder of its name that does.
    limits: Draws the clients to read.

  Returns:
    An iterator over the texts, which may also raise the errors below.

  Raises:
    DataError: If a file is missing, damaged, or of another format; names it,
      and a remedy.
  """
  root = pathlib.Path(os.path.expanduser(folder))
  for place in (root / data_set.name, root):
    path = place / f'{data_set.name}{_SQLITE}'
    if path.is_file():
      return _read_sqlite(data_set, path, limits)
    paths = [
      place / f'{data_set.name}_{part}{_HDF5}' for part in data_set.parts
    ]
    found = [path for path in paths if path.is_file()]
    if found == paths:
      return _read_hdf5(data_set, paths, limits)
    if found:
      missing = next(path for path in paths if path not in found)
      raise DataError(f'{missing}: is missing beside {found[0].name}.')
  raise DataError(
    f'{root}: there is no file {data_set.name}{_SQLITE}, nor '
    f'{" and ".join(path.name for path in paths)}, in the folder or in its '
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
  path = place / f'{data_set.name}{_SQLITE}'
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
  where: str,
  clients: Sequence[str],
  texts: Sequence[Any],
  dates: Sequence[Any] | None,
) -> Iterator[Message]:
  """Yield messages from the fields of texts, each with one client."""
  times = np.full(len(texts), NO_TIME)
  try:
    if dates is not None:
      written = np.array(dates, _DATE).astype(np.str_)
      times = written.astype('datetime64[s]').astype(np.int64)
      if (times < 0).any():
        raise ValueError('a time is missing')
    for client, time, text in zip(clients, times.tolist(), texts, strict=True):
      yield Message(client, time, text.decode())
  except (AttributeError, ValueError) as error:  # Such as no UTF-8.
    raise DataError(
      f'{where}, from the examples of client {"".join(clients[:1])!r} on: '
      f'{error}. Fetch the file again.'
    ) from error


# ---- SQLite ------------------------------------------------------------------


def _read_sqlite(
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
      for part in data_set.parts:
        for rows in _rows(database, part, clients):
          whose = [client for client, _ in rows]
          protos = [proto for _, proto in rows]
          fields = _parsed(data_set, f'{path}, client {whose[0]!r}', protos)
          yield from _messages(str(path), whose, *fields)
  except sqlite3.Error as error:
    raise DataError(
      f'{path}: is no SQLite file of TFF, or damaged ({error}). Delete it. '
      f'{_remedy(data_set)}'
    ) from error


def _rows(
  database: sqlite3.Connection, part: str, clients: Sequence[str]
) -> Iterator[list[tuple[str, bytes]]]:
  """Yield some rows at a time, each a client and a serialized example.

  A file with an index is queried client by client. Without an index each query
  would scan the whole file, so it is read once from start to end.
  """
  every = (
    'SELECT client_id, serialized_example_proto FROM examples '
    'WHERE split_name = ?'
  )
  of_client = f'{every} AND client_id = ?'
  plan = database.execute(
    f'EXPLAIN QUERY PLAN {of_client}', (part, clients[0])
  ).fetchall()
  if all('SEARCH' in step[-1] for step in plan):
    for client in clients:
      rows = database.execute(of_client, (part, client)).fetchall()
      if rows:
        yield rows
    return
  wanted = set(clients)
  cursor = database.execute(every, (part,))
  while rows := cursor.fetchmany(_ROWS):
    chosen = [row for row in rows if row[0] in wanted]
    if chosen:
      yield chosen


def _parsed(
  data_set: DataSet, where: str, protos: Sequence[bytes]
) -> tuple[Sequence[Any], Sequence[Any] | None]:
  """Return the texts and dates of serialized examples."""
  wanted = [data_set.text]
  if data_set.date is not None:
    wanted.append(data_set.date)
  try:
    fields = tf.io.parse_example(
      tf.constant(protos, tf.string),
      {name: tf.io.FixedLenFeature([], tf.string) for name in wanted},
    )
  except (tf.errors.InvalidArgumentError, TypeError, ValueError) as error:
    raise DataError(
      f'{where} and on: the examples do not have the fields '
      f'{" and ".join(wanted)}, or are damaged. {_remedy(data_set)}'
    ) from error
  dates = data_set.date and fields[data_set.date].numpy()
  return fields[data_set.text].numpy(), dates


# ---- HDF5 --------------------------------------------------------------------


def _read_hdf5(
  data_set: DataSet, paths: Sequence[pathlib.Path], limits: Limits
) -> Iterator[Message]:
  import h5py  # Slow to import, and only for this format.

  with contextlib.ExitStack() as stack:
    groups = {}
    for path in paths:
      try:
        file = stack.enter_context(h5py.File(path, 'r'))
        groups[path] = file['examples']
      except (OSError, KeyError) as error:
        raise DataError(
          f"{path}: is no HDF5 file of TFF's clients, or damaged ({error}). "
          f'Delete it. {_remedy(data_set)}'
        ) from error
    clients = {client for group in groups.values() for client in group}
    for client in limits.draw(list(clients)):
      for path, group in groups.items():
        if client not in group:
          continue
        try:
          texts = group[client][data_set.text][()]
          whose = [client] * len(texts)
          dates = None
          if data_set.date is not None:
            dates = group[client][data_set.date][()]
        except (OSError, KeyError, TypeError, RuntimeError) as error:
          raise DataError(
            f'{path}, client {client!r}: a field is missing or damaged '
            f'({error}). {_remedy(data_set)}'
          ) from error
        yield from _messages(str(path), whose, texts, dates)
