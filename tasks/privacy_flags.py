"""Flags of differential privacy, and what does not go with it.

A run is private if `--target_epsilon` or `--noise_multiplier` is given. What it
then promises, and what not, docs/privacy.md says.
"""

from collections.abc import Iterable, Mapping
import math
from typing import Any

from absl import flags

from tasks.errors import OptionError
from tff_partial import aggregators
from tff_partial import composition
from tff_partial import messages
from tff_partial.dp import accounting
from tff_partial.dp import clippings
from tff_partial.dp import privacy
from tff_partial.dp import privacy_audit
from tff_partial.dp import privacy_plans

FLAGS = flags.FLAGS

CENTRAL, LOCAL = privacy.CENTRAL, privacy.LOCAL
GAUSSIAN, TREE = 'gaussian', 'tree'
_SAMPLINGS = {
  'poisson': accounting.PoissonSampling.name,
  'fixed': accounting.FixedSizeSampling.name,
}
MAY_BE_INFINITE = ('target_epsilon',)
# Who must keep what it knows. Clients are simulated by a program that draws
# their seeds: their noise hides nothing from whoever runs it.
_TRUSTED = {
  CENTRAL: 'the server, and who can read the checkpoints',
  LOCAL: 'this program, which draws the noise of all clients, and who can read '
  'the checkpoints; on real devices each client alone',
}
# Flags that say nothing without one of the first two.
_GOAL = ('target_epsilon', 'noise_multiplier')
_OTHERS = (
  'clip',
  'count_stddev',
  'noise_seed',
  'dp',
  'dp_mechanism',
  'dp_sampling',
  'simulated_population',
  'diagnostics',
)
# Fields of result.json that the training data enter without noise.
NOT_PRIVATE = (
  'rounds',
  'diverged',
  'data',
  'validation',
  'test',
  'best',
  'seconds',
)


def _refuse(flag: str, why: str, remedy: str) -> None:
  raise OptionError(
    f'--{flag}={FLAGS[flag].value}: {why}, which is not covered by '
    f'--target_epsilon and --noise_multiplier. {remedy}'
  )


class PrivacyFlags:
  """Whether, how and at what price a run protects those who take part."""

  def __init__(self) -> None:
    """Defines the flags."""
    flags.DEFINE_float(
      'target_epsilon',
      None,
      'Differential privacy of whole users, as much as this in all rounds '
      'together: the noise is computed from it. inf clips and adds no noise.',
    )
    flags.DEFINE_float(
      'noise_multiplier',
      None,
      'The same by the noise, in clips: epsilon is computed from it.',
      lower_bound=0.0,
    )
    flags.DEFINE_float(
      'delta', 1e-5, 'At which epsilon is meant; below one in the population.'
    )
    flags.DEFINE_enum(
      'dp',
      CENTRAL,
      [CENTRAL, LOCAL],
      'Who adds noise: the server, once to the sum, or each client before it '
      'sends, so that the server need not be trusted.',
    )
    flags.DEFINE_enum(
      'dp_mechanism',
      GAUSSIAN,
      [GAUSSIAN, TREE],
      'Noise of its own for each round, or for sums of rounds (DP-FTRL), with '
      'which nobody is drawn twice until all the others were.',
    )
    flags.DEFINE_enum(
      'dp_sampling',
      None,
      sorted(_SAMPLINGS),
      'Each client is in a round with the same probability, whoever else is '
      '(the default), or cohorts have the same size, which costs more.',
    )
    flags.DEFINE_float(
      'clip',
      None,
      'The largest norm of an update; by default it follows --clip_quantile.',
    )
    flags.DEFINE_float(
      'clip_quantile',
      0.5,
      'Share of the clients that adaptive clipping does not clip.',
      lower_bound=0.0,
      upper_bound=1.0,
    )
    flags.DEFINE_float(
      'initial_clip', 0.1, 'Where adaptive clipping begins.', lower_bound=0.0
    )
    flags.DEFINE_float(
      'count_stddev',
      None,
      'Noise of the count that adaptive clipping follows, in clients; a '
      'twentieth of a cohort by default. The more, the more noise updates may '
      'have.',
      lower_bound=0.0,
    )
    flags.DEFINE_integer(
      'noise_seed',
      None,
      'Draws the noise, and --seed the cohorts: a simulation, which protects '
      'from nobody who knows them. By default the operating system draws both.',
    )
    flags.DEFINE_integer(
      'simulated_population',
      None,
      'Computes epsilon as if so many distinct users took part; a simulation '
      'of a larger population by the one there is.',
      lower_bound=1,
    )
    flags.DEFINE_bool(
      'diagnostics',
      False,
      'Writes down what is exact of the cohorts of a private run, too: losses, '
      'how many clients came, how many were clipped. None of it is private.',
    )

  @property
  def is_on(self) -> bool:
    """Whether the run is private."""
    return any(FLAGS[name].value is not None for name in _GOAL)

  def check(self) -> None:
    """Refuses flags that do not go together.

    Raises:
      OptionError: With the flag, and what to do.
    """
    if not self.is_on:
      for name in _OTHERS:
        if FLAGS[name].value != FLAGS[name].default:
          raise OptionError(
            f'--{name}={FLAGS[name].value}: the run is not private. Give '
            '--target_epsilon or --noise_multiplier, too, or leave it out.'
          )
      return
    if all(FLAGS[name].value is not None for name in _GOAL):
      raise OptionError(
        f'--target_epsilon={FLAGS.target_epsilon} and --noise_multiplier='
        f'{FLAGS.noise_multiplier}: each follows from the other. Leave one out.'
      )
    if FLAGS.simulated_population and FLAGS.noise_seed is None:
      raise OptionError(
        '--simulated_population: such an epsilon protects nobody, so the run '
        'must be labelled a simulation. Give --noise_seed, too.'
      )
    needs_clip = FLAGS.dp == LOCAL or FLAGS.dp_mechanism == TREE
    if needs_clip and FLAGS.clip is None:
      raise OptionError(
        '--dp=local and --dp_mechanism=tree clip to a fixed norm, as no count '
        'of clipped clients comes with them. Give --clip.'
      )
    if needs_clip and FLAGS.dp_sampling is not None:
      raise OptionError(
        f'--dp_sampling={FLAGS.dp_sampling}: chance does not help --dp=local '
        'and --dp_mechanism=tree. Leave it out.'
      )
    if FLAGS.dp == LOCAL and FLAGS.dp_mechanism == TREE:
      raise OptionError(
        '--dp_mechanism=tree: the server adds this noise. Leave it out, or '
        'use --dp=central.'
      )
    self._check_others()

  def _check_others(self) -> None:
    """Refuses flags of others, by which data leave clients without noise."""
    if FLAGS.client_weighting == 'examples':
      _refuse(
        'client_weighting',
        'a client with many examples would move the mean by more than its clip',
        'Use --client_weighting=uniform, the default of a private run.',
      )
    if FLAGS.aggregator != 'mean':
      _refuse(
        'aggregator',
        'its bounds follow from what clients send',
        'Leave it out; private runs have --clip and --clip_quantile.',
      )
    if FLAGS.clip_norm:
      _refuse(
        'clip_norm',
        'a private run clips by itself',
        'Use --clip instead.',
      )
    if FLAGS.algorithm == 'furl' and FLAGS.private_rule == 'scaled':
      _refuse(
        'private_rule',
        "clients are told the exact number of the cohort's examples",
        'Use --private_rule=keep.',
      )
    if FLAGS.task == 'movielens' and FLAGS.centred:
      _refuse(
        'centred',
        'the mean of all training ratings is computed before training',
        'Leave it out, or name a public number with --public_mean.',
      )

  def check_algorithm(self, name: str, *, is_central: bool) -> None:
    """Refuses an algorithm whose clients do not send updates of their own.

    Args:
      name: Of the algorithm.
      is_central: Whether one client holds everybody's examples.

    Raises:
      OptionError: If the algorithm is none for a private run.
    """
    if not self.is_on:
      return
    if is_central:
      raise OptionError(
        f'--algorithm={name}: whoever trains holds the examples of all users, '
        "so that no update is one user's. Use fed_avg for a private run."
      )
    if name == 'local_only':
      raise OptionError(
        f'--algorithm={name}: clients send nothing, so nothing needs noise. '
        'Leave --target_epsilon and --noise_multiplier out.'
      )

  def _clipping(self, population: int) -> clippings.Clipping:
    if FLAGS.dp_mechanism == TREE:
      longest = max(population // FLAGS.clients_per_round, 1)
      return clippings.TreeNoise(FLAGS.clip, min(longest, FLAGS.rounds))
    if FLAGS.clip is not None:
      return clippings.FixedClip(FLAGS.clip)
    return clippings.AdaptiveClip(
      FLAGS.initial_clip,
      quantile=FLAGS.clip_quantile,
      count_stddev=FLAGS.count_stddev,
    )

  def ledger(self, population: int) -> privacy_plans.PrivacyLedger | None:
    """Plans the run; None if it is not private.

    Args:
      population: How many clients take part in training.

    Raises:
      UserError: If the plan is impossible; says which is the nearest.
    """
    if not self.is_on:
      return None
    sampling = _SAMPLINGS[FLAGS.dp_sampling or 'poisson']
    if FLAGS.dp_mechanism == TREE:
      sampling = accounting.OncePerTree.name
    if FLAGS.dp == LOCAL:
      sampling = accounting.EveryUpdate.name
    target, noise_multiplier = FLAGS.target_epsilon, FLAGS.noise_multiplier
    if target == math.inf:
      target, noise_multiplier = None, 0.0
    plan = privacy_plans.plan(
      self._clipping(population),
      target_epsilon=target,
      noise_multiplier=noise_multiplier,
      delta=FLAGS.delta,
      population=FLAGS.simulated_population or population,
      clients_per_round=FLAGS.clients_per_round,
      rounds=FLAGS.rounds,
      sampling=sampling,
    )
    return privacy_plans.PrivacyLedger(
      plan, simulation=FLAGS.noise_seed is not None
    )

  def averaging(
    self,
    ledger: privacy_plans.PrivacyLedger,
    canaries: privacy_audit.Canaries | None,
  ) -> composition.Averaging:
    """How the updates of a private run are joined.

    Args:
      ledger: Of the run.
      canaries: Clients that hide among the others, or None.
    """
    aggregator: aggregators.Factory = aggregators.MeanFactory()
    before_sending: messages.BeforeSending | None = None
    if FLAGS.dp == CENTRAL:
      aggregator = ledger.plan.mean(
        noise_seed=FLAGS.noise_seed, diagnostics=FLAGS.diagnostics
      )
    else:
      before_sending = ledger.plan.local_noise(noise_seed=FLAGS.noise_seed)
    if canaries is not None:
      aggregator = canaries.watched(aggregator)
      before_sending = canaries.before_sending(before_sending)
    return {
      'aggregator': aggregator,
      'client_weighting': messages.ClientWeighting.UNIFORM,
      'before_sending': before_sending,
    }


def labelled(
  report: Mapping[str, Any], learned_from_training: Iterable[str]
) -> dict[str, Any]:
  """The report of a run's privacy, with what it does not cover.

  Args:
    report: As `PrivacyLedger.report` makes it.
    learned_from_training: What the task computed of its data before training.
  """
  measured = [name for name in report if name.endswith(privacy.NOT_PRIVATE)]
  return {
    **report,
    'clip': report.get('clip', FLAGS.clip),
    'dp': FLAGS.dp,
    'mechanism': FLAGS.dp_mechanism,
    'trusted': _TRUSTED[FLAGS.dp],
    'not_private': [
      *NOT_PRIVATE,
      *(['train'] if FLAGS.diagnostics else []),
      *(f'privacy/{name}' for name in measured),
    ],
    'assumed_public': ['population', *learned_from_training],
  }


def describe(report: Mapping[str, Any]) -> str:
  """What a run prints of its privacy.

  Args:
    report: `privacy` in its result.
  """
  simulated = ' A SIMULATION: whoever knows its seeds sees through the noise.'
  return (
    f'Privacy: epsilon {float(report["epsilon"]):.4g} at delta '
    f'{report["delta"]:.3g} ({report["neighbours"]}, {report["dp"]} '
    f'{report["mechanism"]} noise, {report["sampling"]} sampling), '
    f'noise multiplier {report["noise_multiplier"]:.4g}.'
    f'{simulated if report["simulation"] else ""}\n'
    f'Not private: {", ".join(report["not_private"])}. Taken to be public: '
    f'{", ".join(report["assumed_public"])}. Trusted: {report["trusted"]}.'
  )
