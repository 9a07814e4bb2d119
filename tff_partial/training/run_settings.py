"""By what a run is this one, so that no other goes on from its checkpoints."""

from collections.abc import Mapping
from typing import Any

from tff_partial import fingerprints
from tff_partial import processes
from tff_partial import random_bits
from tff_partial.data import cohorts
from tff_partial.dp import privacy_plans
from tff_partial.training import evaluation_sets
from tff_partial.training import sampling
from tff_partial.training import selection
from tff_partial.training.errors import ProgramError

# Of a source that has to load its clients, as many are looked at.
_CLIENTS_COMPARED = 64
# What makes a run another one, in words, where the value alone tells nothing.
_SETTINGS = {
  'process': 'process (algorithm, model, optimizers or learning rates)',
  'examples': "clients' examples",
}


def describe(
  process: processes.PartialProcess,
  clients: cohorts.ClientSource,
  validation: evaluation_sets.EvaluationSet | None,
  sampler: sampling.CohortSampler,
  evaluate_every: int,
  select: selection.Selection,
  privacy: privacy_plans.PrivacyLedger | None,
) -> dict[str, str]:
  """All by which a run is this one: its checkpoints go on with the same only.

  A private run that went on with other examples would publish two sums with the
  same noise, whose difference is exact. So its examples are compared in full.

  Args:
    process: The algorithm.
    clients: The clients to train with.
    validation: Who is measured in between, or None.
    sampler: Draws the cohorts.
    evaluate_every: Rounds between evaluations.
    select: What makes a round the best.
    privacy: Counts what the run costs, or None.
  """
  sample = _CLIENTS_COMPARED if privacy is None else None
  settings = {
    'seed': str(sampler.seed),
    'clients_per_round': str(sampler.clients_per_round),
    'oversample': str(sampler.oversample),
    'dropout_rate': str(sampler.dropout_rate),
    'evaluate_every': str(evaluate_every),
    'select': str(select),
    'privacy': 'None',
    'process': of_process(process),
    **_described(clients, sample),
  }
  if sampler.participation != sampling.Participation():
    # Runs of older versions, which had none, do not say.
    settings['participation'] = str(sampler.participation)
  if privacy is not None:
    # A process whose noise can be drawn again needs such a ledger.
    kind = 'a' if privacy.simulation else 'no'
    settings['privacy'] = f'{privacy.plan.terms}, {kind} simulation'
  described: dict[str, str] = {}
  if validation is not None:
    described = {
      'evaluation': fingerprints.of_computations(
        validation.evaluation.evaluate
      ),
      **_described(validation.clients, sample),
    }
  return {
    **settings,
    **{f'validation {name}': value for name, value in described.items()},
  }


def of_process(process: processes.PartialProcess) -> str:
  """The fingerprint of a process.

  Args:
    process: The process.
  """
  return fingerprints.of_computations(
    process.initialize, process.next, process.initialize_client
  )


def _described(
  clients: cohorts.ClientSource, sample: int | None
) -> dict[str, str]:
  """Which clients a source has, and what their examples are."""
  ids = clients.client_ids
  digest = random_bits.derive('clients', *ids).tobytes().hex()
  return {
    'clients': f'{len(ids)} clients ({digest})',
    'examples': clients.fingerprint(sample),
  }


def check(
  before: Mapping[str, str], now: Mapping[str, str], where: Any
) -> None:
  """Refuses to go on with a run that is another one, naming what differs.

  Args:
    before: The settings of the run that was begun.
    now: Those with which it is to go on.
    where: Its folder.
  """
  for name in {**before, **now}:
    if before.get(name) != now.get(name):
      break
  else:
    return
  what = f'the {_SETTINGS[name]}' if name in _SETTINGS else name
  noted = [one.get(name, 'nothing') for one in (before, now)]
  remedy = 'Give the same to go on with it, or choose another folder.'
  if name == 'privacy':
    remedy = (
      'What is spent already was counted with the former. Give the same to go '
      'on with it; with a target epsilon, the same number of rounds, too.'
    )
  raise ProgramError(
    f'{where}: the run in this folder was begun with another setting: {what} '
    f'was {noted[0]} and is now {noted[1]}. {remedy}'
  )
