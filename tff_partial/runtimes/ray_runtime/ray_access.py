"""Access to the Ray cluster that runs clients.

By default Ray listens on all interfaces, requires no secret, and has a folder
that everyone can write to; and any process that reaches a cluster can run code
as its user. A cluster that the Ray runtime starts is closed to others. For one
that it joins, it logs what must be trusted.
"""

from collections.abc import Iterator
import contextlib
import os
import secrets
import tempfile
from typing import Any

from absl import logging

from tff_partial.runtimes.ray_runtime import private_folders

LOOPBACK = '127.0.0.1'
# Token settings that Ray reads, in this process and in those that it starts.
_MODE, _TOKEN = 'RAY_AUTH_MODE', 'RAY_AUTH_TOKEN'
_TOKEN_PATH = 'RAY_AUTH_TOKEN_PATH'
# The system allows a socket's path this many bytes, of which the names of our
# folder and of Ray's files take some.
_LONGEST_SOCKET = 107
_ADDED = (
  '/tff_partial.12345678/files'
  '/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store'
)
# True if this process is on a cluster that it has started.
_is_private = False


@contextlib.contextmanager
def private() -> Iterator[dict[str, Any]]:
  """Close a cluster that is started within the context to other processes.

  It listens on the loopback interface alone. Its files are in a folder that
  only this user can enter, as is a token that it requires of all processes,
  where the version of Ray has tokens.

  Yields:
    Arguments of `ray.init`.

  Raises:
    OSError: If the folder cannot be made.
  """
  global _is_private
  folder = private_folders.make(_parent())
  token = os.path.join(folder, 'token')
  before = {name: os.environ.get(name) for name in (_MODE, _TOKEN, _TOKEN_PATH)}
  try:
    with open(token, 'x', encoding='utf-8') as file:
      os.chmod(token, 0o600)
      file.write(secrets.token_hex(32))
    os.environ.pop(_TOKEN, None)
    os.environ.update({_MODE: 'token', _TOKEN_PATH: token})
    _read_anew()
    _is_private = True
    yield {'_node_ip_address': LOOPBACK, '_temp_dir': folder}
  finally:
    _is_private = False
    for name, value in before.items():
      if value is None:
        os.environ.pop(name, None)
      else:
        os.environ[name] = value
    _read_anew()
    private_folders.remove(folder)


def warn_of_access(address: str) -> None:
  """Warn of what others can do on a cluster that this process has joined.

  A cluster that it has started itself needs no warning.
  """
  if _is_private:
    return
  if os.environ.get(_MODE) == 'token':
    others = 'Who has its token'
    advice = 'its traffic is not encrypted unless Ray is told so'
  else:
    others = 'Who reaches it'
    advice = f'it can ask for a token ({_MODE}=token)'
  logging.warning(
    'Clients run on the Ray cluster at %s. %s can run any code as its user, '
    'read what clients and the server send, and change it. Keep it in a '
    'network that you trust; %s. docs/scale.md says more.',
    address,
    others,
    advice,
  )


def _parent() -> str:
  """Return a temporary folder whose path is short enough for sockets."""
  for parent in (os.environ.get('RAY_TMPDIR'), tempfile.gettempdir()):
    if parent and len(os.fsencode(parent + _ADDED)) <= _LONGEST_SOCKET:
      return parent
  return '/tmp'


def _read_anew() -> None:
  """Make Ray reload the token settings, which it reads once per process.

  Versions without tokens have nothing to read.
  """
  with contextlib.suppress(ImportError, AttributeError):
    from ray._raylet import AuthenticationTokenLoader
    from ray._raylet import Config

    AuthenticationTokenLoader.instance().reset_cache()
    Config.initialize('')
