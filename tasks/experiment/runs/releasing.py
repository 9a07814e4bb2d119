"""Noisy releases of a task before training: drawn once, then kept.

Each draw is one more release of the same users, which the ledger would have to
count. So a run draws after checking all of its options, saves the release in
its folder before using it, and every program reads it from there.
"""

from tasks import task as tasks_lib
from tasks.errors import OptionError
from tasks.experiment.config import Config
from tasks.experiment.runs.folder import Folder
from tasks.experiment.runs.folder import RELEASED_FILE


def of_run(config: Config, folder: Folder | None) -> tasks_lib.Release:
  """Return the release of a trained run, for programs that read it.

  Args:
    config: The experiment.
    folder: The run's folder; None to draw the release and keep it nowhere.

  Raises:
    OptionError: If the release is missing or damaged.
  """
  release = config.privacy.release
  if folder is None or not _releases(config):
    return release
  kept = folder.read_released()
  if kept is not None:
    return release._replace(kept=kept, keep=None)
  # With a seed, the same noise can be drawn again.
  if release.noise_seed is None:
    raise _missing(config, folder)
  return release


def at_start(
  config: Config, folder: Folder | None, *, is_plan: bool = False
) -> tasks_lib.Release:
  """Return the release for checking a run that starts or resumes, undrawn.

  Args:
    config: The experiment.
    folder: The run's folder, or None.
    is_plan: True if nothing is to be trained.

  Raises:
    OptionError: If the run has begun and its release is missing, or if the
      release is damaged.
  """
  release = config.privacy.release._replace(keep=None)
  if folder is None or not _releases(config):
    return release
  kept = folder.read_released()
  if kept is None and release.noise_seed is None and folder.has_begun:
    raise _missing(config, folder)
  if kept is None or is_plan:
    return release._replace(kept=kept)
  return release._replace(kept=kept, keep=folder.keep_released)


def is_due(config: Config, folder: Folder | None) -> bool:
  """Return True if a release is still to be drawn before the first round."""
  return _releases(config) and (
    folder is None or folder.read_released() is None
  )


def drawn(
  config: Config, folder: Folder | None, task: tasks_lib.Task
) -> tasks_lib.Task:
  """Draw what the task releases, and save it.

  Args:
    config: The experiment, already checked.
    folder: The run's folder; None to save it nowhere.
    task: The task, with a placeholder for the draw.

  Raises:
    UserError: If the draw is unusable; it is saved, too.
  """
  release = config.privacy.release
  if folder is not None:
    release = release._replace(keep=folder.keep_released)
  return task.released_anew(release)


def _releases(config: Config) -> bool:
  return bool(config.spent.noise_multipliers)


def _missing(config: Config, folder: Folder) -> OptionError:
  return OptionError(
    f'{folder.path / RELEASED_FILE}: there is no such file. It holds what the '
    f'task {config.task.name} released with noise before the first round of '
    'this run, which cannot be drawn again: other noise would be one more '
    'release, and give weights another meaning. Bring it back from a copy, or '
    'train again in another folder; runs of older versions did not keep it.'
  )
