"""A tracker of experiments that is told of every round.

A tracker is made by a function of the user, which `--hook=module:function`
names: it takes the run's flags and returns an object with `on_metrics(round,
metrics)` and `close()`. docs/command_line.md shows one.
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
  """What is told of a run."""

  def on_metrics(self, round: int, metrics: Mapping[str, float]) -> None:
    """Take the metrics of a round.

    Args:
      round: The number of the round, from 1. A run that goes on after a kill
        repeats those after its last checkpoint.
      metrics: `PHASE/METRIC` to a number, such as `train/loss`; `validation/`
        after an evaluation, `test/` after the last round.
    """

  def close(self) -> None:
    """Is called once, when the run ends, also by an error."""


Make: TypeAlias = Callable[[Mapping[str, Any]], Tracker]


@contextlib.contextmanager
def opened(name: str | None, config: Mapping[str, Any]) -> Iterator['Told']:
  """Make the tracker that a flag names, and closes it in the end.

  Args:
    name: `module:function`; with None nobody is told of anything.
    config: The run's flags, by their names.

  Raises:
    OptionError: If there is no such function, or it makes no tracker.
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
  """Tells a tracker of rounds; a callback of the run."""

  def __init__(self, tracker: Tracker | None):
    """Take the tracker, or None if there is none."""
    self._tracker = tracker

  @property
  def callbacks(self) -> list[callbacks_lib.Callback]:
    """What the run calls after each round."""
    return [] if self._tracker is None else [self._after_round]

  def _after_round(self, result: callbacks_lib.RoundResult) -> None:
    self.tell(result.round, metrics_log.by_phase(result.metrics))

  def tell(self, number: int, metrics: Mapping[str, float]) -> None:
    """Tells of some metrics.

    Args:
      number: The round.
      metrics: `PHASE/METRIC` to the number.
    """
    if self._tracker is not None:
      self._tracker.on_metrics(number, dict(metrics))


def _find(name: str) -> Make:
  """The function that makes the tracker."""
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
