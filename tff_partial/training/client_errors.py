"""Failures of a client's computation, in the user's terms."""

from collections.abc import Iterator
import contextlib
import re

from tff_partial.data import cohorts
from tff_partial.runtimes import errors as runtime_errors
from tff_partial.training.errors import RunError

# Lines of TensorFlow's messages that mean nothing to authors of Keras models.
_NOISE = re.compile(
  r'Graph execution error:|Detected at node|<stack traces|\[\[|\d+ root error'
)
# A node of a compiled round, with the path to its layer of the model.
_NODE = re.compile(r'\{\{node ([^}]*)\}\}')
_LOOPS = re.compile(r'while(_\d+)?')


@contextlib.contextmanager
def naming(doing: str, cohort: cohorts.Cohort) -> Iterator[None]:
  """Name the client whose computation fails, by its id.

  Args:
    doing: The clients' work, for the message; such as `round 7`.
    cohort: The clients.

  Raises:
    RunError: If the runtime reports the client at which it failed.
  """
  try:
    yield
  except runtime_errors.ClientComputationError as error:
    client = cohort.client_ids[error.client]
    raise RunError(
      f'{doing}: what client {client!r} computes fails{_where(error.reason)}: '
      f'{_plain(error.reason)} Look at its examples, or at what the model, the '
      'loss and the metrics do with them.'
    ) from error


def _plain(reason: str) -> str:
  """Return TensorFlow's message of a failure without its locations."""
  lines = (line.strip() for line in reason.splitlines())
  said = [line for line in lines if line and not _NOISE.match(line)]
  text = ' '.join(said) or reason
  return text if text.endswith('.') else f'{text}.'


def _where(reason: str) -> str:
  """Return the part of the model that failed, if TensorFlow reports it."""
  found = _NODE.search(reason)
  if found is None:
    return ''
  names = [n for n in found[1].split('/') if not _LOOPS.fullmatch(n)]
  return f' in {"/".join(names[:3])}' if names else ''
