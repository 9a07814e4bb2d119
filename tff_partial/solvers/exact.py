"""Settings of an exact solve, given to a phase in place of an optimizer.

    Phase(train=(LOCAL,), optimizer=Exact(ridge=2.0))

sets the weights to the minimum of

    sum over the phase's examples of their weighted losses
    + number of examples * (the phase's terms + the layers' regularization)
    + ridge * |weights - mean|^2,

which needs no learning rate, no steps, no batches and no order. For squared
error this is ridge regression of labels on what the local weights are
multiplied with, `sklearn.linear_model.Ridge(alpha=ridge)`.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple, TypeAlias

from tff_partial import contexts
from tff_partial import errors
from tff_partial.arguments import checked_numbers
from tff_partial.arguments import spelling


class ExactError(errors.UserError, ValueError):
  """Raised for weights that cannot be solved for, or a wrong setting."""


class Prior(NamedTuple):
  """Quadratic prior of the weights, `(w - mean)' precision (w - mean)`.

  Attributes:
    mean: Variable name to tensor, or None for the default.
    precision: Added to the sum of losses: a positive scalar, or a positive
      definite matrix over all weights of the phase, flattened and put one after
      another in the order of the model's variables.
  """

  mean: Any
  precision: Any


# (the client's context) -> the prior, such as one of global weights.
PriorFn: TypeAlias = Callable[[contexts.ClientContext], Prior]


@dataclasses.dataclass(frozen=True)
class Exact:
  """Exact minimization over weights in which predictions are affine.

  Attributes:
    ridge: Weight of the squared distance to the prior mean, which is zero for
      LOCAL weights, and the received GLOBAL weights for PERSONAL ones.
    prior: Computes another prior at the client, whose batch has all examples of
      the phase; `ridge` is then not used.
    covariance: Name of a LOCAL variable `[weights, weights]`, which receives
      the inverse of half the Hessian at the minimum. For squared error, times
      the noise variance, this is the covariance of the weights' posterior.
    newton_steps: Maximum number of Newton steps for losses that are not
      quadratic, such as cross-entropy. They stop where they change nothing.
    max_direct: Largest number of weights for which the linear system is built
      and solved by elimination; more are solved by conjugate gradients.

  A client for which Newton's steps or conjugate gradients do not converge
  counts as not finite.
  """

  ridge: float = 1.0
  prior: PriorFn | None = None
  covariance: str | None = None
  newton_steps: int = 20
  max_direct: int = 512

  def __post_init__(self) -> None:
    wrong = checked_numbers.why_not_finite(self.ridge)
    if wrong or self.ridge <= 0:
      raise ExactError(
        f'Exact: ridge: {wrong or f"expected more than 0, found {self.ridge}"}.'
        ' Without it, a client with fewer examples than weights has no unique '
        'minimum.'
      )
    names = ('newton_steps', 'max_direct')
    whole = {f'Exact: {name}': getattr(self, name) for name in names}
    checked_numbers.check_whole(ExactError, 1, **whole)
    expected = 'a function from a `ClientContext` to a `Prior`'
    spelling.check_kind(
      'Exact: prior', self.prior, Callable | None, expected, ExactError
    )

  def __repr__(self) -> str:
    """Return the settings that differ from the defaults, as a short text."""
    said = []
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name == 'ridge' or value != field.default:
        said.append(f'{field.name}={getattr(value, "__qualname__", value)}')
    return f'Exact({", ".join(said)})'
