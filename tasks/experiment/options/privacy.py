"""Options of differential privacy, and a check of options that would leak.

A run is private if `target_epsilon` or `noise_multiplier` is given.
docs/privacy.md says what it then guarantees, and what it does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import dataclasses
import math
from typing import Any, ClassVar, TYPE_CHECKING

from tasks.errors import OptionError
from tasks.experiment.options.loop import Loop
from tasks.options import detail
from tasks.options import option
from tasks.options import Options
from tasks.shared_options import Release
from tasks.shared_options import Spent
import tff_partial

if TYPE_CHECKING:
  from tff_partial import composition
  from tff_partial.checks import privacy_audit
  from tff_partial.dp import clipping
  from tff_partial.dp import privacy_plans

CENTRAL, LOCAL = 'central', 'local'
GAUSSIAN, TREE = 'gaussian', 'tree'
POISSON, FIXED = 'poisson', 'fixed'
# Parties that must not leak what they see. Clients are simulated by a program
# that draws their seeds, so their noise hides nothing from the one running it.
_TRUSTED = {
  CENTRAL: 'the server, and who can read the checkpoints',
  LOCAL: 'this program, which draws the noise of all clients, and who can read '
  'the checkpoints; on real devices each client alone',
}
# A run is private with one of these flags; the others need one of them.
_GOAL = ('target_epsilon', 'noise_multiplier')
# Settings of adaptive clipping, which a fixed clip has no use for.
OF_ADAPTIVE = ('clip_quantile', 'initial_clip', 'count_stddev')
# Fields of result.json that depend on the training data without noise.
NOT_PRIVATE = (
  'rounds',
  'diverged',
  'data',
  'validation',
  'test',
  'best',
  'seconds',
)


@dataclasses.dataclass(frozen=True)
class Privacy(Options):
  """Options of differential privacy for the users whose data train a run."""

  title: ClassVar[str] = 'Privacy'

  target_epsilon: float | None = option(
    None,
    'Epsilon of differential privacy for whole users, over all rounds '
    'together: the noise is computed from it. inf clips and adds no noise.',
    may_be_infinite=True,
    is_common=True,
  )
  noise_multiplier: float | None = option(
    None,
    'Noise in clips, in place of --target_epsilon: epsilon follows from it.',
    at_least=0,
    is_common=True,
  )
  delta: float = option(
    1e-5,
    'Delta of epsilon; below one divided by the population.',
    is_common=True,
  )
  dp: str = option(
    CENTRAL,
    'Who adds noise: the server, once to the sum, or each client before it '
    'sends, so that the server need not be trusted.',
    choices=(CENTRAL, LOCAL),
  )
  dp_mechanism: str = option(
    GAUSSIAN,
    'Independent noise in each round, or noise on sums of rounds, which form '
    'trees (DP-FTRL): no client is drawn twice in a tree.',
    choices=(GAUSSIAN, TREE),
  )
  dp_sampling: str | None = option(
    None,
    'Cohorts of a fixed size, which cost more; or each client is in a round '
    'with the same probability, independently of others (the default).',
    choices=(FIXED, POISSON),
  )
  clip: float | None = option(
    None,
    'Largest norm of an update; by default it adapts to --set=clip_quantile.',
    is_common=True,
  )
  clip_quantile: float = detail(
    0.5,
    'Share of the clients that adaptive clipping leaves unclipped.',
    at_least=0,
    at_most=1,
  )
  initial_clip: float = option(
    0.1, 'Initial clip of adaptive clipping.', at_least=0
  )
  count_stddev: float | None = detail(
    None,
    'Noise of the count of clipped clients, in clients; by default a twentieth '
    'of a cohort. The larger, the more noise updates may have.',
    at_least=0,
  )
  clip_parts: tuple[str, ...] = detail(
    (),
    'Parts of an update that are clipped and noised each by itself, such as '
    'global,group for those of all users and of groups; by default all as one.',
  )
  noise_seed: int | None = option(
    None,
    'Seed of the noise (--seed: of the cohorts). A simulation, which protects '
    'from no one who knows both. By default the operating system draws them.',
    is_common=True,
  )
  simulated_population: int | None = option(
    None,
    'Compute epsilon as if so many users took part, which is a simulation.',
    at_least=1,
  )
  diagnostics: bool = option(
    False,
    'Also record exact values of the cohorts of a private run: losses, how '
    'many clients came, how many were clipped. None of these is private.',
  )

  @property
  def is_on(self) -> bool:
    return any(getattr(self, name) is not None for name in _GOAL)

  def __post_init__(self) -> None:
    """Refuse options that contradict one another."""
    super().__post_init__()
    if not self.is_on:
      self.refuse_set(
        self.flags(),
        'the run is not private. Give --target_epsilon or --noise_multiplier, '
        'too, or leave it out.',
      )
      return
    if self.clip is not None:
      self.refuse_set(
        OF_ADAPTIVE,
        f'--clip={self.clip} does not adapt. Leave one of the two out.',
      )
    if all(getattr(self, name) is not None for name in _GOAL):
      raise OptionError(
        f'--target_epsilon={self.target_epsilon} and --noise_multiplier='
        f'{self.noise_multiplier}: each follows from the other. Leave one out.'
      )
    if self.simulated_population and self.noise_seed is None:
      raise OptionError(
        '--simulated_population: such an epsilon protects no one, so the run '
        'must be labelled a simulation. Give --noise_seed, too.'
      )
    needs_clip = self.dp == LOCAL or self.dp_mechanism == TREE
    if needs_clip and self.clip is None:
      raise OptionError(
        '--dp=local and --dp_mechanism=tree clip to a fixed norm, as no count '
        'of clipped clients comes with them. Give --clip.'
      )
    if needs_clip and self.dp_sampling is not None:
      raise OptionError(
        f'--dp_sampling={self.dp_sampling}: sampling adds no privacy to '
        '--dp=local and --dp_mechanism=tree. Leave it out.'
      )
    if self.dp == LOCAL and self.clip_parts:
      raise OptionError(
        f'--set=clip_parts={",".join(self.clip_parts)}: with --dp=local a '
        'client clips all that it sends as one. Leave it out.'
      )
    if self.dp == LOCAL and self.dp_mechanism == TREE:
      raise OptionError(
        '--dp_mechanism=tree: the server adds this noise. Leave it out, or '
        'use --dp=central.'
      )

  def _clipping(self, population: int, loop: Loop) -> clipping.Clipping:
    kinds = tff_partial.dp.clipping
    if self.dp_mechanism == TREE and self.clip is not None:
      # Not the run's rounds, so that it can go on with more of them.
      fewest = min(population, self.simulated_population or population)
      asked = tff_partial.training.sampling.num_asked(
        loop.clients_per_round, loop.oversample
      )
      return kinds.TreeNoise(self.clip, max(fewest // asked, 1))
    if self.clip is not None:
      return kinds.FixedClip(self.clip)
    return kinds.AdaptiveClip(
      self.initial_clip,
      quantile=self.clip_quantile,
      count_stddev=self.count_stddev,
    )

  @property
  def release(self) -> Release:
    """The simulation settings of a task's release before the first round."""
    return Release(self.noise_seed, self.simulated_population)

  def ledger(
    self,
    population: int,
    loop: Loop,
    spent: Spent = Spent(),
    released: str = '',
  ) -> privacy_plans.PrivacyLedger | None:
    """Plan the run's privacy; return None if it is not private.

    `spent` is what the task spends before the first round, and `released` the
    fingerprint of what it releases for that.

    Raises:
      UserError: If the plan is impossible; names the nearest possible one.
    """
    if not self.is_on:
      return None
    samplings, plans = tff_partial.dp.samplings, tff_partial.dp.privacy_plans
    sampling: Any = samplings.PoissonSampling
    if self.dp_sampling == FIXED:
      sampling = samplings.FixedSizeSampling
    if self.dp_mechanism == TREE:
      sampling = samplings.OncePerTree
    if self.dp == LOCAL:
      sampling = samplings.EveryUpdate
    target, noise_multiplier = self.target_epsilon, self.noise_multiplier
    if target == math.inf:
      target, noise_multiplier = None, 0.0
    clip = self._clipping(population, loop)
    plan = plans.plan(
      dict.fromkeys(self.clip_parts, clip) or clip,
      target_epsilon=target,
      noise_multiplier=noise_multiplier,
      delta=self.delta,
      population=self.simulated_population or population,
      clients_per_round=loop.clients_per_round,
      rounds=loop.rounds,
      sampling=sampling.name,
      once=spent.noise_multipliers,
      once_delta=spent.delta,
    )
    return plans.PrivacyLedger(
      plan, simulation=self.noise_seed is not None, released=released
    )

  def aggregation(
    self,
    ledger: privacy_plans.PrivacyLedger,
    canaries: privacy_audit.Canaries | None,
  ) -> composition.Aggregation:
    """Return how the updates of a private run are aggregated."""
    aggregator: Any = tff_partial.aggregators.MeanFactory()
    postprocess_update: Any = None
    if self.dp == CENTRAL:
      aggregator = ledger.plan.mean(
        noise_seed=self.noise_seed, diagnostics=self.diagnostics
      )
    else:
      postprocess_update = ledger.plan.local_noise(noise_seed=self.noise_seed)
    if canaries is not None:
      aggregator = canaries.watched(aggregator)
      postprocess_update = canaries.postprocess_update(postprocess_update)
    return tff_partial.Aggregation(
      aggregator, tff_partial.ClientWeighting.UNIFORM, postprocess_update
    )


def labelled(
  report: Mapping[str, Any],
  settings: Privacy,
  learned_from_training: Iterable[str],
) -> dict[str, Any]:
  """Add to the report of a run's privacy what it does not cover.

  Args:
    report: The result of `PrivacyLedger.report`.
    settings: The run's options.
    learned_from_training: Names of what the task computed from its training
      data before the first round.
  """
  exact = tff_partial.dp.privacy.NOT_PRIVATE
  measured = [name for name in report if name.endswith(exact)]
  return {
    **({} if settings.clip_parts else {'clip': settings.clip}),
    **report,
    'dp': settings.dp,
    'mechanism': settings.dp_mechanism,
    'trusted': _TRUSTED[settings.dp],
    'not_private': [
      *NOT_PRIVATE,
      *(['train'] if settings.diagnostics else []),
      *(f'privacy/{name}' for name in measured),
    ],
    'assumed_public': ['population', *learned_from_training],
  }


def describe(report: Mapping[str, Any]) -> str:
  """Return the text that a run prints about `privacy` in its result."""
  simulated = (
    ' A SIMULATION: anyone who knows its seeds sees through the noise.'
  )
  return (
    f'Privacy: epsilon {float(report["epsilon"]):.4g} at delta '
    f'{report["delta"]:.3g} ({report["neighbours"]}, {report["dp"]} '
    f'{report["mechanism"]} noise, {report["sampling"]} sampling), '
    f'noise multiplier {report["noise_multiplier"]:.4g}.'
    f'{simulated if report["simulation"] else ""}\n'
    f'Not private: {", ".join(report["not_private"])}. Taken to be public: '
    f'{", ".join(report["assumed_public"])}. Trusted: {report["trusted"]}.'
  )
