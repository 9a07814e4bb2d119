"""Shares of attributes by client, as stacked bars (HPFL, Figure 4)."""

from collections.abc import Mapping, Sequence
import os
from typing import Any

import matplotlib
import numpy as np

from tff_partial.analysis import figures
from tff_partial.analysis.errors import AnalysisError

# The most names that fit into a legend, and the most distinguishable colours.
_MOST_NAMED = 20


def draw(
  shares: Mapping[str, np.ndarray],
  names: Sequence[str],
  path: str | os.PathLike[str],
  *,
  client: str = 'client',
  attribute: str = 'attribute',
) -> None:
  """Draw a bar for each client, divided into the shares of attributes.

  An attribute has the same colour in all bars. If there are many, the legend
  names those that are most frequent on average.

  Args:
    shares: Client to shares of attributes, floats `[attributes]` that add up
      to 1. The first client is at the top.
    names: The attributes' names.
    path: The PNG file to write.
    client: The label of the axis of clients.
    attribute: The title of the legend.

  Raises:
    AnalysisError: If there is no client, or not a share for each attribute.
  """
  lengths = {len(own) for own in shares.values()}
  if lengths != {len(names)}:
    raise AnalysisError(
      f'Shares: there are {len(shares)} clients with {sorted(lengths)} shares, '
      f'and {len(names)} attributes. Give each client a share for each.'
    )
  table = np.array(list(shares.values()), np.float64)
  few = len(names) <= _MOST_NAMED
  palette = matplotlib.colormaps['tab20' if few else 'turbo']
  colours = [palette(k if few else k / len(names)) for k in range(len(names))]
  named = np.argsort(-table.mean(axis=0), kind='stable')[:_MOST_NAMED]
  figure = figures.new(9.0, 1.2 + 0.38 * max(len(table), 8))
  axes = figure.subplots()
  places = range(len(table))
  starts = np.cumsum(table, axis=1) - table
  for k, name in enumerate(names):
    axes.barh(
      places,
      table[:, k],
      left=starts[:, k],
      color=colours[k],
      label=name if k in named else None,
    )
  _tidy(axes, list(shares), client)
  more = len(names) - len(named)
  figure.legend(
    title=f'{attribute}, and {more} more' if more else attribute,
    loc='outside right upper',
    frameon=False,
    fontsize=8,
    title_fontsize=9,
    alignment='left',
  )
  figures.save(figure, path)


def _tidy(axes: Any, clients: Sequence[str], what: str) -> None:
  """Label the bars, the first at the top."""
  axes.set_yticks(range(len(clients)), clients)
  axes.invert_yaxis()
  axes.set_xlim(0.0, 1.0)
  axes.set_xlabel("share of the attributes of a client's records")
  axes.set_ylabel(what)
  axes.tick_params(length=0, colors=figures.INK, labelsize=9)
  axes.spines[:].set_visible(False)
