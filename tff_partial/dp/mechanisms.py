"""Who adds how much noise to what."""

from collections.abc import Mapping
import dataclasses

from tff_partial import errors
from tff_partial.dp import clipping as clipping_lib


class PrivateTypeError(errors.UserError, TypeError):
  """Raised when values cannot be clipped and noised."""


# Who adds noise: the server, once to the sum, or each client before it sends.
CENTRAL, LOCAL = 'central', 'local'

# Part of the names of operations that hold a seed that differs from run to run.
SECRET = 'secret_seed'


@dataclasses.dataclass(frozen=True)
class Mechanism:
  """What makes the updates of a process private.

  Attributes:
    where: CENTRAL or LOCAL.
    clipping: How what a client sends is clipped, jointly or by part.
    noise_multiplier: Standard deviation of the noise in clips, all parts
      together.
    clients_per_round: For how many clients in a round it was made; None for
      local noise, which does not depend on others.
    shares: Each part's share of what is spent; None for equal ones.
    is_simulation: Whether the noise follows from a seed that somebody chose,
      and who knows it sees through the noise.
  """

  where: str
  clipping: clipping_lib.Clippings
  noise_multiplier: float
  clients_per_round: float | None
  shares: Mapping[str, float] | None
  is_simulation: bool
