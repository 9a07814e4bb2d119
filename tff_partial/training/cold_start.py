"""How well a model serves new users who have given it few examples yet."""

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
  """New users personalise on their first examples, and are measured on others.

  All sizes are measured on the same query set: what comes after the largest
  support set, or later. Users who have nothing there are left out. For example,

      measure_by_support(
        lambda split: build_furl_eval(model, split=split, personalise=Phase()),
        weights, new_users, sizes=[0, 1, 3, 10])

  Args:
    build: From a split to the evaluation, for example an algorithm's own.
    weights: The model's weights at the server, `ModelWeights`.
    clients: Users who took no part in training.
    sizes: How many examples a user has: the sizes of the support set.
    query_from: The place of the first query example; by default the largest
      size.
    seed: The run's seed; a client's draws follow from it and its id.
    server_state: What the server holds beside weights, as for `evaluate`.

  Returns:
    Size to what `evaluation_sets.evaluate` returns: pooled metrics by name, and
    under `per_client` their distribution.

  Raises:
    SplitError: If a size is negative, or `query_from` lies below one.
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
