"""Extra loss terms, which a phase minimizes in addition to or without the loss.

A term is `(the client's context) -> scalar`: current weights, weights at the
start of the round, the batch, what the server sends besides weights.
"""

from collections.abc import Callable, Iterable, Mapping

import tensorflow as tf

from tff_partial import phases
from tff_partial import tiers
from tff_partial.arguments import checked_numbers
from tff_partial.contexts import ClientContext
from tff_partial.errors import SettingError


def _check_penalty(penalty: float, what: str) -> None:
  if wrong := checked_numbers.why_negative(penalty):
    raise SettingError(f'{what}: the penalty: {wrong}.')


def _half_square(
  weights: Mapping[str, tf.Tensor],
  center: Mapping[str, tf.Tensor] | None = None,
) -> tf.Tensor:
  """Return half the sum of squared distances from a center, or from zero."""
  return 0.5 * _total(
    tf.square(w if center is None else w - center[n])
    for n, w in weights.items()
  )


def _total(tensors: Iterable[tf.Tensor]) -> tf.Tensor:
  """Return the sum of all numbers, float32."""
  sums = (tf.reduce_sum(tf.cast(tensor, tf.float32)) for tensor in tensors)
  return tf.add_n([tf.constant(0.0), *sums])


def proximal(penalty: float, tier: str = tiers.GLOBAL) -> phases.Term:
  """Keep weights near the ones that the client received.

  `penalty / 2 * ||w - w_received||^2`: FedProx (Li et al., 2020, Eq. 2) for
  the GLOBAL tier, Ditto (Li et al., 2021, Eq. 2) for PERSONAL, which is kept
  near the GLOBAL weights from the start of the round.

  Args:
    penalty: mu of FedProx, lambda of Ditto.
    tier: The tier of these weights.

  Raises:
    SettingError: If the penalty is negative or not finite, or
      there is no such tier.
  """
  _check_penalty(penalty, 'proximal')
  (tier,) = tiers.check_tiers(tier, 'proximal')
  center = tiers.GLOBAL if tier == tiers.PERSONAL else tier

  def term(client: ClientContext) -> tf.Tensor:
    return penalty * _half_square(
      client.weights.get(tier, {}), client.received.get(center, {})
    )

  return term


def moreau(penalty: float) -> phases.Term:
  """Tie a client's personal copy to the current global weights.

  `penalty / 2 * ||theta - w||^2`, the term of the Moreau envelope in pFedMe
  (Dinh et al., 2020, Eq. 3). A phase that trains PERSONAL on it and on the loss
  finds theta; one that trains GLOBAL only on it moves w along the envelope's
  gradient, `penalty * (w - theta)`.

  Args:
    penalty: lambda of the paper.

  Raises:
    SettingError: If the penalty is negative or not finite.
  """
  _check_penalty(penalty, 'moreau')

  def term(client: ClientContext) -> tf.Tensor:
    return penalty * _half_square(
      client.weights[tiers.PERSONAL], client.weights[tiers.GLOBAL]
    )

  return term


def l2(penalty: float, tier: str) -> phases.Term:
  """Pull the weights of a tier to zero, `penalty / 2 * ||w||^2`.

  Args:
    penalty: At least 0.
    tier: The tier.

  Raises:
    SettingError: If the penalty is negative or not finite, or
      there is no such tier.
  """
  _check_penalty(penalty, 'l2')
  (tier,) = tiers.check_tiers(tier, 'l2')

  def term(client: ClientContext) -> tf.Tensor:
    return penalty * _half_square(client.weights.get(tier, {}))

  return term


def linear(
  slopes: Callable[[ClientContext], tiers.NamedTensors],
) -> phases.Term:
  """Add the same slopes to the gradient in each step, `<slopes, w>`.

  Args:
    slopes: (the client's context) -> a slope for each GLOBAL variable, by name.
  """

  def term(client: ClientContext) -> tf.Tensor:
    added = slopes(client)
    return _total(
      added[name] * tensor
      for name, tensor in client.weights.get(tiers.GLOBAL, {}).items()
    )

  return term
