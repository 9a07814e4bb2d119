"""Options of the weights from which training starts."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import ClassVar, TYPE_CHECKING

from tasks.errors import OptionError
from tasks.options import detail
from tasks.options import option
from tasks.options import Options
import tff_partial

if TYPE_CHECKING:
  from tff_partial.model import models


@dataclasses.dataclass(frozen=True)
class FirstWeights(Options):
  title: ClassVar[str] = 'First weights'

  learned_first_values: bool = option(
    False, 'Start local weights from values that all clients learn together.'
  )
  public_run: str | None = detail(
    None,
    'Folder of a run whose users are public: shared weights of the same names '
    'and shapes keep the values of its best round, neither sent nor noised.',
  )
  public_weights: tuple[str, ...] = detail(
    ('.*',),
    'Regular expressions of the names of the weights taken from a public run.',
  )

  def __post_init__(self) -> None:
    """Refuse names without a run."""
    super().__post_init__()
    if self.public_run is None:
      self.refuse_set(('public_weights',), 'give --set=public_run, too.')

  @property
  def public(self) -> tuple[str, ...]:
    """Names of what the run takes to be public."""
    return () if self.public_run is None else ('public_run',)

  def begin(self, model: models.PartialModel) -> models.PartialModel:
    """Freeze public weights, and learn first values of local ones, as chosen.

    Raises:
      UserError: If the model does not fit a choice, or the run cannot be read.
    """
    if self.public_run is not None:
      model = self._on_public(model, self.public_run)
    if not self.learned_first_values:
      return model
    try:
      return tff_partial.learn_first_values(model)
    except tff_partial.model.models.ModelError as error:
      raise OptionError(
        f'--learned_first_values: {error} Of the algorithms, fed_recon and '
        'others whose clients have weights of their own have use for it.'
      ) from error

  def _on_public(
    self, model: models.PartialModel, folder: str
  ) -> models.PartialModel:
    """Freeze the shared weights that a public run has, too."""
    from tff_partial.model import selectors
    from tff_partial.training import checkpoints
    from tff_partial.training import resuming

    public = checkpoints.best_shared_weights(
      pathlib.Path(folder) / resuming.CHECKPOINTS_FOLDER
    )
    shared = model.trainable(tff_partial.tiers.GLOBAL)
    flag, names = '--set=public_weights', self.public_weights
    named = selectors.names_of(model.spec, names, flag)
    kept = {
      v.name: public[v.name]
      for v in shared
      if v.name in named & set(public) and v.fits(public[v.name].shape)
    }
    if not kept:
      raise OptionError(
        f'--set=public_run={folder}: its model shares {sorted(public)}. Of '
        'these, this model has none of the same shape among those of '
        f'{flag}={",".join(names)}.'
      )
    begun = model.with_variables(
      model.variables, dict, model.tier_of, {**model.given_values, **kept}
    )
    trained = [re.escape(v.name) for v in shared if v.name not in kept]
    return tff_partial.freeze(begun, but=trained)
