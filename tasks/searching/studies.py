"""The Optuna study of a search, in a journal in the sweep's folder."""

import pathlib
from typing import Any

from tasks.errors import OptionError
from tasks.searching import space
from tff_partial import random_bits

JOURNAL = 'search.journal'
_NAME = 'search'
_SETTINGS = 'settings'


def optuna() -> Any:
  """Import Optuna, which only a search needs.

  Raises:
    OptionError: If it is not installed.
  """
  try:
    import optuna as found
  except ImportError as error:
    raise OptionError(
      '--search needs Optuna, which is not installed here. Install it with '
      '`pip install optuna`, or give --grid in place of --search.'
    ) from error
  # Hide Optuna's own messages.
  found.logging.set_verbosity(found.logging.ERROR)
  return found


class Study:
  """The trials of a search, kept in a journal that survives kills.

  A trial's values follow from the seed, the trial's number and the trials
  before it, so a resumed search tries the same values.

  Attributes:
    study: The Optuna study.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    direction: str | None = None,
    pruner: Any = None,
  ):
    """Open the journal of a folder.

    Args:
      folder: The folder of the sweep.
      direction: 'minimize' or 'maximize', to create a missing study.
      pruner: Optuna's rule by which trials end early; unused if none runs.

    Raises:
      OptionError: If Optuna is missing, or the journal cannot be read.
    """
    library = optuna()
    from optuna.storages import journal

    path = folder / JOURNAL
    try:
      storage = library.storages.JournalStorage(
        journal.JournalFileBackend(str(path))
      )
      if direction is None:
        self.study = library.load_study(study_name=_NAME, storage=storage)
      else:
        self.study = library.create_study(
          study_name=_NAME,
          storage=storage,
          direction=direction,
          pruner=pruner,
          load_if_exists=True,
        )
    except (KeyError, ValueError) as error:
      raise OptionError(
        f'{path}: this is no journal of a search ({error!s:.200}). Move it '
        'away, or choose another --sweep_dir.'
      ) from error

  @property
  def settings(self) -> dict[str, Any]:
    """The settings with which the search was started."""
    return dict(self.study.user_attrs.get(_SETTINGS, {}))

  def claim(self, settings: dict[str, Any], where: pathlib.Path) -> None:
    """Store the settings of a new search, or compare them with those stored.

    Args:
      settings: Names to values that JSON can represent.
      where: The folder of the sweep.

    Raises:
      OptionError: If the search was started with others.
    """
    before = self.settings
    if not before:
      self.study.set_user_attr(_SETTINGS, settings)
      return
    for name in sorted(before.keys() | settings.keys()):
      there, now = before.get(name), settings.get(name)
      if there != now:
        raise OptionError(
          f'--sweep_dir={where}: the search there was begun with '
          f'{name}={there}, now it is {now}. Give the same to go on with it, '
          'or choose another folder.'
        )

  def trials(self) -> list[Any]:
    """Return all trials, as Optuna's `FrozenTrial`, by number."""
    return list(self.study.get_trials(deepcopy=False))

  def open_trial(
    self, number: int, parameters: list[space.Parameter], seed: int
  ) -> Any:
    """Start a trial, or resume one that a kill interrupted.

    Args:
      number: The number of the trial; all before it have ended.
      parameters: The flags that are varied.
      seed: The seed of the search.

    Returns:
      Optuna's `Trial`, with a value for every parameter.
    """
    self._draw_by(seed, number, '')
    begun = self.trials()[number:]
    if begun:
      trial = optuna().trial.Trial(self.study, begun[0]._trial_id)
    else:
      trial = self.study.ask()
    for parameter in parameters:
      # Each has its own generator, so a kill between two of them changes
      # nothing.
      self._draw_by(seed, number, parameter.flag)
      parameter.suggest(trial)
    return trial

  def _draw_by(self, seed: int, number: int, purpose: str) -> None:
    bits = random_bits.derive(seed, f'trial {number} {purpose}')
    self.study.sampler = optuna().samplers.TPESampler(
      seed=int(bits[0]) & 0x7FFFFFFF, multivariate=False
    )
