"""Attacks a private recipe, to see whether its epsilon can be true.

`python -m tasks.audit --flagfile=RECIPE --output_dir=OUT` trains the recipe
once with `--canaries` more clients, of whom each is there or not by a coin of
its own, and guesses from what the run releases which ones were there (see
`tff_partial/dp/privacy_audit.py`). What the guesses prove is a lower bound of
epsilon. The program ends with status 1 if it is above what the run claims; if
it is not, nothing is proved. OUT/audit.json says what was found; the trained
weights are thrown away, as canaries pull them about.
"""

import json

from absl import flags

from tasks import runs
from tasks.errors import OptionError
from tff_partial.dp import privacy_audit
from tff_partial.training import programs

FLAGS = flags.FLAGS
_RUN = runs.run_flags()
_FILE = 'audit.json'

flags.DEFINE_integer(
  'canaries',
  500,
  'How many clients are there or not, to be guessed. The more, the sharper.',
  lower_bound=8,
)
flags.DEFINE_float(
  'confidence',
  0.95,
  'That the bound is right.',
  lower_bound=0.5,
  upper_bound=1.0 - 1e-9,
)


class RefutedError(programs.ProgramError):
  """Raised when a run cannot be as private as it claims."""


def main() -> int | None:
  """Trains with canaries, guesses them, and says what that proves."""
  runs.quiet_libraries()
  if not FLAGS.output_dir:
    raise OptionError('--output_dir: name a folder for what is found.')
  folder = runs.Folder(FLAGS.output_dir)
  folder.path.mkdir(parents=True, exist_ok=True)
  task = _RUN.task()
  canaries = privacy_audit.Canaries(FLAGS.canaries, FLAGS.seed)
  with runs.runtime():
    trainable = _RUN.trainable(task, canaries)
    if trainable.ledger is None:
      raise OptionError(
        'The run claims no epsilon that an attack could refute. Give '
        '--target_epsilon or --noise_multiplier.'
      )
    trained = programs.train(
      trainable.process,
      canaries.among(trainable.clients()),
      rounds=FLAGS.rounds,
      clients_per_round=trainable.clients_per_round,
      seed=FLAGS.seed,
      dropout_rate=FLAGS.dropout_rate,
      privacy=trainable.ledger,
      show_progress=runs.shows_progress(),
    )
  claimed = float((trained.privacy or {})['epsilon'])
  proof = privacy_audit.prove(
    canaries.scores(trained.state),
    canaries.present,
    FLAGS.delta,
    FLAGS.confidence,
  )
  found = {
    'claimed_epsilon': claimed,
    'proved_epsilon': proof.epsilon,
    'delta': FLAGS.delta,
    'confidence': FLAGS.confidence,
    'canaries': canaries.number,
    'guesses': proof.guesses,
    'right': proof.right,
    'rounds': trained.rounds,
  }
  runs.write_whole(
    folder.path / _FILE, json.dumps(runs.finite(found), indent=2) + '\n'
  )
  guessed = (
    f'{proof.right} of {proof.guesses} guesses about {canaries.number} '
    f'canaries are right, so that epsilon is at least {proof.epsilon:.4g} at '
    f'delta {FLAGS.delta:.3g} (confidence {FLAGS.confidence:g}).'
  )
  if proof.epsilon > claimed:
    raise RefutedError(
      f'The claimed epsilon of {claimed:.4g} is refuted: {guessed} Do not '
      'publish what this run releases.'
    )
  print(f'The claimed epsilon of {claimed:.4g} is not refuted: {guessed}')
  return None


if __name__ == '__main__':
  runs.run_main(main)
