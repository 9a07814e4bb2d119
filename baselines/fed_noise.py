"""Fednoise, a baseline of HPFL (Wu et al., WWW 2021), section 5.2.3.

FedAvg with local differential privacy: each client adds noise, such as Laplace
noise, to what it sends, and the server averages that.

Its guarantee is that of its noise, for each client against anyone who sees what
the client sends, including the server:

*   `LaplaceNoise(clip, noise_multiplier)`: epsilon = 2 * clip / scale, that is
    2 / noise_multiplier, per client and round, with delta 0. Rounds add up.
*   `LocalNoise(clip, noise_multiplier)`: Gaussian noise, whose epsilon at a
    delta `accounting.local_epsilon` computes, over all rounds of a client.

The unit of privacy is the client, with all its users and examples, and not a
user among them. Local variables are not sent and need no noise.

Deviations: the paper gives neither the amount of noise nor a clip; without a
clip noise guarantees nothing. The noise is added to the client's update, and
not to its weights, which are the update and what the server already knows.
Clients have equal weights, as their numbers of examples would be sent without
noise, and clients without examples also send noise.
"""

import dataclasses

from tff_partial.composition import Aggregation
from tff_partial.composition import with_equal_weights
from tff_partial.dp.local_noise import LaplaceNoise
from tff_partial.dp.local_noise import LocalNoise
from tff_partial.errors import SettingError
from tff_partial.model import models
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training


def build_fed_noise(
  model: models.PartialModel,
  *,
  noise: LaplaceNoise | LocalNoise,
  training: Phase = Phase(),
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
) -> PartialProcess:
  """Build Fednoise: train all variables, clip and noise updates.

  Args:
    model: The model; its local variables, if any, are trained and remembered.
    noise: The noise of clients' updates, `LaplaceNoise` as in the paper or
      `LocalNoise`.
    training: How a client trains: optimizer, or one for each tier, batches,
      epochs.
    aggregation: How the server aggregates updates, except
      `postprocess_update`. By default clients have equal weights.
    server_optimizer: Applies aggregated updates; SGD with rate 1 by default.

  Example:
    >>> process = baselines.build_fed_noise(
    ...   whole, noise=LaplaceNoise(clip=1.0, noise_multiplier=0.1)
    ... )

  Raises:
    CompositionError, SettingError, PhaseError: If the arguments do not fit
      together.
  """
  aggregation = with_equal_weights(aggregation)
  if aggregation.postprocess_update is not None:
    raise SettingError(
      f'postprocess_update={aggregation.postprocess_update!r}: what clients do '
      f'before they send is to add noise={noise!r}. Pass one of the two to '
      'build_fed_noise, as `noise`.'
    )
  return partial_training.build_simultaneous(
    model,
    training=training,
    aggregation=dataclasses.replace(aggregation, postprocess_update=noise),
    server_optimizer=server_optimizer,
  )


build_fed_noise_eval = partial_training.build_evaluation
