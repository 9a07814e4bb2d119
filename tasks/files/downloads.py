"""Fetches an archive from its official address, checked before it is used.

What arrives is compared with the checksum its publisher gives, unpacked beside
its destination and then renamed into place: a folder of the final name is
always whole. A download that is killed leaves at most one hidden folder behind,
whose name begins with a dot and ends in `.part`.
"""

import errno
import hashlib
import http.client
import logging
import os
import pathlib
import re
import shutil
import stat
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib

from tasks.errors import DataError

_logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
# Publishers write either `MD5 (file) = digest` or `digest  file`.
_MD5 = re.compile(r'(?<![0-9a-zA-Z])[0-9a-fA-F]{32}(?![0-9a-zA-Z])')
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def fetch_zip(
  address: str,
  checksum_address: str,
  folder: str | os.PathLike[str],
  name: str,
  timeout: float = 60.0,
) -> pathlib.Path:
  """Fetch a zip archive and puts its folder `name` into `folder`.

  Args:
    address: Where the archive is.
    checksum_address: Where a small text with the archive's MD5 digest is.
    folder: Receives the unpacked folder; is made if it does not exist.
    name: Top folder inside the archive. Files beside it are ignored.
    timeout: Seconds without any answer after which the attempt ends.

  Returns:
    The path `folder/name`.

  Raises:
    DataError: If the address cannot be reached, the transfer breaks off, the
      digest differs, the archive is damaged or would write outside of
      `folder`, `folder/name` exists, or the disk is full or unwritable.
  """
  folder = pathlib.Path(os.path.expanduser(folder))
  target = folder / name
  if os.path.lexists(target):
    raise DataError(
      f'{target}: the download of {address} would replace what is already '
      'there. Move it away, or choose another folder with --data_dir.'
    )
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
      dir=folder, prefix=f'.{name}-', suffix='.part'
    ) as scratch:
      archive = pathlib.Path(scratch, 'archive.zip')
      expected = _published_md5(checksum_address, timeout)
      _logger.info('Fetching %s into %s.', address, folder)
      found = _save(address, archive, timeout)
      if found != expected:
        raise DataError(
          f'{address}: the file that arrived has the MD5 checksum {found}, but '
          f'{checksum_address} says {expected}. It was damaged or replaced on '
          'its way and has been deleted. Try again with --download; if this '
          'repeats, fetch and unpack the archive by hand and name its folder '
          'with --data_dir.'
        )
      unpacked = pathlib.Path(scratch, 'unpacked')
      _unpack(archive, unpacked, name, address)
      os.rename(unpacked / name, target)
  except OSError as error:
    raise _disk_error(folder, error) from error
  return target


def _open(address: str, timeout: float) -> http.client.HTTPResponse:
  """Open an address; every way this can fail becomes a `DataError`."""
  try:
    return urllib.request.urlopen(address, timeout=timeout)
  except urllib.error.HTTPError as error:
    error.close()
    raise DataError(
      f'{address}: the server answered {error.code} ({error.reason}). Try '
      'again later, or fetch and unpack the archive by hand and name its '
      'folder with --data_dir; --data=synthetic needs no data at all.'
    ) from error
  except (OSError, http.client.HTTPException, ValueError) as error:
    raise _unreachable(address, error) from error


def _unreachable(address: str, error: Exception) -> DataError:
  reason = getattr(error, 'reason', None) or error or type(error).__name__
  return DataError(
    f'{address}: cannot be reached ({reason}). Check the connection and try '
    'again, or fetch and unpack the archive on another machine and name its '
    'folder with --data_dir; --data=synthetic needs no data at all.'
  )


def _published_md5(address: str, timeout: float) -> str:
  """Return the digest, in lower case, that a publisher's text names."""
  with _open(address, timeout) as response:
    try:
      text = response.read(4096).decode('ascii', errors='replace')
    except (OSError, http.client.HTTPException) as error:
      raise _unreachable(address, error) from error
  digest = _MD5.search(text)
  if digest is None:
    raise DataError(
      f'{address}: holds no MD5 checksum but {text[:60]!r}, so the archive '
      'beside it cannot be checked. Fetch and unpack it by hand and name its '
      'folder with --data_dir.'
    )
  return digest.group().lower()


def _save(address: str, path: pathlib.Path, timeout: float) -> str:
  """Streams an address into a file and returns the MD5 digest of its bytes."""
  # Guards against damage, not against an enemy: the digest comes by the same
  # way as the archive.
  digest = hashlib.md5(usedforsecurity=False)
  received = 0
  with _open(address, timeout) as response, open(path, 'wb') as file:
    announced = response.headers.get('Content-Length', '')
    while True:
      try:
        chunk = response.read(_CHUNK_BYTES)
      except (OSError, http.client.HTTPException) as error:
        raise _unreachable(address, error) from error
      if not chunk:
        break
      digest.update(chunk)
      received += len(chunk)
      file.write(chunk)
  if announced.isdigit() and received < int(announced):
    raise DataError(
      f'{address}: the transfer broke off after {received:,} of '
      f'{int(announced):,} bytes. Try again with --download.'
    )
  return digest.hexdigest()


def _unpack(
  archive: pathlib.Path, destination: pathlib.Path, name: str, address: str
) -> None:
  """Unpacks the folder `name` of an archive, refusing unsafe members."""
  try:
    with zipfile.ZipFile(archive) as opened:
      members = [
        (member, _safe_parts(member, address)) for member in opened.infolist()
      ]
      wanted = [
        (member, parts)
        for member, parts in members
        if not member.is_dir() and len(parts) > 1 and parts[0] == name
      ]
      if not wanted:
        raise DataError(
          f'{address}: the archive holds no folder {name!r}. Fetch it by hand, '
          'look inside, and name the folder with --data_dir.'
        )
      needed = sum(member.file_size for member, _ in wanted)
      if needed > shutil.disk_usage(archive.parent).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
      for member, parts in wanted:
        path = destination.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        with opened.open(member) as source, open(path, 'xb') as file:
          shutil.copyfileobj(source, file, _CHUNK_BYTES)
  except (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,  # An encrypted member.
    FileExistsError,  # Two members of one name.
  ) as error:
    raise DataError(
      f'{address}: what arrived is not a readable zip archive ({error}). Try '
      'again with --download, or fetch and unpack it by hand and name its '
      'folder with --data_dir.'
    ) from error


def _safe_parts(member: zipfile.ZipInfo, address: str) -> tuple[str, ...]:
  """Return a member's path in parts, or refuses one that leads elsewhere."""
  path = pathlib.PurePosixPath(member.filename.replace('\\', '/'))
  is_link = stat.S_ISLNK(member.external_attr >> 16)
  has_drive = bool(pathlib.PureWindowsPath(member.filename).drive)
  if path.is_absolute() or has_drive or '..' in path.parts or is_link:
    raise DataError(
      f'{address}: the archive holds the member {member.filename!r}, which '
      'would be written outside of its folder. It is not the archive it '
      'should be and nothing was unpacked; report this to its publisher.'
    )
  return path.parts


def _disk_error(folder: pathlib.Path, error: OSError) -> DataError:
  if error.errno in _NO_SPACE:
    return DataError(
      f'{folder}: the disk is full ({error.strerror}), so the download was '
      'given up and its parts deleted. Make room, or choose a folder on '
      'another disk with --data_dir.'
    )
  return DataError(
    f'{folder}: cannot be written to ({error.strerror or error}). Choose '
    'another folder with --data_dir, or change its permissions.'
  )
