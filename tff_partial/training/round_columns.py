"""The columns of a round in `metrics.csv`."""

from collections.abc import Mapping
from typing import Any

from tff_partial.dp import privacy as privacy_lib
from tff_partial.training import evaluation_sets


def of_round(
  metrics: Mapping[str, Any], train_metrics: Mapping[str, Any], seconds: float
) -> dict[str, Any]:
  """Return the columns of a round; training metrics lose their prefix.

  Args:
    metrics: The round's metrics, flat.
    train_metrics: Its training metrics, pooled.
    seconds: Duration of the round.
  """
  prefix = 'client_work/train/'
  row = {name: v for name, v in metrics.items() if not name.startswith(prefix)}
  row.update(train_metrics)
  row['seconds_round'] = seconds
  return row


def of_private_round(
  metrics: Mapping[str, Any],
  train_metrics: Mapping[str, Any],
  seconds: float,
  diagnostics: bool,
) -> dict[str, Any]:
  """Return a private round's columns, exact ones on request and marked.

  Args:
    metrics: The round's metrics, flat.
    train_metrics: Its training metrics, pooled.
    seconds: Duration of the round.
    diagnostics: True to include exact ones.
  """
  exact = {
    f'{name}{privacy_lib.NOT_PRIVATE}': value
    for name, value in train_metrics.items()
  }
  row = of_round(metrics, exact, seconds)
  return {
    name: value
    for name, value in row.items()
    if diagnostics or not name.endswith(privacy_lib.NOT_PRIVATE)
  }


def of_aggregator(metrics: Mapping[str, Any]) -> dict[str, float]:
  """Return the aggregator's measurements, by its own names.

  Args:
    metrics: The round's metrics, flat.
  """
  prefix = 'aggregator/'
  return {
    name.removeprefix(prefix): float(value)
    for name, value in metrics.items()
    if name.startswith(prefix)
  }


def of_validation(
  evaluation_set: evaluation_sets.EvaluationSet,
) -> dict[str, str]:
  """Return the validation's columns, with the metrics that fill them.

  Args:
    evaluation_set: The clients that are measured.
  """
  return {f'validation_{name}': name for name in evaluation_set.metrics}
