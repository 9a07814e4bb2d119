"""Curves of a metric of new users over the number of their examples."""

from collections.abc import Mapping
import os
import pathlib

from tff_partial.analysis import figures
from tff_partial.analysis.errors import AnalysisError


def draw(
  lines: Mapping[str, Mapping[int, float]],
  path: str | os.PathLike[str],
  *,
  metric: str,
) -> pathlib.Path:
  """Draw a line for each group of users, or each predictor.

  Sizes are drawn at equal distances, since a few more examples matter little if
  there are many.

  Args:
    lines: Label to size of the support set to metric.
    path: The PNG file to write.
    metric: The metric's name.

  Raises:
    AnalysisError: If there is nothing to draw.
  """
  sizes = sorted({size for line in lines.values() for size in line})
  if not sizes:
    raise AnalysisError('There is nothing to draw: give at least one size.')
  places = {size: place for place, size in enumerate(sizes)}
  figure = figures.new(6.4, 4.2)
  axes = figure.add_subplot()
  figures.tidy(axes)
  ends = []
  for number, (label, line) in enumerate(lines.items()):
    look = figures.style(number)
    known = sorted(line)
    values = [line[size] for size in known]
    axes.plot([places[size] for size in known], values, marker='o', **look)
    ends.append((places[known[-1]], values[-1], label, look['color']))
  axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
  axes.set_xlabel('examples of a new user', color=figures.INK)
  axes.set_ylabel(figures.axis_name(metric), color=figures.INK)
  figures.label_ends(axes, ends)
  return figures.save(figure, path)
