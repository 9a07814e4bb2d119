"""Selection of a round's clients among those that were drawn for it.

A selection is a function of a `Draw` that returns the clients that take part:

    def with_most_examples(draw):
      sizes = {client: len(histories[client]) for client in draw.client_ids}
      return sorted(sizes, key=sizes.get)[-draw.clients_per_round :]

    tff_partial.train(..., oversample=3, select_clients=with_most_examples)

It returns the same for the same draw, so that a run that is killed and resumed
selects the same clients. Private runs refuse it: their accounting counts on
clients that are drawn at random.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, TypeAlias

import numpy as np

from tff_partial import evaluation as evaluation_lib
from tff_partial.training.errors import ProgramError


@dataclasses.dataclass(frozen=True)
class Draw:
  """The clients that were drawn for a round.

  Attributes:
    round: The number of the round, from 1.
    client_ids: The clients, at random and in random order: `oversample` times
      as many as take part, without those that drop out.
    clients_per_round: The most clients that may take part.
    generator: For draws of the selection; follows from the seed and the round.
    history: The rounds so far, as in `TrainingResult.history`.
    measure: From an evaluation to its metrics at the drawn clients with the
      round's first weights, and with what they remember if the evaluation reads
      that: metric name to client id to value, if there is one.
  """

  round: int
  client_ids: Sequence[str]
  clients_per_round: int
  generator: np.random.Generator
  history: Sequence[Mapping[str, Any]]
  measure: Callable[[evaluation_lib.Evaluation], evaluation_lib.ByClient]


SelectClients: TypeAlias = Callable[[Draw], Sequence[str]]


@dataclasses.dataclass(frozen=True)
class HighestLoss:
  """Selection of the drawn clients of highest loss: power of choice.

  Cho et al., AISTATS 2022; `oversample` is their d / m. Deviation: candidates
  are drawn with equal probabilities, the paper's in proportion to their
  examples.

  Attributes:
    evaluation: Measures the model at the candidates.
    metric: The metric that stands for the loss.
  """

  evaluation: evaluation_lib.Evaluation
  metric: str = 'loss'

  def __call__(self, draw: Draw) -> Sequence[str]:
    """Return the clients of highest loss; those without one come last."""
    measured = draw.measure(self.evaluation)
    if measured and self.metric not in measured:
      raise ProgramError(
        f'HighestLoss: the evaluation has no metric {self.metric!r}. Choose '
        f'one of {list(measured)}.'
      )
    known = measured.get(self.metric, {})  # Maybe no client has any.
    losses = {c: value for c, value in known.items() if not np.isnan(value)}
    ranked = sorted(draw.client_ids, key=lambda c: -losses.get(c, -np.inf))
    return ranked[: draw.clients_per_round]


def selected(select: SelectClients, draw: Draw) -> list[str]:
  """Select clients, and check them.

  Raises:
    ProgramError: If it returns none, too many, one twice, or others than drawn.
  """
  found = list(select(draw))
  others = sorted(set(found) - set(draw.client_ids))
  if others:
    raise ProgramError(
      f'select_clients: {others[0]!r} was not drawn for round {draw.round}. '
      'Return some of `draw.client_ids`; `oversample` draws more of them.'
    )
  if len(set(found)) != len(found) or not (
    1 <= len(found) <= draw.clients_per_round
  ):
    raise ProgramError(
      f'select_clients: {len(set(found))} clients in {len(found)} places for '
      f'round {draw.round}: expected from 1 to {draw.clients_per_round} '
      'clients, each once.'
    )
  return found
