"""Experiment trackers that receive the metrics of every round.

`--hook=module:function` names a function of the user that makes the tracker: it
takes the run's flags and returns an object with `on_metrics(round, metrics)`
and `close()`. docs/command_line.md has an example.
"""

from collections.abc import Iterator, Mapping
import contextlib
import pkgutil
import sys
from typing import Any, Protocol

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


@contextlib.contextmanager
def opened(
  name: str | None, config: Mapping[str, Any]
) -> Iterator[Tracker | None]:
  """Make the tracker that a flag names, and close it at the end.

  Args:
    name: `module:function`; None for no tracker.
    config: The run's flags, by name.

  Raises:
    OptionError: If there is no such function, or it returns no tracker.
  """
  if name is None:
    yield None
    return
  if '' not in sys.path:
    sys.path.append('')  # The current folder, as `python -m` has it.
  try:
    make = pkgutil.resolve_name(name)
  except (AttributeError, ImportError, ValueError) as error:
    make = error
  if not callable(make):
    raise OptionError(
      f'--hook={name}: found {make!r}. Name a module and a function in it, '
      'such as my_hooks:make_tracker. Run the command in the folder of '
      'my_hooks.py, or put that folder into PYTHONPATH, and install what it '
      'imports.'
    )
  tracker = make(config)
  for method in ('on_metrics', 'close'):
    if not callable(getattr(tracker, method, None)):
      raise OptionError(
        f'--hook={name}: it returned a {type(tracker).__name__} without '
        f'{method}(). Return an object with on_metrics(round, metrics) and '
        'close().'
      )
  try:
    yield tracker
  finally:
    tracker.close()


def after_round(tracker: Tracker) -> callbacks_lib.Callback:
  """Make the callback of a run that sends its metrics to a tracker."""

  def tell(result: callbacks_lib.RoundResult) -> None:
    tracker.on_metrics(result.round, metrics_log.by_phase(result.metrics))

  return tell
