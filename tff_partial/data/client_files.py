"""Clients in a folder, of which a round reads only its cohort.

    tff_partial.write_clients('clients', clients, process.example_spec)
    clients = tff_partial.open_clients('clients', process.example_spec)

For populations that do not fit into memory, or into that of each worker of
`runtimes.ray()`. The folder has a file of examples, with all fields of each, in
which clients are stored one after another, so that a client is one read; tables
of ids, of clients' offsets, and of checksums of their examples; and
`clients.json`, which describes them. Ids are found by binary search in their
file: only the process that draws cohorts holds a table of all of them.

Damage is detected: `clients.json` has checksums of itself and of the files. The
tables are checked when they are opened; a client's examples when they are read;
and all examples when a run asks for the fingerprint of all, as a private one
does.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import shutil
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial.data import client_readers
from tff_partial.data import examples
from tff_partial.data import lengths
from tff_partial.data import populations
from tff_partial.data import stored_clients


def write_clients(
  folder: str | os.PathLike[str],
  clients: Iterable[tuple[str, Mapping[str, Any]]],
  example_spec: examples.ExampleSpec,
  *,
  min_examples: int | None = None,
) -> None:
  """Write clients one by one to a new folder.

  Args:
    folder: The folder, which must not exist yet.
    clients: Ids, and fields `x`, `y`, optionally `weight` and others, arrays
      `[examples, ...]`.
    example_spec: Spec of one example: `process.example_spec`.
    min_examples: Clients with fewer examples, or none, are left out and
      counted in the log; by default all are kept, and an empty client is an
      error.

  Raises:
    ClientDataError: For fields that `pack` would refuse, duplicate ids,
      strings, or a folder that exists or cannot be written.
  """
  folder = pathlib.Path(folder)
  for path, spec in examples.leaves(example_spec):
    if spec.dtype == tf.string:
      raise examples.ClientDataError(
        f'{folder}: {path} holds strings, which have no fixed size. Give '
        'numbers in their place, such as those of a `Vocabulary`.'
      )
  if folder.exists():
    raise examples.ClientDataError(
      f'{folder} is there already. Remove it, or write to another folder.'
    )
  part = folder.with_name(f'{folder.name}.part')
  shutil.rmtree(part, ignore_errors=True)
  try:
    part.mkdir(parents=True)
    _write(part, clients, example_spec, min_examples)
    part.rename(folder)
  except OSError as error:
    raise examples.ClientDataError(
      f'{folder}: the clients were not written: {error}'
    ) from error
  finally:
    shutil.rmtree(part, ignore_errors=True)


def open_clients(
  folder: str | os.PathLike[str],
  example_spec: examples.ExampleSpec,
  *,
  capacities: Sequence[int] | None = None,
) -> client_readers.Reader:
  """Open a folder written by `write_clients`.

  A worker of `runtimes.ray()` reads its own clients, from a folder of the same
  name.

  Args:
    folder: The folder.
    example_spec: Spec of one example: `process.example_spec`.
    capacities: Sizes to pad to; see `Reader`.

  Raises:
    ClientDataError: If there is no such folder, files are damaged, or its
      clients are for another model.
  """
  files = stored_clients.Files(os.path.abspath(folder))
  wanted = _described(example_spec)
  if wanted != files.fields:
    differ = [
      f'{path}: {files.fields.get(path, "none")} instead of '
      f'{wanted.get(path, "none")}'
      for path in {**wanted, **files.fields}
      if files.fields.get(path) != wanted.get(path)
    ]
    raise examples.ClientDataError(
      f'{folder}: the clients were written for another model: '
      f'{"; ".join(differ)}. Write them again with the `example_spec` of the '
      'process.'
    )
  packed = examples.as_packed(example_spec)
  return _FolderReader(
    files.client_ids(),
    _Read(files.folder, files.fingerprint, packed),
    packed,
    capacities,
    files.fingerprint,
  )


# ---- writing -----------------------------------------------------------------


def _write(
  folder: pathlib.Path,
  clients: Iterable[tuple[str, Mapping[str, Any]]],
  example_spec: examples.ExampleSpec,
  min_examples: int | None,
) -> None:
  """Write all files of a folder."""
  ids: list[bytes] = []
  counts: list[int] = []
  sums: list[bytes] = []
  fields = _described(example_spec)
  kind = stored_clients.example_type(fields)
  whole = stored_clients.digest()
  with open(folder / stored_clients.EXAMPLES, 'wb') as file:
    for client, arrays, count in populations.large_enough(
      clients,
      example_spec,
      # Clients without examples cannot be read back.
      None if min_examples is None else max(min_examples, 1),
    ):
      ids.append(_id_bytes(client))
      counts.append(count)
      written = np.empty([count], kind)
      for path, (_, array) in zip(fields, examples.leaves(arrays), strict=True):
        written[path] = array
      raw = written.tobytes()
      file.write(raw)
      sums.append(stored_clients.digest(raw).digest())
      whole.update(raw)
  names = np.array(ids)
  order = np.argsort(names, kind='stable')
  same = np.flatnonzero(names[order][1:] == names[order][:-1])
  if same.size:
    raise examples.ClientDataError(
      f'{folder.with_suffix("")}: two clients have the id '
      f'{names[order][same[0]].decode()!r}. Give each an id of its own.'
    )
  ends = np.cumsum(counts)
  ranges = np.stack([ends - counts, ends], axis=1).astype('<i8')
  checksums = {stored_clients.EXAMPLES: whole.hexdigest()}
  for name, array in {
    stored_clients.IDS: names,
    stored_clients.RANGES: ranges,
    stored_clients.SUMS: np.array(sums, stored_clients.SUM_TYPE),
  }.items():
    raw = array[order].tobytes()
    (folder / name).write_bytes(raw)
    checksums[name] = stored_clients.digest(raw).hexdigest()
  description = {
    'version': stored_clients.VERSION,
    'clients': len(ids),
    'examples': int(ends[-1]),
    'id_bytes': names.dtype.itemsize,
    'fields': fields,
    'checksums': checksums,
  }
  description['fingerprint'] = stored_clients.fingerprint(description)
  (folder / stored_clients.DESCRIPTION).write_text(
    json.dumps(description, indent=1)
  )


def _id_bytes(client: str) -> bytes:
  """Encode an id; refuse one that is invalid or would be ambiguous."""
  try:
    if isinstance(client, str) and client and not client.endswith('\0'):
      return client.encode()
  except UnicodeEncodeError:
    pass
  raise examples.ClientDataError(
    f'{client!r} is no id of a client. Give a string that is not empty, of '
    'characters that UTF-8 has.'
  )


def _described(example_spec: examples.ExampleSpec) -> dict[str, list[Any]]:
  """Return type and shape of each field, as in JSON.

  An input that passed through a layer also has a fingerprint of that.
  """
  if lengths.are_open(example_spec):
    raise examples.ClientDataError(
      'Files hold examples of one shape, but a field has an open length. Begin '
      'the model with `Input([length])` and pad to it, or use '
      '`tff_partial.pack` or a `Reader`.'
    )
  described: dict[str, list[Any]] = {
    path: [np.dtype(spec.dtype.as_numpy_dtype).str, list(spec.shape)]
    for path, spec in examples.leaves(example_spec)
  }
  for path, layer in examples.lifted_of(example_spec).items():
    digest = hashlib.sha256(layer.described.encode()).hexdigest()
    described[path].append(digest[:16])
  return described


# ---- reading -----------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def _opened(folder: str, fingerprint: str) -> stored_clients.Files:
  """Open a folder, possibly one that another process opened before."""
  files = stored_clients.Files(folder)
  if files.fingerprint != fingerprint:
    raise examples.ClientDataError(
      f'{folder}: the clients were written again after they had been opened. '
      'Open them again.'
    )
  return files


@dataclasses.dataclass(frozen=True)
class _Read:
  """Callable that reads clients of a folder; pickled without their data."""

  folder: str
  fingerprint: str
  example_spec: examples.ExampleSpec

  @property
  def files(self) -> stored_clients.Files:
    """The files, opened once in each process."""
    return _opened(self.folder, self.fingerprint)

  def __call__(self, client: str) -> Mapping[str, Any]:
    return self.together([client])

  def num_examples(self, client_ids: Sequence[str]) -> np.ndarray:
    return self.files.num_examples(client_ids)

  def together(self, client_ids: Sequence[str]) -> Mapping[str, Any]:
    found = self.files.read(client_ids)
    paths = (path for path, _ in examples.leaves(self.example_spec))
    return examples.map_fields(lambda _: found[next(paths)], self.example_spec)


class _FolderReader(client_readers.Reader):
  """Clients in a folder."""

  read: _Read
  are_distinct = True  # `write_clients` checks them.

  def fingerprint(self, sample: int | None = None) -> str:
    """See `Reader`.

    Raises:
      ClientDataError: If all clients are requested and the examples of one
        are damaged.
    """
    if sample is None:
      self.read.files.check_examples()
    return super().fingerprint(sample)
