"""Common parts of all figures: colours, names of axes, and files."""

from collections.abc import Mapping, Sequence
import io
import os
import pathlib
import re
from typing import Any

from matplotlib import figure as matplotlib_figure
import pandas as pd

from tff_partial.training import files

# Distinguishable for colour-blind people, and dark enough for thin lines.
COLOURS = (
  '#0072b2',
  '#d55e00',
  '#009e73',
  '#cc79a7',
  '#6a3d9a',
  '#b8860b',
  '#56b4e9',
  '#000000',
)
_DASHES = ('-', (0, (5, 2)), (0, (1, 1.2)))
INK, FAINT = '#333333', '#999999'

_DOTS_PER_INCH = 150

# Patterns of metrics' names, and their units. The first match wins.
_UNITS = (
  (r'^seconds_|seconds$', 's'),
  (r'_mb$', 'MB'),
  (r'bytes$', 'bytes'),
  (r'loss$', 'mean per example'),
  (r'accuracy|auc|f1|share|purity', '0 to 1'),
  (r'rmse|mae$', 'unit of the labels'),
  (r'epsilon$', 'of differential privacy'),
)


class Figure(matplotlib_figure.Figure):
  """A figure that a notebook displays even without pyplot."""

  def _repr_png_(self) -> bytes:
    file = io.BytesIO()
    self.savefig(file, format='png', bbox_inches='tight')
    return file.getvalue()


def style(number: int) -> dict[str, Any]:
  """Return colour and dashes of a line by number; they repeat after 24."""
  turn, place = divmod(number, len(COLOURS))
  return {'color': COLOURS[place], 'linestyle': _DASHES[turn % len(_DASHES)]}


def axis_name(metric: str) -> str:
  """Return a metric's name in words, with its unit."""
  words = metric.replace('_', ' ').replace('/', ' ')
  for pattern, unit in _UNITS:
    if re.search(pattern, metric):
      return f'{words} ({unit})'
  return words


def new(width: float, height: float) -> Figure:
  """Make an empty figure, sized in inches, without window or global state."""
  return Figure(
    figsize=(width, height), layout='constrained', facecolor='white'
  )


def tidy(axes: Any) -> None:
  """Reduce axes to two spines and a horizontal grid."""
  axes.spines[['top', 'right']].set_visible(False)
  axes.spines[['left', 'bottom']].set_color(FAINT)
  axes.tick_params(colors=INK, labelsize=9)
  axes.grid(axis='y', color='#e4e4e4', linewidth=0.8)
  axes.set_axisbelow(True)


def add_legend(axes: Any) -> None:
  """Add a legend of all labelled lines beside axes, which keep their size."""
  axes.legend(
    frameon=False, fontsize=9, loc='upper left', bbox_to_anchor=(1.0, 1.0)
  )
  # It would shrink the axes by the width of the legend, to nothing in the end.
  axes.figure.set_layout_engine('none')


def draw_even(
  lines: Mapping[str, pd.DataFrame],
  places: Sequence[Any],
  path: str | os.PathLike[str],
  *,
  x: str,
  metric: str,
  joined: bool = True,
) -> pathlib.Path:
  """Draw lines over evenly spaced values.

  Args:
    lines: Label to the columns `mean` and `std`, by value. A cross at the
      bottom marks a mean that is NaN.
    places: All values, in order.
    path: The PNG file to write.
    x: The name of the horizontal axis.
    metric: The metric, for the vertical axis.
    joined: False if lines between the values would be meaningless.
  """
  figure = new(6.4, 4.2)
  axes = figure.add_subplot()
  tidy(axes)
  for number, (label, line) in enumerate(lines.items()):
    look = style(number if joined else number % len(COLOURS))
    look['linestyle'] = look['linestyle'] if joined else ''
    line = line.set_axis([*map(places.index, line.index)]).sort_index()
    known = line.dropna(subset='mean')
    axes.errorbar(
      known.index,
      known['mean'],
      known['std'],
      marker='o',
      capsize=3,
      label=label,
      **look,
    )
    lost = line.index.difference(known.index)
    axes.plot(
      lost,
      [0.02] * len(lost),
      transform=axes.get_xaxis_transform(),
      marker='x',
      linestyle='',
      color=look['color'],
    )
  axes.set_xticks(range(len(places)), [str(value) for value in places])
  axes.set_xlabel(x, color=INK)
  axes.set_ylabel(axis_name(metric), color=INK)
  if any(lines):
    add_legend(axes)
  return save(figure, path)


def save(
  figure: matplotlib_figure.Figure, path: str | os.PathLike[str]
) -> pathlib.Path:
  """Write a figure as PNG, atomically and with the same bytes every time."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  with files.replacing(path) as made:
    figure.savefig(
      made,
      format='png',
      dpi=_DOTS_PER_INCH,
      bbox_inches='tight',
      metadata={'Software': None},
    )
  return path
