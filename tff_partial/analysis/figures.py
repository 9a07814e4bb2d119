"""Common parts of all figures: colours, names of axes, and files."""

from collections.abc import Mapping, Sequence
import io
import os
import pathlib
import re
import textwrap
from typing import Any

from matplotlib import figure as matplotlib_figure
import numpy as np
import pandas as pd
from sklearn import isotonic

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
  colours = len(COLOURS)
  return {
    'color': COLOURS[number % colours],
    'linestyle': _DASHES[number // colours % len(_DASHES)],
  }


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


def label_ends(
  axes: Any, ends: Sequence[tuple[float, float, str, Any]]
) -> None:
  """Write each line's label next to its end, without overlaps.

  Args:
    axes: The axes, with their final limits.
    ends: Last x and y of each line, its label and its colour.
  """
  low, high = axes.get_ylim()
  texts = [textwrap.fill(label, 30) or label for _, _, label, _ in ends]
  height = axes.figure.get_size_inches()[1] * 72 * 0.8
  heights = [(11.0 * (1 + text.count('\n')) + 3.0) / height for text in texts]
  places = spread([(y - low) / (high - low) for _, y, _, _ in ends], heights)
  for (x, y, _, colour), text, place in zip(ends, texts, places, strict=True):
    axes.annotate(
      text,
      xy=(x, min(max(y, low), high)),
      xytext=(1.03, place),
      textcoords='axes fraction',
      color=colour,
      fontsize=9,
      va='center',
      annotation_clip=False,
      arrowprops={
        'arrowstyle': '-',
        'color': colour,
        'linewidth': 0.6,
        'alpha': 0.5,
        'relpos': (0, 0.5),
        'shrinkA': 1,
        'shrinkB': 2,
      },
    )


def spread(wanted: Sequence[float], heights: Sequence[float]) -> list[float]:
  """Move labels apart until none covers another.

  Args:
    wanted: The desired centers, in fractions of the axis.
    heights: The labels' heights, in the same unit.

  Returns:
    The centers, in the same vertical order, inside the axis if they fit.
  """
  if not len(wanted):
    return []
  order = np.argsort(wanted, kind='stable')
  tall = np.asarray(heights, float)[order]
  # After subtracting the room that the labels take, places only have to be
  # ascending: isotonic regression finds the nearest ones.
  taken = np.concatenate([[0.0], np.cumsum((tall[:-1] + tall[1:]) / 2)])
  lowest = tall[0] / 2
  highest = max(1.0 - tall[-1] / 2 - taken[-1], lowest)
  places = np.empty(len(order))
  places[order] = taken + isotonic.isotonic_regression(
    np.asarray(wanted, float)[order] - taken, y_min=lowest, y_max=highest
  )
  return places.tolist()


def draw_even(
  lines: Mapping[str, pd.DataFrame],
  places: Sequence[Any],
  path: str | os.PathLike[str],
  *,
  x: str,
  metric: str,
  joined: bool = True,
) -> pathlib.Path:
  """Draw lines over evenly spaced values, each with its label at its end.

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
  ends: list[tuple[float, float, str, Any]] = []
  for number, (label, line) in enumerate(lines.items()):
    look = style(number if joined else number % len(COLOURS))
    look['linestyle'] = look['linestyle'] if joined else ''
    line = line.set_axis([places.index(value) for value in line.index])
    line = line.sort_index()
    known = line.dropna(subset='mean')
    axes.errorbar(
      known.index, known['mean'], known['std'], marker='o', capsize=3, **look
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
    if label and len(known):
      end = known['mean'].iloc[-1]
      ends.append((known.index[-1], end, label, look['color']))
  axes.set_xticks(range(len(places)), [str(value) for value in places])
  axes.set_xlabel(x, color=INK)
  axes.set_ylabel(axis_name(metric), color=INK)
  label_ends(axes, ends)
  return save(figure, path)


def save(
  figure: matplotlib_figure.Figure, path: str | os.PathLike[str]
) -> pathlib.Path:
  """Write a figure as PNG, atomically and with the same bytes every time."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_name(f'.{path.name}.tmp')
  try:
    figure.savefig(
      temporary,
      format='png',
      dpi=_DOTS_PER_INCH,
      bbox_inches='tight',
      metadata={'Software': None},
    )
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)
  return path
