"""Descriptions of privacy mechanisms: clipping, noise, and its place."""

import dataclasses

from tff_partial import errors
from tff_partial.dp import clipping as clipping_lib


class PrivateTypeError(errors.UserError, TypeError):
  """Raised when values cannot be clipped and noised."""


# Noise at the server, once on the sum, or at each client before it sends.
CENTRAL, LOCAL = 'central', 'local'

# Part of the names of operations that hold a seed that differs from run to run.
SECRET = 'secret_seed'


@dataclasses.dataclass(frozen=True)
class Mechanism:
  """The mechanism that makes the updates of a process private.

  Attributes:
    where: CENTRAL or LOCAL.
    clipping: Clipping of an update, joint or by part.
    noise_multiplier: Standard deviation of the noise in clips, all parts
      together.
    clients_per_round: Expected number of clients in a round; None for local
      noise, which does not depend on other clients.
    is_simulation: True if the noise follows from a chosen seed, with which
      anyone who knows it can remove the noise.
  """

  where: str
  clipping: clipping_lib.Clippings
  noise_multiplier: float
  clients_per_round: float | None
  is_simulation: bool
