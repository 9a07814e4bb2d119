"""Wheels with other metadata: what changes, and what stays to the byte."""

import base64
import hashlib
import pathlib
import zipfile

from packaging import requirements
from packaging import specifiers
import pytest

from distribution import relaxed_wheels

ROOT = pathlib.Path(__file__).resolve().parents[2]
TFF, PRIVACY, ACCOUNTING = relaxed_wheels.PACKAGES

METADATA = """\
Metadata-Version: 2.1
Name: tensorflow_federated
Version: 0.87.0
Requires-Python: <3.12,>=3.9
Requires-Dist: jaxlib ==0.4.14
Requires-Dist: numpy ~=1.25

About federated learning, and the Größe of it.
"""


@pytest.fixture
def original(tmp_path) -> pathlib.Path:
  """A wheel like TFF's, of four files."""
  path = tmp_path / 'tensorflow_federated-0.87.0-py3-none-manylinux.whl'
  info = 'tensorflow_federated-0.87.0.dist-info'
  with zipfile.ZipFile(path, 'w') as archive:
    archive.writestr('tensorflow_federated/__init__.py', 'x = 1\n')
    archive.writestr('tensorflow_federated/data/worker_binary', 'ELF' * 100)
    archive.writestr(f'{info}/METADATA', METADATA)
    archive.writestr(f'{info}/LICENSE', 'Apache')
    tag = 'Wheel-Version: 1.0\nTag: py3-none-manylinux_2_31_x86_64\n'
    archive.writestr(f'{info}/WHEEL', tag)
    archive.writestr(f'{info}/RECORD', 'old')
  return path


def contents(wheel: pathlib.Path) -> dict[str, bytes]:
  with zipfile.ZipFile(wheel) as archive:
    return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(name='relaxed')
def fixture_relaxed(original, tmp_path) -> pathlib.Path:
  """The wheel that is made of it."""
  (tmp_path / 'out').mkdir()
  return (
    tmp_path / 'out' / relaxed_wheels.relax(original, TFF, tmp_path / 'out')
  )


def test_metadata_alone_change(relaxed):
  assert relaxed.name == 'tensorflow_federated-0.87.0+relaxed-py3-none-any.whl'
  files = contents(relaxed)
  info = 'tensorflow_federated-0.87.0+relaxed.dist-info'
  assert files['tensorflow_federated/__init__.py'] == b'x = 1\n'
  assert files[f'{info}/LICENSE'] == b'Apache'
  # Its import asks for the file; 301 MB of it are for the native runtime.
  assert files['tensorflow_federated/data/worker_binary'] == b''
  assert b'Tag: py3-none-any' in files[f'{info}/WHEEL']
  metadata = files[f'{info}/METADATA'].decode()
  assert 'Version: 0.87.0+relaxed\n' in metadata
  assert 'Requires-Python: >=3.11\n' in metadata
  assert 'jaxlib' not in metadata
  assert metadata.endswith('About federated learning, and the Größe of it.\n')
  notice = files[f'{info}/NOTICE.relaxed.txt'].decode()
  assert 'tensorflow-federated 0.87.0' in notice and 'is empty' in notice


def test_the_record_holds_every_file(relaxed):
  files = contents(relaxed)
  (record,) = (path for path in files if path.endswith('/RECORD'))
  lines = [line.split(',') for line in files[record].decode().splitlines()]
  assert sorted(path for path, _, _ in lines) == sorted(files)
  for path, digest, size in lines:
    if path != record:
      sha = base64.urlsafe_b64encode(hashlib.sha256(files[path]).digest())
      assert digest == f'sha256={sha.decode().rstrip("=")}'
      assert int(size) == len(files[path])


def test_the_same_bytes_each_time(original, relaxed, tmp_path):
  name = relaxed_wheels.relax(original, TFF, tmp_path)
  assert (tmp_path / name).read_bytes() == relaxed.read_bytes()


def test_other_and_broken_wheels_are_refused(original, tmp_path):
  with pytest.raises(relaxed_wheels.WheelError, match='not a wheel of dp-acc'):
    relaxed_wheels.relax(original, ACCOUNTING, tmp_path)
  path = tmp_path / 'dp_accounting-0.4.3-py3-none-any.whl'
  path.write_text('half of a download')
  with pytest.raises(relaxed_wheels.WheelError, match='not a whole wheel'):
    relaxed_wheels.relax(path, ACCOUNTING, tmp_path)


def test_each_is_taken_from_the_lock():
  lock = (ROOT / 'requirements/base-3.11.txt').read_text('utf-8')
  for package in relaxed_wheels.PACKAGES:
    text = relaxed_wheels.locked(lock, package)
    assert text.startswith(f'{package}==')
    assert text.count('--hash=sha256:') >= 1
  with pytest.raises(relaxed_wheels.WheelError, match='has no dp-accounting'):
    relaxed_wheels.locked('numpy==1.25.2 \\\n', ACCOUNTING)


def test_the_locks_of_later_pythons_are_what_is_asked_for():
  """So that what is tested there is what the wheels let pip install."""
  for name in ('requirements/base-3.12.txt', 'requirements/base-3.13.txt'):
    text = (ROOT / name).read_text('utf-8')
    locked = dict(
      line.split(' ')[0].split('==')
      for line in text.splitlines()
      if '==' in line and line[0].isalpha()
    )
    for required in relaxed_wheels.PACKAGES.values():
      for requirement in map(requirements.Requirement, required):
        wanted = str(requirement.specifier).removesuffix('+relaxed')
        assert locked[requirement.name] in specifiers.SpecifierSet(wanted), (
          f'{name}: {requirement}'
        )
