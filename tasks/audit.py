"""Attacks a private recipe, to test whether its epsilon can be true.

`tff-partial audit --recipe=RECIPE --output_dir=OUT` trains the recipe
once with `--canaries` more clients, each of which takes part or not by the toss
of a coin, and guesses from what the run releases which ones took part (see
`tff_partial/checks/privacy_audit.py`). The guesses prove a lower bound of
epsilon. The program ends with status 1 if the bound is above the epsilon that
the run claims; if not, nothing is proved. OUT/audit.json has the result. The
trained weights are not kept, since canaries distort them.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TYPE_CHECKING

from tasks import task as tasks_lib
from tasks.errors import OptionError
from tasks.experiment.command_line.program import Program
from tasks.experiment.config import Config
from tasks.experiment.options.loop import Output
from tasks.experiment.runs.folder import finite
from tasks.experiment.runs.folder import Folder
from tasks.options import option
from tasks.options import Options
import tff_partial
from tff_partial.training import files
from tff_partial.training.errors import ProgramError

if TYPE_CHECKING:
  from tasks.experiment.trainable import Trainable
  from tff_partial.checks import privacy_audit

_FILE = 'audit.json'
_CANARIES = 500


@dataclasses.dataclass(frozen=True)
class Audit(Options):
  """Options of the attack's strength."""

  canaries: int | None = option(
    None,
    'Additional clients that may take part or not, to be guessed: the more, '
    'the sharper the bound. By default 500, or as many as the run can hide.',
    at_least=8,  # `audit_bounds.FEWEST_GUESSES`.
  )
  confidence: float = option(
    0.95, 'Confidence in the bound.', at_least=0.5, at_most=1.0 - 1e-9
  )


def with_canaries(
  config: Config, task: tasks_lib.Task, asked: int | None
) -> tuple[Trainable, privacy_audit.Canaries]:
  """Build a run that hides canaries.

  Args:
    config: The experiment.
    task: Its task.
    asked: The number of canaries; None for 500, or as many as it can hide.

  Raises:
    OptionError: If more are requested than it can hide.
  """
  from tasks.experiment.trainable import Trainable
  from tff_partial.checks import privacy_audit

  number = _CANARIES if asked is None else asked
  while True:
    canaries = privacy_audit.Canaries(number, config.seed)
    try:
      return Trainable(config, task, canaries), canaries
    except privacy_audit.TooManyCanariesError as error:
      if asked is not None:
        raise OptionError(f'--canaries={asked}: {error}') from None
      number = error.largest


def _attacked(
  config: Config, task: tasks_lib.Task, asked: int | None
) -> tuple[privacy_audit.Canaries, dict[str, Any]]:
  """Build the run to attack; return its canaries and checked arguments."""
  from tasks.experiment.runs.running import Prepared

  trainable, canaries = with_canaries(config, task, asked)
  prepared = Prepared(trainable, canaries.among(trainable.clients()))
  arguments = prepared.arguments(config, Output())
  tff_partial.training.programs.check(**arguments)
  return canaries, arguments


def main(config: Config, output: Output, audit: Audit) -> None:
  from tasks.experiment.runs import releasing
  from tasks.experiment.runs.running import executing
  from tasks.experiment.runs.running import load
  from tff_partial.checks import audit_bounds

  if not output.output_dir:
    raise OptionError('--output_dir: name a folder for what is found.')
  if not config.privacy.is_on:
    raise OptionError(
      'The run claims no epsilon that an attack could refute. Give '
      '--target_epsilon or --noise_multiplier.'
    )
  if not config.data.is_synthetic:
    print(
      'What an audit finds is one more release of its users: its epsilon adds '
      'to that of any other run. With --data=synthetic it costs them nothing.'
    )
  folder = Folder(output.output_dir)
  folder.take()
  task = load(config, releasing.at_start(config, folder))
  with executing(config.runtime):
    canaries, arguments = _attacked(config, task, audit.canaries)
    if releasing.is_due(config, folder):
      # Everything was checked with a placeholder.
      task = releasing.drawn(config, folder, task)
      canaries, arguments = _attacked(config, task, audit.canaries)
    trained = tff_partial.train(
      **arguments, show_progress=output.shows_progress
    )
  delta = config.privacy.delta
  claimed = float((trained.privacy or {})['epsilon'])
  proof = audit_bounds.prove(
    canaries.scores(trained.state), canaries.present, delta, audit.confidence
  )
  found = {
    'claimed_epsilon': claimed,
    'proved_epsilon': proof.epsilon,
    'delta': delta,
    'confidence': audit.confidence,
    'canaries': canaries.number,
    'guesses': proof.guesses,
    'right': proof.right,
    'rounds': trained.rounds,
  }
  text = json.dumps(finite(found), indent=2)
  files.write_whole(folder.path / _FILE, text + '\n')
  guessed = (
    f'{proof.right} of {proof.guesses} guesses about {canaries.number} '
    f'canaries are right, so that epsilon is at least {proof.epsilon:.4g} at '
    f'delta {delta:.3g} (confidence {audit.confidence:g}).'
  )
  if proof.epsilon > claimed:
    raise ProgramError(
      f'The claimed epsilon of {claimed:.4g} is refuted: {guessed} Do not '
      'publish what this run releases.'
    )
  print(f'The claimed epsilon of {claimed:.4g} is not refuted: {guessed}')


PROGRAM = Program(main, (Config(), Output(), Audit()))

if __name__ == '__main__':
  PROGRAM.run()
