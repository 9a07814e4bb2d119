"""Confusion matrices of users' true and assigned sub-populations.

FedEmbed, figures 3 and 5. Groups that an unsupervised method finds have no
names: `matched` renames them so that as many users as possible agree.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import os
from typing import Any

import numpy as np
import pandas as pd
from scipy import optimize

from tff_partial.analysis import figures
from tff_partial.analysis.errors import AnalysisError
from tff_partial.data import vocabularies

# The largest matrices into which numbers are written.
_WRITTEN = 12
_MOST_GROUPS = 60


@dataclasses.dataclass(frozen=True, eq=False)
class Confusion:
  """The number of users of each sub-population in each group.

  Attributes:
    counts: int64 `[sub-populations, groups]`.
    classes: Names of the sub-populations.
    groups: Names of the groups.
  """

  counts: np.ndarray
  classes: tuple[str, ...]
  groups: tuple[str, ...]

  @property
  def num_users(self) -> int:
    """The number of all users."""
    return int(self.counts.sum())

  @property
  def purity(self) -> float:
    """The share of users who belong to the largest class of their group.

    It rises with the number of groups, to 1 if each user is a group.
    """
    return float(self.counts.max(axis=0).sum() / self.num_users)

  @property
  def accuracy(self) -> float:
    """The share of users in the group of their sub-population's name."""
    same = np.equal.outer(self.classes, self.groups)
    return float(self.counts[same].sum() / self.num_users)

  @property
  def shares(self) -> np.ndarray:
    """The share of each sub-population in each group, `[classes, groups]`."""
    sizes = self.counts.sum(axis=1, keepdims=True)
    return self.counts / np.maximum(sizes, 1)

  def matched(self) -> 'Confusion':
    """Rename and sort groups: each sub-population gets at most one.

    The assignment with the most users on the diagonal is chosen. Groups that
    none gets keep their names, with a question mark, and come last.
    """
    rows, columns = optimize.linear_sum_assignment(-self.counts)
    rest = [j for j in range(len(self.groups)) if j not in columns]
    names = [self.classes[i] for i in rows]
    names += [f'{self.groups[j]}?' for j in rest]
    return Confusion(
      self.counts[:, [*columns, *rest]], self.classes, tuple(names)
    )


def confusion(truth: Sequence[Any], assigned: Sequence[Any]) -> Confusion:
  """Count users by their sub-population and the group they were assigned to.

  Args:
    truth: The sub-population of each user, `[users]`.
    assigned: The group of each user, `[users]`.

  Raises:
    AnalysisError: If there is no user, the lengths differ, or a value is
      missing: None or NaN.
  """
  if not len(truth) or len(truth) != len(assigned):
    raise AnalysisError(
      f'The truth is known of {len(truth)} users, the assignment of '
      f'{len(assigned)}. Give both of the same users, at least one.'
    )
  for name, values in (('truth', truth), ('assigned', assigned)):
    if missing := np.flatnonzero(pd.isna(np.asarray(values, object))).tolist():
      raise AnalysisError(
        f'{name}: missing for {len(missing)} of {len(truth)} users, first at '
        f'place {missing[0]}. Leave these users out of both.'
      )
  counts = pd.crosstab(np.asarray(truth), np.asarray(assigned))
  counts = counts.sort_index(axis=0, key=_by_number)
  counts = counts.sort_index(axis=1, key=_by_number)
  return Confusion(
    counts.to_numpy(np.int64),
    tuple(map(vocabularies.as_text, counts.index)),
    tuple(map(vocabularies.as_text, counts.columns)),
  )


def _by_number(names: pd.Index) -> pd.Index:
  """Return what names are sorted by: their numbers, if all are numbers."""
  are_numbers = all(str(name).isdecimal() for name in names)
  return names.astype(np.int64) if are_numbers else names


def draw(
  matrices: Mapping[str, Confusion],
  path: str | os.PathLike[str],
  *,
  truth: str = 'true sub-population',
  assigned: str = 'assigned group',
) -> None:
  """Draw matrices side by side, each row as shares of its sub-population.

  Args:
    matrices: Title to matrix, such as one per method.
    path: The PNG file to write.
    truth: The label of the rows.
    assigned: The label of the columns.

  Raises:
    AnalysisError: If a matrix has too many groups to be readable.
  """
  figure = figures.new(4.1 * len(matrices) + 0.9, 4.4)
  panels = np.atleast_1d(figure.subplots(1, len(matrices)))
  for axes, (title, matrix) in zip(panels, matrices.items(), strict=True):
    if len(matrix.groups) > _MOST_GROUPS:
      raise AnalysisError(
        f'{title}: {len(matrix.groups)} groups are too many for a picture. '
        f'Give at most {_MOST_GROUPS}.'
      )
    image = axes.imshow(
      matrix.shares, cmap='Blues', vmin=0.0, vmax=1.0, aspect='auto'
    )
    axes.set_xticks(range(len(matrix.groups)), matrix.groups, fontsize=9)
    axes.set_yticks(range(len(matrix.classes)), matrix.classes, fontsize=9)
    if max(map(len, matrix.groups)) > 3:
      axes.tick_params(axis='x', rotation=45)
    axes.tick_params(length=0, colors=figures.INK)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(assigned, color=figures.INK)
    axes.set_title(
      f'{title}\npurity {matrix.purity:.3f}, {matrix.num_users:,} users',
      fontsize=10.5,
      loc='left',
    )
    if max(matrix.counts.shape) <= _WRITTEN:
      _write(axes, matrix.shares)
  panels[0].set_ylabel(truth, color=figures.INK)
  where: dict[str, Any] = {'ax': list(panels), 'fraction': 0.03, 'pad': 0.02}
  bar = figure.colorbar(image, format='{x:.0%}', **where)
  bar.set_label('share of the sub-population', color=figures.INK)
  bar.outline.set_visible(False)
  figures.save(figure, path)


def _write(axes: Any, shares: np.ndarray) -> None:
  """Write shares into their cells, in per cent; leave empty cells blank."""
  for (row, column), share in np.ndenumerate(shares):
    if share >= 0.005:
      axes.text(
        column,
        row,
        f'{100 * share:.0f}',
        ha='center',
        va='center',
        fontsize=8,
        color='white' if share > 0.55 else figures.INK,
      )
