"""Experiment trackers that receive the metrics of every round.

`--hook=module:function` names a function of the user that makes the tracker: it
takes the run's flags and returns an object with `on_metrics(round, metrics)`
and `close()`. docs/command_line.md has an example.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import importlib
import sys
from typing import Any, Protocol, TypeAlias

from tasks.errors import OptionError
from tff_partial.training import callbacks as callbacks_lib
from tff_partial.training import metrics_log


class Tracker(Protocol):
  """A receiver of a run's metrics."""

  def on_metrics(self, round: int, metrics: Mapping[str, float]) -> None:
    """Take the metrics of a round.

    Args:
      round: The number of the round, from 1. A run that resumes after a kill
        repeats the rounds after its last checkpoint.
      metrics: `PHASE/METRIC` to a number, such as `train/loss`; `validation/`
        after an evaluation, `test/` after the last round.
    """

  def close(self) -> None:
    """Close the tracker: called once when the run ends, even by an error."""


Make: TypeAlias = Callable[[Mapping[str, Any]], Tracker]


@contextlib.contextmanager
def opened(name: str | None, config: Mapping[str, Any]) -> Iterator['Told']:
  """Make the tracker that a flag names, and close it at the end.

  Args:
    name: `module:function`; None for no tracker.
    config: The run's flags, by name.

  Raises:
    OptionError: If there is no such function, or it returns no tracker.
  """
  if name is None:
    yield Told(None)
    return
  tracker = _find(name)(config)
  for method in ('on_metrics', 'close'):
    if not callable(getattr(tracker, method, None)):
      raise OptionError(
        f'--hook={name}: it returned a {type(tracker).__name__} without '
        f'{method}(). Return an object with on_metrics(round, metrics) and '
        'close().'
      )
  try:
    yield Told(tracker)
  finally:
    tracker.close()


class Told:
  """A callback of the run that sends metrics to a tracker, if there is one."""

  def __init__(self, tracker: Tracker | None):
    """Take the tracker, or None if there is none."""
    self._tracker = tracker

  @property
  def callbacks(self) -> list[callbacks_lib.Callback]:
    """The callbacks for the run to call after each round."""
    return [] if self._tracker is None else [self._after_round]

  def _after_round(self, result: callbacks_lib.RoundResult) -> None:
    self.tell(result.round, metrics_log.by_phase(result.metrics))

  def tell(self, number: int, metrics: Mapping[str, float]) -> None:
    """Send metrics to the tracker.

    Args:
      number: The round.
      metrics: `PHASE/METRIC` to the number.
    """
    if self._tracker is not None:
      self._tracker.on_metrics(number, dict(metrics))


def _find(name: str) -> Make:
  """Import the function that makes the tracker."""
  module_name, colon, function_name = name.partition(':')
  if not (module_name and colon and function_name):
    raise OptionError(
      f'--hook={name}: name a module and a function in it, such as '
      'my_hooks:make_tracker.'
    )
  if '' not in sys.path:
    sys.path.append('')  # The current folder, as `python -m` has it.
  try:
    module = importlib.import_module(module_name)
  except ModuleNotFoundError as error:
    if error.name and module_name.split('.')[0] != error.name.split('.')[0]:
      raise OptionError(
        f'--hook={name}: {module_name} imports {error.name}, which is not '
        f'installed. Install it with `pip install {error.name}`.'
      ) from error
    raise OptionError(
      f'--hook={name}: there is no module {module_name}. Run the command in '
      f'the folder of {module_name.split(".")[0]}.py, or put that folder into '
      'PYTHONPATH.'
    ) from error
  make = getattr(module, function_name, None)
  if not callable(make):
    raise OptionError(
      f'--hook={name}: {module_name} has no function {function_name}.'
    )
  found: Make = make
  return found
