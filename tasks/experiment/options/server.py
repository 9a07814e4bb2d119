"""Options of aggregation, and of the server's optimizer."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
from typing import Any, ClassVar, TYPE_CHECKING

from tasks.errors import OptionError
from tasks.experiment.options.optimizers import Optimizer
from tasks.options import detail
from tasks.options import Leak
from tasks.options import option
from tasks.options import Options
import tff_partial

if TYPE_CHECKING:
  import tensorflow as tf

  from tff_partial import composition
  from tff_partial import phases

EXAMPLES, TARGETS, UNIFORM = 'examples', 'targets', 'uniform'
# Functions of `tff_partial.aggregators`, of which Krum has two forms.
_WITHSTANDING = ('trimmed_mean', 'krum', 'multi_krum')
_JOINS = ('coordinate_median', *_WITHSTANDING, 'geometric_median')


@dataclasses.dataclass(frozen=True)
class Server(Options):
  """Options of aggregating updates and of the server's optimizer."""

  title: ClassVar[str] = 'Training and optimizers'

  optimizer: Optimizer = Optimizer(
    'server', 'the aggregated update', learning_rate=1.0
  )
  server_decay_rounds: int = option(
    0,
    "Rounds in which the server's rate falls linearly to zero; 0: constant.",
    at_least=0,
  )
  aggregator: str = detail(
    'mean',
    "How updates are joined: their weighted mean; that mean after TFF's "
    'adaptive clipping and zeroing; or joins that compare all updates.',
    choices=('mean', 'robust', *_JOINS),
  )
  withstood_share: float = detail(
    0.2,
    'Share of the clients of a round, rounded down, whose wrong updates '
    'trimmed_mean, krum and multi_krum withstand.',
    at_least=0,
    at_most=0.49,
  )
  clip_norm: float = option(
    0.0,
    'Scale client updates down to this norm; 0 for no limit. It helps where '
    'single clients make a run diverge.',
    at_least=0,
  )
  client_weighting: str | None = option(
    None,
    'Weight of a client: its query examples (the usual default); all targets '
    'that it trained on, such as tokens; or 1, as in private runs.',
    choices=(EXAMPLES, TARGETS, UNIFORM),
    group='Method',
  )

  def __post_init__(self) -> None:
    """Refuse what the aggregator does not read."""
    super().__post_init__()
    if self.aggregator != 'mean' and self.clip_norm:
      raise OptionError(
        f'--clip_norm: the aggregator {self.aggregator} limits updates by '
        'itself. Leave one of the two flags out.'
      )
    if self.aggregator not in _WITHSTANDING:
      self.refuse_set(
        ('withstood_share',),
        f'only {", ".join(_WITHSTANDING)} withstand a share that is given. '
        'Choose one of these by --set=aggregator=, or leave it out.',
      )
    if self.aggregator in _JOINS and self.client_weighting != UNIFORM:
      self.refuse_set(
        ('client_weighting',),
        f'to the aggregator {self.aggregator} each client counts once. Leave '
        'it out.',
      )

  def leaks(self) -> Iterator[Leak]:
    if self.client_weighting in (EXAMPLES, TARGETS):
      yield Leak(
        'client_weighting',
        self.client_weighting,
        'a client with many examples would move the mean by more than its clip',
        'Use --client_weighting=uniform, the default of a private run.',
      )
    if self.aggregator != 'mean':
      yield Leak(
        'set=aggregator',
        self.aggregator,
        'it follows from what single clients send',
        'Leave it out; private runs have --clip and --set=clip_quantile.',
      )
    if self.clip_norm:
      yield Leak(
        'clip_norm',
        self.clip_norm,
        'a private run clips by itself',
        'Use --clip instead.',
      )

  def aggregation(self, clients_per_round: int) -> composition.Aggregation:
    """Return how updates are aggregated in a run that is not private."""
    weightings: dict[str | None, Any] = {
      None: None,  # The algorithm's own.
      TARGETS: lambda result: result.loss[1],  # Those that the loss averages.
      UNIFORM: tff_partial.ClientWeighting.UNIFORM,
      EXAMPLES: tff_partial.ClientWeighting.NUM_EXAMPLES,
    }
    return tff_partial.Aggregation(
      self._aggregator(clients_per_round), weightings[self.client_weighting]
    )

  def _aggregator(
    self, clients_per_round: int
  ) -> composition.AggregationFactory:
    aggregators = tff_partial.aggregators
    if self.aggregator == 'robust':
      return aggregators.robust()
    if self.aggregator in _JOINS:
      wrong = int(self.withstood_share * clients_per_round + 1e-9)
      options: dict[str, dict[str, Any]] = {
        'trimmed_mean': {'share': self.withstood_share},
        'krum': {'num_attackers': wrong},
        'multi_krum': {
          'num_attackers': wrong,
          'num_chosen': clients_per_round - wrong,
        },
      }
      name = self.aggregator.removeprefix('multi_')
      return getattr(aggregators, name)(
        clients_per_round=clients_per_round, **options.get(self.aggregator, {})
      )
    if not self.clip_norm:
      return aggregators.MeanFactory()
    import tensorflow_federated as tff

    return aggregators.MeanFactory(
      lambda mean: tff.aggregators.clipping_factory(self.clip_norm, mean)
    )

  def build_optimizer(self) -> phases.Optimizer:
    """Build the server's optimizer, with its schedule."""
    optimizer = self.optimizer.build()
    if not self.server_decay_rounds:
      return optimizer
    import tensorflow as tf
    import tensorflow_federated as tff

    def falling(round_number: tf.Tensor) -> tf.Tensor:
      done = tf.cast(round_number, tf.float32) / self.server_decay_rounds
      return self.optimizer.learning_rate * tf.maximum(1.0 - done, 0.0)

    return tff.learning.optimizers.schedule_learning_rate(optimizer, falling)
