"""Evaluation of a model on new users with few examples."""

from collections.abc import Callable, Sequence
from typing import Any

from tff_partial import evaluation
from tff_partial.data import cohorts
from tff_partial.data import splits
from tff_partial.training import evaluation_sets


def measure_by_support(
  build: Callable[[splits.Split], evaluation.Evaluation],
  weights: Any,
  clients: cohorts.ClientSource,
  sizes: Sequence[int],
  *,
  query_from: int | None = None,
  seed: int = 0,
  server_state: Any = None,
) -> dict[int, dict[str, Any]]:
  """Measure new users after they personalise on their first examples.

  All sizes are measured on the same query set: the examples after the largest
  support set, or later. Users without any there are left out. For example,

      measure_by_support(
        lambda split: build_furl_eval(model, split=split, personalise=Phase()),
        weights, new_users, sizes=[0, 1, 3, 10])

  Args:
    build: Builds the evaluation for a split, such as an algorithm's own.
    weights: The model's weights at the server, `ModelWeights`.
    clients: Users that took no part in training.
    sizes: Sizes of the support set.
    query_from: The position of the first query example; by default the largest
      size.
    seed: The run's seed; a client's draws follow from it and its id.
    server_state: Server state other than weights, as for `evaluate`.

  Returns:
    Size to the result of `evaluation_sets.evaluate`: pooled metrics by name,
    and their distribution under `per_client`.

  Raises:
    ClientDataError: If a size is negative, or larger than `query_from`.
  """
  start = max(sizes, default=0) if query_from is None else query_from
  cut = {size: splits.first(size, start) for size in sizes}
  return {
    size: evaluation_sets.evaluate(
      evaluation_sets.EvaluationSet(build(split), clients),
      weights,
      seed,
      server_state=server_state,
    )
    for size, split in cut.items()
  }
