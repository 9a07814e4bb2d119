"""Accounting of private runs, which refuses to leave one uncounted.

A process that clips and noises updates is refused without a ledger, unless
`privacy` is 'unaccounted': a simulation of the noise without an epsilon. With a
ledger, clients are drawn as its plan says. Unless it is a simulation, cohorts
and clients' seeds follow from a secret of the operating system, which is kept
in the checkpoints, and not from the run's seed. Exact losses, metrics and
numbers of clients are recorded with `diagnostics` alone, in columns whose names
end in `_not_private`.
"""

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

from absl import logging

from tff_partial import processes
from tff_partial.dp import clipping as clipping_lib
from tff_partial.dp import local_noise
from tff_partial.dp import mechanisms
from tff_partial.dp import privacy_plans
from tff_partial.dp import samplings
from tff_partial.training.errors import ProgramError

# A simulation of the noise, without an epsilon.
UNACCOUNTED: Final = 'unaccounted'
Accounting: TypeAlias = privacy_plans.PrivacyLedger | Literal['unaccounted']


def ledger_of(
  process: processes.PartialProcess,
  privacy: Accounting | None,
  population: int,
  clients_per_round: int,
  rounds: int,
) -> privacy_plans.PrivacyLedger | None:
  """Return the ledger that counts a run's rounds, or None if not needed.

  Args:
    process: The process to train.
    privacy: The ledger that was given, or `UNACCOUNTED`, if any.
    population: Number of clients that may take part.
    clients_per_round: Number of clients whose updates a round aggregates.
    rounds: Number of rounds of the whole run.

  Raises:
    PrivacyError: If the ledger does not match the process.
    ProgramError: If the process is private and nothing counts its cost, or if
      `privacy` is not valid for it.
  """
  if isinstance(privacy, privacy_plans.PrivacyLedger):
    privacy.check(process.mechanism)
    if rounds > privacy.plan.rounds:
      logging.warning(
        'The run has %d rounds, %d were planned for epsilon %.4g: all of them '
        'cost epsilon %.4g.',
        rounds,
        privacy.plan.rounds,
        privacy.plan.epsilon,
        privacy.epsilon(rounds),
      )
    return privacy
  if privacy not in (None, UNACCOUNTED):
    raise ProgramError(
      f'`privacy` must be a PrivacyLedger, {UNACCOUNTED!r} or None, found '
      f'{privacy!r:.80}.'
    )
  if not process.is_noised:
    if privacy is not None:
      raise ProgramError(
        f'privacy={privacy!r}: the process is not private; nothing clips or '
        'noises what clients send. Leave it out.'
      )
    return None
  if privacy is None:
    remedy = _remedy(process.mechanism, population, clients_per_round, rounds)
    raise ProgramError(
      'The process clips and noises what clients send, but nothing would count '
      f'what the run costs them. {remedy} For a simulation of which no epsilon '
      f'is said, pass privacy={UNACCOUNTED!r}.'
    )
  return None


def _remedy(
  mechanism: mechanisms.Mechanism | None,
  population: int,
  clients_per_round: int,
  rounds: int,
) -> str:
  """Describe how to account for the noise of a process."""
  if mechanism is None:
    return (
      'No ledger can, as only parts of an update have noise: clip by tier, '
      'with one private mean for all of them.'
    )
  clipping = mechanism.clipping
  if isinstance(clipping, local_noise.L1Clip):
    return 'No ledger counts Laplace noise, LaplaceNoise.epsilon does.'
  if isinstance(clipping, Mapping):
    kinds = list(clipping.values())
    parts = (f'{part!r}: clipping.{how}' for part, how in clipping.items())
    clips = f'{{{", ".join(parts)}}}'
  else:
    kinds = [clipping]
    clips = f'clipping.{clipping}'
  planned = [
    clips,
    f'noise_multiplier={mechanism.noise_multiplier}',
    # Below 1 / population.
    f'delta=1e-{len(str(population))}',
    f'population={population}',
    f'clients_per_round={mechanism.clients_per_round or clients_per_round:g}',
    f'rounds={rounds}',
  ]
  if mechanism.where == mechanisms.LOCAL:
    planned.append(f'sampling={samplings.EveryUpdate.name!r}')
  elif any(isinstance(kind, clipping_lib.TreeNoise) for kind in kinds):
    planned.append(f'sampling={samplings.OncePerTree.name!r}')
  if mechanism.shares is not None:
    planned.append(f'shares={dict(mechanism.shares)}')
  simulated = ', simulation=True' if mechanism.is_simulation else ''
  return (
    'Pass privacy=privacy_plans.PrivacyLedger(plan'
    f'{simulated}), with the plan that the noise was computed by, or with '
    f'plan = privacy_plans.plan({", ".join(planned)}).'
  )
