"""Settings of a run, so that no other resumes from its checkpoints."""

from collections.abc import Iterator, Mapping
import itertools
import numbers
import re
from typing import Any

from absl import logging
import tensorflow_federated as tff

from tff_partial import evaluation
from tff_partial import phases
from tff_partial import processes
from tff_partial import random_bits
from tff_partial.data import cohorts
from tff_partial.solvers.exact import Exact
from tff_partial.training import fingerprints
from tff_partial.training import training_loop
from tff_partial.training.errors import ProgramError

# Number of clients to compare if a source has to load them.
_CLIENTS_COMPARED = 64
# Descriptions of settings whose values alone mean nothing.
RELEASED = 'released'
_LATER = RELEASED, 'validation remembering'
_COMPUTATIONS = 'process', 'validation evaluation'
# Numbers in these fingerprints, to name what differs.
_NUMBERS = _PHASES, _VALIDATION = 'phases of the process', 'validation work'
_SETTINGS = {
  _PHASES: 'setting of a phase of the process',
  _VALIDATION: 'setting of a phase of the validation',
  'process': 'process (algorithm, model, optimizers or learning rates)',
  'examples': "clients' examples",
  RELEASED: 'release before the first round, such as a private vocabulary,',
}


def describe(loop: training_loop.TrainingLoop) -> dict[str, str]:
  """Describe the settings that must match for a run to resume.

  A private run that resumed with other examples would publish two sums with the
  same noise, whose difference is exact. So its examples are compared in full.
  Of a function that selects clients only the name is compared.
  """
  sampler, privacy = loop.sampler, loop.privacy
  validation, select_clients = loop.validation, loop.select_clients
  is_private = privacy is not None
  settings = {
    'seed': str(sampler.seed),
    'clients_per_round': str(sampler.clients_per_round),
    'oversample': str(sampler.oversample),
    'dropout_rate': str(sampler.dropout_rate),
    'evaluate_every': str(loop.evaluate_every),
    'select': str(loop.select),
    'privacy': 'None',
    **of_process(loop.process),
    **of_clients(loop.clients, is_private),
  }
  if select_clients is not None:
    settings['select_clients'] = getattr(
      select_clients, '__qualname__', type(select_clients).__qualname__
    )
  if privacy is not None:
    # A process with reproducible noise needs a simulation's ledger.
    kind = 'a' if privacy.simulation else 'no'
    settings['privacy'] = f'{privacy.plan.terms}, {kind} simulation'
    if privacy.released:
      # First, as clients' examples follow from it.
      settings = {RELEASED: privacy.released, **settings}
  described: dict[str, str] = {}
  if validation is not None:
    described = {
      **of_evaluation(validation.evaluation),
      **of_clients(validation.clients, is_private),
      'remembering': str(validation.remembering),
    }
  return {
    **settings,
    **{f'validation {name}': value for name, value in described.items()},
  }


def of_process(process: processes.PartialProcess) -> dict[str, str]:
  """Describe a process: by numbers to name what differs, then in full."""
  work = process.work.work if process.work is not None else ()
  return {
    _PHASES: _numbers_of_phases(work),
    'process': fingerprints.of_computations(
      process.initialize, process.next, process.initialize_client
    ),
  }


def of_evaluation(measure: evaluation.Evaluation) -> dict[str, str]:
  """Describe an evaluation likewise."""
  return {
    'work': _numbers_of_phases(measure.parts.work),
    'evaluation': fingerprints.of_computations(measure.evaluate),
  }


def _numbers_of_phases(work: phases.Work) -> str:
  return '; '.join(
    ', '.join(_numbers(phase)) for phase in phases.all_phases(work)
  )


def _numbers(value: Any, name: str = '') -> Iterator[str]:
  """Yield the numbers of a phase and of its optimizers, by their names."""
  if isinstance(value, numbers.Real):
    yield f'{name.strip()} {float(value):.7g}'
  elif isinstance(
    value, (phases.Phase, Exact, tff.learning.optimizers.Optimizer)
  ):
    value = vars(value)
  if isinstance(value, Mapping):
    for inner, part in value.items():
      yield from _numbers(part, f'{name} {inner}')


def of_clients(
  clients: cohorts.ClientSource, is_private: bool
) -> dict[str, str]:
  """Describe the clients of a source and their examples."""
  ids, sample = clients.client_ids, None if is_private else _CLIENTS_COMPARED
  digest = random_bits.derive('clients', *ids).tobytes().hex()
  return {
    'clients': f'{len(ids)} clients ({digest})',
    'examples': clients.fingerprint(sample),
  }


def check(
  before: Mapping[str, str], now: Mapping[str, str], where: Any
) -> None:
  """Refuse to resume a run with other settings, and name what differs."""
  for name in {**before, **now}:
    if name in _LATER and name not in before:
      continue  # Runs of older versions lack it.
    in_both = name in before and name in now
    if name in _NUMBERS and not in_both:
      continue  # One has no validation, or is older: other names say so.
    is_computation = in_both and name in _COMPUTATIONS
    if is_computation and not before[name].startswith(fingerprints.FORM):
      logging.warning(
        '%s: an older version began this run. Its %s is not compared with '
        'that of today: see that it is the same.',
        where,
        name,
      )
      continue
    if before.get(name) != now.get(name):
      break
  else:
    return
  what = f'the {_SETTINGS[name]}' if name in _SETTINGS else name
  noted = [one.get(name, 'nothing') for one in (before, now)]
  if name in _NUMBERS:  # Name the first that differs, as a user writes it.
    each = [re.split('[;,] ', note.replace(' _', ' ')) for note in noted]
    pairs = itertools.zip_longest(*each, fillvalue='nothing')
    noted = next([old, new] for old, new in pairs if old != new)
  changed = f'{what} was {noted[0]} and is now {noted[1]}'
  # Fingerprints explain nothing.
  if name.endswith('examples'):
    changed = f'{what} are others'
  elif name in _COMPUTATIONS:
    changed = f'{what}: it is another one'
    if 'nothing' in noted:
      changed = f'{what}: there {"is" if noted[0] != "nothing" else "was"} none'
  elif name.endswith('clients'):
    counts = [note.partition(' (')[0] for note in noted]
    changed = f'{what}: they were {counts[0]} and are now {counts[1]}'
    if counts[0] == counts[1]:
      changed = f'{what}: they are as many, but have other ids'
  remedy = 'Give the same to go on with it, or choose another folder.'
  if name == 'privacy':
    remedy = (
      'What is spent already was counted with the former. Give the same to go '
      'on with it; with a target epsilon, the same number of rounds, too.'
    )
  raise ProgramError(
    f'{where}: the run in this folder was begun with another setting: '
    f'{changed}. {remedy}'
  )
