"""Selection of the best round of a run, and detection of divergence."""

from collections.abc import Mapping
import dataclasses
import math
import re
from typing import Any

from absl import logging

from tff_partial import evaluation
from tff_partial.arguments import checked_numbers
from tff_partial.training.errors import ProgramError


@dataclasses.dataclass(frozen=True)
class Selection:
  """Criterion of the best round.

  Attributes:
    metric: A pooled metric of the validation clients.
    higher_is_better: True if a larger value is better.
  """

  metric: str = 'loss'
  higher_is_better: bool = False

  def is_better(
    self,
    measured: Mapping[str, Any],
    best: Mapping[str, Any] | None,
    min_delta: float = 0.0,
  ) -> bool:
    """Return True if a validation beats the best one so far.

    One that lost fewer clients always does: losing the worst of them must not
    look like progress.

    Args:
      measured: Pooled metrics by name.
      best: Those of the best validation so far, or None.
      min_delta: Difference that an improvement must exceed.
    """
    value = measured[self.metric]
    if not (math.isfinite(value) and measured['num_clients']):
      return False
    if best is None:
      return True
    lost, fewest = measured['num_not_finite'], best['num_not_finite']
    if lost != fewest:
      return lost < fewest
    least = best[self.metric]
    gain = value - least if self.higher_is_better else least - value
    return gain > min_delta


def warn_of_direction(criterion: Any) -> None:
  """Warn of one that takes an end of a metric whose name says otherwise."""
  takes_highest = criterion.higher_is_better
  others = 'acc|auc|precision|recall|f1|ndcg|hit_rate|mrr'
  if takes_highest:
    others = 'loss|error|rmse|mse|mae|perplexity'
  if re.search(others, criterion.metric.lower()):
    ends = ('highest', 'lowest') if takes_highest else ('lowest', 'highest')
    logging.warning(
      '%s takes the %s %s for the best. If the %s is, set higher_is_better=%s.',
      *(criterion, ends[0], criterion.metric, ends[1], not takes_highest),
    )


@dataclasses.dataclass(frozen=True)
class StoppingRule:
  """Rule by which a run has diverged and is stopped.

  Weights can explode and stay finite for a thousand rounds. Training losses are
  compared with the largest of the first `rounds` training losses, those of the
  validation clients with their first: where clients fit part of the model to
  their training examples, the two differ widely from the start, and the very
  first training loss may be next to nothing.

  Attributes:
    factor: A loss above this many times that one means divergence.
    share_not_finite: So does a larger share of clients without finite losses
      and weights.
    rounds: Number of diverged rounds in a row that stop the run.
  """

  factor: float = 3.0
  share_not_finite: float = 0.5
  rounds: int = 5

  def __post_init__(self) -> None:
    are_usual = self.factor >= 1 and 0 <= self.share_not_finite <= 1
    if not are_usual or checked_numbers.why_not_whole(self.rounds, 1):
      raise ProgramError(
        f'{self}: give a factor of 1 or more, a share from 0 to 1, and a whole '
        'number of rounds from 1.'
      )

  def has_diverged(
    self,
    measured: Mapping[str, Any],
    first_loss: float | None,
    num_clients: int,
  ) -> bool:
    """Return True if a round has diverged."""
    loss = float(measured['loss'])
    lost = int(measured['num_not_finite'])
    if not math.isfinite(loss) or lost > self.share_not_finite * num_clients:
      return True
    # `factor` times the first loss; allows for negative losses.
    rise = (self.factor - 1.0) * abs(first_loss or 0.0)
    return first_loss is not None and loss > first_loss + rise


def describe_divergence(
  number: int, rounds: int, train: Mapping[str, Any] | None
) -> str:
  """Describe how a run diverged, with a remedy."""
  told = f'The run diverged; it ended after round {number} of {rounds}. '
  if train:
    told += (
      f'In that round {int(train["num_not_finite"])} of '
      f'{evaluation.num_measured(train)} clients had no finite loss or '
      f'weights, and the loss was {float(train["loss"]):.4g}. '
    )
  return (
    f'{told}Try a smaller learning rate at the clients or at the server, or '
    'clip what clients send: Aggregation(aggregators.robust()), or '
    '--clip_norm=1 on the command line.'
  )
