"""Fednoise, a baseline of HPFL (Wu et al., WWW 2021), section 5.2.3.

FedAvg with local differential privacy: each client adds noise, such as Laplace
noise, to what it sends, and the server averages what it gets.

What it guarantees is that of its noise, for each client against anyone who sees
what the client sends, the server included:

*   `LaplaceNoise(clip, noise_multiplier)`: epsilon = 2 * clip / scale, that is
    2 / noise_multiplier, per client and round, with delta 0. Rounds add up.
*   `LocalNoise(clip, noise_multiplier)`: Gaussian noise, whose epsilon at a
    delta `accounting.local_epsilon` counts, over all rounds of a client.

Here the client is the one protected, with all users and examples that it has,
and not a user among them. Local variables are not sent and need no noise.

Deviations: the paper says neither how much noise it adds nor that it clips;
without a clip no noise guarantees anything. Noised is by how much the client
moved the weights, and not the weights, which are that and what the server knows
already. Clients count alike, as their numbers of examples would be sent without
noise, and also one without examples sends noise.
"""

from typing import Unpack

from tff_partial import errors
from tff_partial import evaluation
from tff_partial.composition import Joining
from tff_partial.dp.laplace_noise import LaplaceNoise
from tff_partial.dp.local_noise import LocalNoise
from tff_partial.exchange.messages import ClientWeighting
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training


class NoiseError(errors.UserError, ValueError):
  """Raised for clients that are to add two kinds of noise."""


def build_fed_noise(
  model: models.PartialModel,
  *,
  noise: LaplaceNoise | LocalNoise,
  training: Phase = Phase(),
  **joining: Unpack[Joining],
) -> PartialProcess:
  """Clients train all variables, and clip and noise what they send.

  Args:
    model: The model; its local variables, if any, are trained and remembered.
    noise: What clients do to their update, `LaplaceNoise` as in the paper or
      `LocalNoise`.
    training: How a client trains: optimizer, or one for each tier, batches,
      epochs.
    **joining: How the server aggregates updates, as for `compose`, but for
      `before_sending`.

  Raises:
    CompositionError, NoiseError, PhaseError: If the arguments do not fit
      together.
  """
  if joining.get('before_sending') is not None:
    raise NoiseError(
      f'before_sending={joining["before_sending"]!r}: what clients do before '
      f'they send is to add noise={noise!r}. Pass one of the two to '
      'build_fed_noise, as `noise`.'
    )
  return partial_training.build_simultaneous(
    model,
    training=training,
    **{
      'client_weighting': ClientWeighting.UNIFORM,
      **joining,
      'before_sending': noise,
    },
  )


def build_fed_noise_eval(
  model: models.PartialModel, **measuring: Unpack[evaluation.Measuring]
) -> evaluation.Evaluation:
  """Clients are measured with the local variables that they remember.

  With `personalise`, they train them before, as new clients need it.

  Args:
    model: The model.
    **measuring: As for `evaluation.build_query_evaluation`.
  """
  return partial_training.build_evaluation(model, **measuring)
