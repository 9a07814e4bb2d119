"""Options of single algorithms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
from typing import Any, ClassVar, TYPE_CHECKING

from tasks.errors import OptionError
from tasks.experiment.options.first_weights import FirstWeights
from tasks.experiment.options.memory import Memory
from tasks.options import detail
from tasks.options import Leak
from tasks.options import option
from tasks.options import Options
import tff_partial

if TYPE_CHECKING:
  from tff_partial import assignments
  from tff_partial import client_statistics
  from tff_partial import phases
  from tff_partial.drafts import centers
  from tff_partial.templates import implicit_factors

KEEP, SCALED = 'keep', 'scaled'
CENTERS, SUMS = 'centers', 'sums'
PRINTED, INVERSE = 'printed', 'inverse'
# How k-means begins.
_INITS = ('k-means++', 'random')
# The rules of `baselines.fed_opt`.
TFF, PAPER = 'tff', 'paper'


@dataclasses.dataclass(frozen=True)
class FedEmbed(Options):
  """Assignment of clients to sub-populations, section 3.3 of FedEmbed."""

  title: ClassVar[str] = 'Algorithms fed_embed_*'

  triplet_steps: int = option(
    10,
    'Steps of the triplet loss by which a client moves its embedding toward a '
    'prototype in each round; 0 to join the nearest prototype without any.',
    at_least=0,
  )
  forming_steps: int = option(
    0,
    'Steps on all of its examples, through the shared heads, by which a client '
    'forms its embedding before it joins a prototype or a node of the map.',
    at_least=0,
  )
  forming_learning_rate: float = option(
    1.0, 'Learning rate of --forming_steps.', at_least=0
  )
  map_rate: float = option(
    0.1,
    'Share of the distance by which clients move nodes of the self-organizing '
    'map, prototypical users their prototype, and PFedKM its centers.',
    at_least=0,
  )
  map_server_rate: float | None = option(
    None,
    'Factor of the server on the mean of these moves, to which most clients of '
    'a cohort add nothing. By default its optimizer moves nodes.',
    at_least=0,
  )
  head_ridge: float | None = detail(
    None,
    'fed_embed_personal: ridge with which clients solve for their own head, '
    'before they train and are measured; by default they train it by steps.',
  )
  map_radius: float = detail(
    1.0,
    "Standard deviation of the map's neighbourhood, in nodes; 0 moves the "
    'nearest node only.',
    at_least=0,
  )
  map_follows_nearest: bool = detail(
    False,
    'Move each node of the map toward the one client that is nearest to it, '
    'instead of by the mean of all. Not for private runs.',
  )

  @property
  def centers(self) -> dict[str, Any]:
    """Rates at which prototypes, map nodes and centers move."""
    return {
      'client_learning_rate': self.map_rate,
      'server_learning_rate': self.map_server_rate,
    }

  def _forming(self) -> phases.Phase | None:
    """Return the phase that forms embeddings, or None without its steps."""
    if not self.forming_steps:
      return None
    return tff_partial.Phase(
      optimizer=tff_partial.sgd(self.forming_learning_rate),
      batch_size=None,
      epochs=self.forming_steps,
    )

  def assignment(
    self, rule: str, parts: assignments.FedEmbedVariables
  ) -> assignments.Assignment:
    """Build the rule by which clients choose their head.

    Args:
      rule: 'type': the sub-population that a client's data name; 'prototype':
        the nearest prototype; 'map': the nearest node of a self-organizing map;
        'least_loss': the head with the least loss (IFCA); 'personal': a head of
        the client's own.
      parts: The parts of the model.

    Raises:
      OptionError: If a client may know its sub-population, which has no head.
    """
    rules = tff_partial.assignments
    if rule in ('type', 'prototype') and parts.sub_population is None:
      raise OptionError(
        f'--algorithm=fed_embed_{rule}: its users know sub-populations, each '
        'of which needs a head of its own, and --set=preference_groups gives '
        'fewer. Leave it out, or use fed_embed_som or fed_embed_least_loss.'
      )
    match rule:
      case 'type':
        return rules.by_type(parts)
      case 'prototype':
        return rules.by_prototype(
          parts,
          steps=self.triplet_steps,
          forming=self._forming(),
          **self.centers,
        )
      case 'map':
        return rules.by_map(
          parts,
          forming=self._forming(),
          radius=self.map_radius,
          rows=2,
          follow_nearest=self.map_follows_nearest,
          **self.centers,
        )
      case 'least_loss':
        return rules.Assignment(tff_partial.groups.least_loss())
    if self.head_ridge is None:
      return rules.OWN_HEAD
    solve = tff_partial.Phase(
      train=(tff_partial.tiers.LOCAL,),
      variable_filter=f'(?!{parts.embedding}$).*',
      optimizer=tff_partial.Exact(ridge=self.head_ridge),
    )
    return rules.OWN_HEAD._replace(before=(solve,))


@dataclasses.dataclass(frozen=True)
class Hpfl(Options):
  """Options of drafts and public components, section 4 of HPFL."""

  title: ClassVar[str] = 'Algorithms hpfl, hpfl_k and hpfl_r'
  flag_prefix: ClassVar[str] = 'hpfl_'

  drafts: str = option(
    CENTERS,
    'What clients send of their private tables: centers of clusters of rows, '
    'as in the paper, or only sums of the rows near each global center.',
    choices=(CENTERS, SUMS),
  )
  rows_per_center: int = detail(
    10, 'Rows for each center, at a client and again at the server.', at_least=1
  )
  num_centers: int | None = option(
    None,
    'Number of global centers of a table; by default it follows from '
    '--set=hpfl_rows_per_center and from how many rows clients have.',
    at_least=1,
  )
  init: str = detail(
    _INITS[0],
    'How k-means begins: with rows far from each other, or with random rows, '
    'which takes much less time where there are thousands.',
    choices=_INITS,
  )
  max_iterations: int = detail(
    20, 'The most iterations of k-means.', at_least=1
  )
  center_weighting: str = option(
    PRINTED,
    'Weight of a center toward which rows move: its distance, as Eq. 2 is '
    'printed, or the inverse, so that near centers count more.',
    choices=(PRINTED, INVERSE),
  )

  @property
  def by_nearness(self) -> bool:
    return self.center_weighting == INVERSE

  def leaks(self) -> Iterator[Leak]:
    if self.drafts == CENTERS:
      yield Leak(
        'hpfl_drafts',
        CENTERS,
        'clients send centers of their rows as they are',
        'Use --hpfl_drafts=sums, or --algorithm=hpfl_k, which has no drafts.',
      )
    if self.num_centers is None:
      yield Leak(
        'hpfl_num_centers',
        None,
        'how many global centers there are would follow from the exact numbers '
        'of users and items of all clients',
        'Give a number, such as --hpfl_num_centers=10.',
      )

  def drafting(
    self, table_rows: Mapping[str, Sequence[int]], join: client_statistics.Join
  ) -> centers.ClientCenters | centers.Sums:
    """Build the drafts of private tables.

    Raises:
      OptionError: If there are no tables.
    """
    if not table_rows:
      raise OptionError(
        '--algorithm: the model has no private vectors to make drafts of. '
        'Choose another --model, or --algorithm=hpfl_k.'
      )
    each = self.rows_per_center
    collected = max(
      sum(-(-number // each) for number in numbers)
      for numbers in table_rows.values()
    )
    num_centers = self.num_centers or -(-collected // each)
    from tff_partial.drafts import centers

    if self.drafts == SUMS:
      return centers.Sums(num_centers=num_centers, join=join)
    return centers.ClientCenters(
      num_collected=collected,
      num_centers=num_centers,
      rows_per_center=each,
      init=self.init,
      max_iterations=self.max_iterations,
    )


@dataclasses.dataclass(frozen=True)
class Hyperparameters(Options):
  """Options that only one or a few algorithms read."""

  title: ClassVar[str] = 'Method'

  fed_embed: FedEmbed = FedEmbed()
  hpfl: Hpfl = Hpfl()
  first_weights: FirstWeights = FirstWeights()
  memory: Memory = Memory()
  joint: bool = option(
    False, 'Also train local weights in the update phase of FedRecon.'
  )
  through_solution: bool = detail(
    False,
    'FedRecon: let gradients pass through an exact reconstruction '
    '(--reconstruction_optimizer=exact), which is otherwise a constant.',
  )
  penalty: float | None = option(
    None,
    'mu of FedProx and MOON, lambda of Ditto, pFedMe, MR-MTL and FedProto, '
    "alpha of FedDyn, kappa of FedDBE; by default the algorithm's.",
    at_least=0,
  )
  tau: float = option(
    1e-3,
    'Degree of adaptivity of FedAdam and FedYogi. With --adaptive_rule=tff it '
    'is outside the bias correction, so that it counts ten times as much in '
    'round 1 as beside corrected moments.',
    at_least=0,
  )
  adaptive_rule: str = option(
    TFF,
    "How the server of FedAdam and FedYogi steps: by TFF's optimizers, which "
    'correct the bias of both moments, or by Algorithm 2 of the paper as '
    'printed, which does not.',
    choices=(TFF, PAPER),
  )
  mixture: float = detail(
    0.5,
    "alpha of APFL: the share of a client's own model in the mixture.",
    at_least=0,
    at_most=1,
  )
  mixture_learning_rate: float = option(
    0.0,
    'Rate at which clients of APFL learn alpha; 0 keeps it fixed.',
    at_least=0,
  )
  private_rule: str = detail(
    KEEP,
    'What clients of FURL remember: their trained weights (Eq. 7), or weights '
    "moved only by the client's share of the cohort's examples (Eq. 6).",
    choices=(KEEP, SCALED),
  )
  laplace_clip: float = detail(
    1.0,
    'L1 norm to which fed_noise clips: 100 times the scale of its noise.',
    at_least=0,
  )
  unobserved_weight: float = detail(
    0.2, 'fed_ials: weight of an item without interaction.', at_least=0
  )
  implicit_ridge: float = detail(
    0.007,
    'fed_ials: L2 regularization, times the total weight of the fitted data.',
    at_least=0,
  )
  view_difference: float = detail(
    1e-4,
    'lambda of FedRAP: how far apart tables of items are kept.',
    at_least=0,
  )
  view_sparsity: float = detail(
    1e-4, 'mu of FedRAP: how sparse the shared table is made.', at_least=0
  )

  def leaks(self) -> Iterator[Leak]:
    """Yield what a private run may not have, if its algorithm reads it."""
    yield from self.hpfl.leaks()
    if self.fed_embed.map_follows_nearest:
      yield Leak(
        'set=map_follows_nearest',
        'true',
        'each node would show the single client that it follows',
        'Leave it out: then nodes move by the mean of all, which has noise.',
      )
    if self.private_rule == SCALED:
      yield Leak(
        'set=private_rule',
        SCALED,
        "clients are told the exact number of the cohort's examples",
        'Use --set=private_rule=keep.',
      )

  @property
  def penalty_argument(self) -> dict[str, Any]:
    """The size of a penalty as an argument, if one is given."""
    return {} if self.penalty is None else {'penalty': self.penalty}

  @property
  def weighting(self) -> implicit_factors.Weighting:
    return tff_partial.templates.implicit_factors.Weighting(
      self.unobserved_weight, self.implicit_ridge
    )
