"""Wheels of TFF and its privacy libraries that install on any Python.

TensorFlow Federated 0.87, TensorFlow Privacy 0.9 and dp-accounting 0.4 are pure
Python except for TFF's worker, a program for Linux. Their metadata exclude
Python 3.12, NumPy 2 and current versions of JAX, although their code works with
all of these (see tff_partial/_environment/newer_tensorflow.py). The wheels made
here have the same files with other metadata, without the worker, which only the
native runtime needs, and with a notice of the changes, as their licence
requires. Their versions end in `+relaxed`: pip prefers them to the originals.

python -m distribution.relaxed_wheels dist
"""

import argparse
import base64
from collections.abc import Sequence
import email
import email.message
import hashlib
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_LOCK = _ROOT / 'requirements/base-3.11.txt'
_LABEL = 'relaxed'
_PYTHONS = '>=3.11'
# Importing TFF requires that this file exists, but does not read it.
_WORKER = 'tensorflow_federated/data/worker_binary'
_NOTICE = """\
This wheel was made from {name} {version} by the project tff_partial.
Changed: the version and the requirements in METADATA; the tag in WHEEL{worker}.
All other files are those of the original wheel, under its licence.
"""


# For each package of the lock, the requirements that replace those of its
# metadata: what its code really needs.
PACKAGES: dict[str, tuple[str, ...]] = {
  'tensorflow-federated': (
    'absl-py>=1.0',
    'attrs>=23.1',
    'cachetools>=5.3',
    'dm-tree>=0.1.8',
    f'dp-accounting==0.4.3+{_LABEL}',
    'googleapis-common-protos>=1.61',
    'grpcio>=1.46',
    'ml-dtypes>=0.2',
    'numpy>=1.25',
    'portpicker>=1.6',
    'protobuf>=4.25',
    'scipy>=1.9.3',
    'setuptools<81',
    # Earlier ones require TFF's own pins: JAX 0.4, Keras 2.14 and others.
    'tensorflow>=2.16',
    'tf-keras>=2.16',
    f'tensorflow-privacy==0.9.0+{_LABEL}',
    'tqdm>=4.64',
    'typing-extensions>=4.5',
  ),
  'tensorflow-privacy': (
    'absl-py>=1.0',
    f'dp-accounting==0.4.3+{_LABEL}',
    'dm-tree>=0.1.8',
    'numpy>=1.21',
    'packaging>=22',
    'scikit-learn>=1.0',
    'scipy>=1.9',
    'tensorflow>=2.16',
    'tensorflow-probability>=0.22',
    'tf-keras>=2.16',
  ),
  'dp-accounting': (
    'absl-py>=1.0',
    'attrs>=22',
    'dm-tree>=0.1.8',
    'mpmath>=1.2',
    'numpy>=1.21',
    'scipy>=1.7',
  ),
}


class WheelError(ValueError):
  """Raised for a wheel or a lock that is not as expected."""


def relax(wheel: pathlib.Path, package: str, folder: pathlib.Path) -> str:
  """Write the relaxed form of a wheel into a folder that exists.

  It has the same bytes each time.

  Returns:
    The name of the written file.

  Raises:
    WheelError: If the file is not a wheel of that package.
  """
  stem, version = wheel.name.split('-')[:2]
  if stem.replace('_', '-').lower() != package:
    raise WheelError(f'{wheel}: is not a wheel of {package}.')
  relaxed = f'{version}+{_LABEL}'
  info, new_info = (f'{stem}-{x}.dist-info' for x in (version, relaxed))
  files: dict[str, bytes] = {}
  try:
    with zipfile.ZipFile(wheel) as archive:
      for name in sorted(archive.namelist()):
        if not name.endswith('/') and name != f'{info}/RECORD':
          files[name.replace(info, new_info, 1)] = archive.read(name)
    metadata = files[f'{new_info}/METADATA']
    tags = files[f'{new_info}/WHEEL']
  except (zipfile.BadZipFile, KeyError) as error:
    raise WheelError(f'{wheel}: is not a whole wheel ({error}).') from None
  files[f'{new_info}/METADATA'] = _metadata(metadata, relaxed, package)
  files[f'{new_info}/WHEEL'] = re.sub(
    rb'(?m)^Tag: .*$', b'Tag: py3-none-any', tags
  )
  worker = ''
  if _WORKER in files:
    files[_WORKER] = b''
    worker = f'; {_WORKER} is empty'
  files[f'{new_info}/NOTICE.relaxed.txt'] = _NOTICE.format(
    name=package, version=version, worker=worker
  ).encode()
  files[f'{new_info}/RECORD'] = _record(files, f'{new_info}/RECORD')
  name = f'{stem}-{relaxed}-py3-none-any.whl'
  with zipfile.ZipFile(
    folder / name, 'w', compression=zipfile.ZIP_DEFLATED
  ) as archive:
    for path, data in files.items():
      # A fixed time, and permissions for others to read.
      entry = zipfile.ZipInfo(path)
      entry.external_attr = 0o644 << 16
      entry.compress_type = zipfile.ZIP_DEFLATED
      archive.writestr(entry, data)
  return name


def _metadata(metadata: bytes, version: str, package: str) -> bytes:
  """Replace version and requirements, and nothing else."""
  message = email.message_from_bytes(metadata)
  for name in ('Version', 'Requires-Python', 'Requires-Dist', 'Provides-Extra'):
    del message[name]
  message['Version'] = version
  message['Requires-Python'] = _PYTHONS
  for requirement in PACKAGES[package]:
    message['Requires-Dist'] = requirement
  return message.as_bytes(policy=message.policy.clone(max_line_length=None))


def _record(files: dict[str, bytes], own_name: str) -> bytes:
  """Return the list of a wheel's files, with their checksums and sizes."""
  lines = []
  for name, data in files.items():
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    lines.append(f'{name},sha256={digest.rstrip(b"=").decode()},{len(data)}')
  return '\n'.join([*lines, f'{own_name},,', '']).encode()


def locked(lock: str, package: str) -> str:
  """Return a package's lines of the lock: its version, and its hashes.

  Raises:
    WheelError: If it is not in the lock.
  """
  found = re.search(
    rf'^{re.escape(package)}==\S+ \\\n(?: +--hash=\S+(?: \\)?\n)+',
    lock,
    re.MULTILINE,
  )
  if found is None:
    raise WheelError(f'{_LOCK}: has no {package}.')
  return found.group()


def _download(lock: str, folder: pathlib.Path) -> None:
  """Download the packages to relax, in the versions of the lock."""
  wanted = folder / 'wanted.txt'
  wanted.write_text(''.join(locked(lock, package) for package in PACKAGES))
  subprocess.run(
    [
      *(sys.executable, '-m', 'pip', 'download', '--quiet'),
      *('--disable-pip-version-check', '--no-deps', '--require-hashes'),
      # The files for TFF's platform, wherever this runs.
      *('--only-binary', ':all:', '--platform', 'manylinux_2_31_x86_64'),
      *('--python-version', '3.11', '--dest', str(folder)),
      *('--requirement', str(wanted)),
    ],
    check=True,
  )


def main(arguments: Sequence[str] | None = None) -> int:
  """Download the originals, and write their relaxed forms into a folder."""
  parser = argparse.ArgumentParser(
    description=__doc__.splitlines()[0] if __doc__ else None
  )
  parser.add_argument('folder', type=pathlib.Path)
  folder = parser.parse_args(arguments).folder
  folder.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory() as scratch:
    originals = pathlib.Path(scratch)
    try:
      _download(_LOCK.read_text('utf-8'), originals)
      for package in PACKAGES:
        (wheel,) = originals.glob(f'{package.replace("-", "_")}-*.whl')
        sys.stdout.write(f'{folder / relax(wheel, package, folder)}\n')
    except (WheelError, subprocess.CalledProcessError) as error:
      sys.stderr.write(f'error: {error}\n')
      return 1
  return 0


if __name__ == '__main__':
  sys.exit(main())
