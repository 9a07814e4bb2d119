"""Which round of a run is the best one, and when a run has diverged."""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class Selection:
  """Which round counts as the best one.

  Attributes:
    metric: A pooled metric of the validation clients.
    higher_is_better: Whether a larger value is better.
  """

  metric: str = 'loss'
  higher_is_better: bool = False

  def is_better(
    self,
    measured: Mapping[str, Any],
    best: Mapping[str, Any] | None,
    min_delta: float = 0.0,
  ) -> bool:
    """Says whether a validation beats the best one so far.

    One that lost fewer clients always does: to lose the worst of them must not
    look like progress.

    Args:
      measured: Pooled metrics by name.
      best: Those of the best validation so far, or None.
      min_delta: By more than how much a value must be better.
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


@dataclasses.dataclass(frozen=True)
class StoppingRule:
  """When a run has diverged and is stopped instead of being trained on.

  Weights can explode and stay finite for a thousand rounds. Losses in training
  are compared with the first one in training, those of the validation clients
  with their first: where clients fit part of the model to the examples they are
  trained on, the two differ by far from the start.

  Attributes:
    factor: A loss above this many times the first one means divergence.
    share_not_finite: More clients than this share without finite losses and
      weights mean it, too.
    rounds: So many diverged rounds in a row stop the run.
  """

  factor: float = 3.0
  share_not_finite: float = 0.5
  rounds: int = 5

  def has_diverged(
    self,
    measured: Mapping[str, Any],
    first_loss: float | None,
    num_clients: int,
  ) -> bool:
    """Says whether a round has diverged.

    Args:
      measured: Metrics of a round's training, or of a validation.
      first_loss: The first loss of that kind, if there was one.
      num_clients: How many clients were to be measured.
    """
    loss = float(measured['loss'])
    lost = int(measured['num_not_finite'])
    if not math.isfinite(loss) or lost > self.share_not_finite * num_clients:
      return True
    # As many times the first loss; some losses are negative.
    rise = (self.factor - 1.0) * abs(first_loss or 0.0)
    return first_loss is not None and loss > first_loss + rise
