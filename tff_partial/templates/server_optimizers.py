"""Optimizers that wrap others: by variable name, or within bounds."""

import collections
from collections.abc import Mapping
import re
from typing import Any

import tensorflow as tf

from tff_partial.arguments import spelling
from tff_partial.phases import Optimizer


def by_name(apart: Mapping[str, Optimizer], rest: Optimizer) -> Optimizer:
  """Build an optimizer that uses separate ones for some variables.

  Args:
    apart: Regular expression over whole variable names to the optimizer of
      these variables; the first that matches is used.
    rest: The optimizer of all others. A learning rate schedule must wrap only
      this one, not both.

  Raises:
    SettingError: On `initialize`, if an expression matches no variable.
  """
  return _ByName(apart, rest) if apart else rest


class _ByName(Optimizer):
  """Separate optimizers, of weights by tier and name."""

  def __init__(self, apart: Mapping[str, Optimizer], rest: Optimizer):
    self._rules = [*apart.items(), ('.*', rest)]

  def _divided(self, weights: Any) -> list[dict[str, Any]]:
    """Return each optimizer's weights, by tier and name."""
    parts: list[dict[str, Any]] = [{} for _ in self._rules]
    for tier, named in weights.items():
      for name, value in named.items():
        first = next(
          place
          for place, (rule, _) in enumerate(self._rules)
          if re.fullmatch(rule, name)
        )
        parts[first][f'{tier}/{name}'] = value
    return parts

  def initialize(self, specs: Any) -> Any:
    """Return the first states of all optimizers."""
    names = [name for named in specs.values() for name in named]
    spelling.check_patterns(
      'by_name', [rule for rule, _ in self._rules[:-1]], names
    )
    return [
      optimizer.initialize(part)
      for (_, optimizer), part in zip(
        self._rules, self._divided(specs), strict=True
      )
    ]

  def next(self, state: Any, weights: Any, gradients: Any) -> tuple[Any, Any]:
    """Take a step of each optimizer on its part."""
    states: list[Any] = []
    moved: dict[str, Any] = {}
    for (_, optimizer), before, part, slopes in zip(
      self._rules,
      state,
      self._divided(weights),
      self._divided(gradients),
      strict=True,
    ):
      after, values = optimizer.next(before, part, slopes)
      states.append(after)
      moved.update(values)
    whole = collections.OrderedDict(
      (
        tier,
        collections.OrderedDict(
          (name, moved[f'{tier}/{name}']) for name in named
        ),
      )
      for tier, named in weights.items()
    )
    return states, whole


class WithinUnit(Optimizer):
  """Projection of another optimizer's weights onto the interval of 0 to 1."""

  def __init__(self, optimizer: Optimizer):
    self._optimizer = optimizer

  def initialize(self, specs: Any) -> Any:
    """Return the first state of the other optimizer."""
    return self._optimizer.initialize(specs)

  def get_hparams(self, state: Any) -> Any:
    """Return the hyperparameters of the other optimizer."""
    return self._optimizer.get_hparams(state)

  def set_hparams(self, state: Any, hparams: Any) -> Any:
    """Return the other optimizer's state with these hyperparameters."""
    return self._optimizer.set_hparams(state, hparams)

  def next(self, state: Any, weights: Any, gradients: Any) -> tuple[Any, Any]:
    """Take a step of the other optimizer, and project."""
    state, moved = self._optimizer.next(state, weights, gradients)
    return state, tf.nest.map_structure(
      lambda tensor: tf.clip_by_value(tensor, 0.0, 1.0), moved
    )
