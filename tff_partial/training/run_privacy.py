"""Accounting of private runs, which refuses to leave one uncounted.

A process that clips and noises updates is refused without a ledger, unless
`privacy` is 'unaccounted': a simulation of the noise without an epsilon. With a
ledger, clients are drawn as its plan says. Unless it is a simulation, cohorts
and clients' seeds follow from a secret of the operating system, which is kept
in the checkpoints, and not from the run's seed. Exact losses, metrics and
numbers of clients are recorded with `diagnostics` alone, in columns whose names
end in `_not_private`.
"""

from typing import Final, Literal, TypeAlias

from absl import logging

from tff_partial import processes
from tff_partial.dp import local_noise
from tff_partial.dp import mechanisms
from tff_partial.dp import privacy_plans
from tff_partial.training.errors import ProgramError

# A simulation of the noise, without an epsilon.
UNACCOUNTED: Final = 'unaccounted'
Accounting: TypeAlias = privacy_plans.PrivacyLedger | Literal['unaccounted']


def ledger_of(
  process: processes.PartialProcess, privacy: Accounting | None, rounds: int
) -> privacy_plans.PrivacyLedger | None:
  """Return the ledger that counts a run's rounds, or None if not needed.

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
  mechanism = process.mechanism
  if mechanism is None:
    if privacy is not None:
      raise ProgramError(
        f'privacy={privacy!r}: the process is not private; nothing clips or '
        'noises what clients send. Leave it out.'
      )
    return None
  if privacy is None:
    raise ProgramError(
      'The process clips and noises what clients send, but nothing would count '
      f'what the run costs them. {_remedy(mechanism)} For a simulation without '
      f'an epsilon, pass privacy={UNACCOUNTED!r}.'
    )
  return None


def _remedy(mechanism: mechanisms.Mechanism) -> str:
  """Describe how to account for the noise of a process."""
  if isinstance(mechanism.clipping, local_noise.L1Clip):
    return 'No ledger counts Laplace noise, LaplaceNoise.epsilon does.'
  simulated = ', simulation=True' if mechanism.is_simulation else ''
  return (
    'Compute the noise by a plan, plan = privacy_plans.plan(...), as '
    'docs/privacy.md does, and pass '
    f'privacy=privacy_plans.PrivacyLedger(plan{simulated}).'
  )
