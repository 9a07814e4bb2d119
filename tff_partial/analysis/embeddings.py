"""Maps of user embeddings, coloured by an attribute of the users.

t-SNE projects the embeddings to the plane (FURL, figure 3; FedEmbed, figure 4).
A map proves little, so its title gives the silhouette score: of the embeddings
themselves, to compare models, and of the map, to show how far to trust it.
"""

from collections.abc import Mapping, Sequence
import os
from typing import Any, NamedTuple

import matplotlib
from matplotlib import lines
import numpy as np
from sklearn import manifold
from sklearn import metrics
from sklearn import utils

from tff_partial import random_bits
from tff_partial.analysis import figures
from tff_partial.analysis import run_folders
from tff_partial.analysis.errors import AnalysisError

# With fewer users, the default perplexity would be below 1.
_MIN_USERS = 4
# With more users, points overlap and t-SNE takes minutes.
_MAX_USERS = 3000
_PERPLEXITY = 30.0
# More colours are indistinguishable; the rarest values share one.
_MAX_COLOURS = 20
_OTHER, _OTHER_COLOUR = 'other', '#c8c8c8'


class Users(NamedTuple):
  """Users to draw on a map.

  Attributes:
    embeddings: Floats `[users, size]`.
    attribute: `[users]`: an attribute of each, such as the most used topic.
  """

  embeddings: np.ndarray
  attribute: Sequence[Any]


class Scores(NamedTuple):
  """Mean silhouettes, from -1 to 1: how far values of the attribute separate.

  Attributes:
    embeddings: The score of the embeddings themselves, over all users.
    map: The score of the map, over the users on it.
  """

  embeddings: float
  map: float


def silhouette(
  embeddings: np.ndarray,
  attribute: Sequence[Any],
  where: str = 'The embeddings',
) -> float:
  """Compute the mean silhouette of users by attribute, in Euclidean distance.

  Args:
    embeddings: Floats `[users, size]`.
    attribute: `[users]`.
    where: What they are, for messages.

  Raises:
    AnalysisError: If there are too few users or values, an embedding is not
      finite, or all are equal.
  """
  names = [str(value) for value in attribute]
  try:
    vectors = utils.check_array(
      embeddings, dtype=np.float64, ensure_min_samples=_MIN_USERS
    )
    score = metrics.silhouette_score(vectors, names)
  except ValueError as error:
    raise AnalysisError(
      f'{where}: these make no map ({error!s:.200}). Give finite embeddings '
      f'[users, size] of at least {_MIN_USERS} users, with an attribute for '
      'each that has two values, and one that several users share.'
    ) from error
  if not np.ptp(vectors, axis=0).any():
    raise AnalysisError(
      f'{where}: all {len(vectors)} embeddings are equal, so that they tell '
      'nothing of their users. Give those of users who took part in training.'
    )
  return float(score)


def project(embeddings: np.ndarray, seed: int = 0) -> np.ndarray:
  """Project embeddings to the plane by t-SNE.

  Args:
    embeddings: Floats `[users, size]`.
    seed: The same seed gives the same map.

  Returns:
    Floats `[users, 2]`.
  """
  number, size = embeddings.shape
  return manifold.TSNE(
    perplexity=min(_PERPLEXITY, (number - 1) / 3),
    init='pca' if size > 1 else 'random',
    random_state=random_bits.not_negative(seed, 'tsne'),
  ).fit_transform(np.asarray(embeddings, np.float32))


def draw(
  maps: Mapping[str, Users],
  path: str | os.PathLike[str],
  *,
  attribute: str,
  seed: int = 0,
) -> dict[str, Scores]:
  """Draw maps side by side; a colour means the same in all of them.

  Of more than 3,000 users a random sample is drawn.

  Args:
    maps: Title to users, such as one map per method.
    path: The PNG file to write.
    attribute: The name of the attribute, for the legend.
    seed: The seed of the maps, and of the choice of users on them.

  Returns:
    Title to scores.

  Raises:
    AnalysisError: If there are too few users or values, or an embedding is not
      finite.
  """
  colours = _colours(maps)
  figure = figures.new(4.6 * len(maps) + 1.8, 4.8)
  panels = np.atleast_1d(figure.subplots(1, len(maps)))
  scores = {}
  for axes, (title, users) in zip(panels, maps.items(), strict=True):
    score = silhouette(*users, where=title)
    vectors = np.asarray(users.embeddings, np.float64)
    values = np.array([str(value) for value in users.attribute])
    shown = np.arange(len(vectors))
    if len(vectors) > _MAX_USERS:
      generator = np.random.default_rng(random_bits.not_negative(seed, 'shown'))
      shown = np.sort(generator.choice(shown, _MAX_USERS, replace=False))
    points = project(vectors[shown], seed)
    scores[title] = Scores(score, silhouette(points, values[shown]))
    _scatter(axes, points, values[shown], colours)
    number = f'{len(vectors):,} users'
    if len(shown) < len(vectors):
      number += f', {len(shown):,} shown'
    axes.set_title(
      f'{title}, {number}\nsilhouette {scores[title].embeddings:.2f}, '
      f'of the map {scores[title].map:.2f}',
      fontsize=10.5,
      loc='left',
    )
  _legend(figure, colours, attribute)
  figures.save(figure, path)
  return scores


def _colours(maps: Mapping[str, Users]) -> dict[str, Any]:
  """Choose a colour for each of the most frequent values."""
  values = [str(v) for users in maps.values() for v in users.attribute]
  known, counts = np.unique(values, return_counts=True)
  frequent = known[np.argsort(-counts, kind='stable')][:_MAX_COLOURS]
  palette = matplotlib.colormaps['tab10' if len(frequent) <= 10 else 'tab20']
  colours: dict[str, Any] = {
    value: palette(i)
    for i, value in enumerate(sorted(frequent, key=run_folders.order))
  }
  if len(known) > len(frequent):
    colours[_OTHER] = _OTHER_COLOUR
  return colours


def _scatter(
  axes: Any, points: np.ndarray, values: np.ndarray, colours: Mapping[str, Any]
) -> None:
  """Draw the users in random order, so that no value covers the others."""
  order = np.random.default_rng(0).permutation(len(points))
  shades = [colours.get(value, _OTHER_COLOUR) for value in values]
  axes.scatter(
    *points[order].T,
    c=[shades[i] for i in order],
    s=float(np.clip(9000 / len(points), 5, 40)),
    linewidths=0,
    alpha=0.85,
  )
  # Absolute distances on the map are meaningless.
  axes.set_xticks([])
  axes.set_yticks([])
  axes.set_aspect('equal', adjustable='datalim')
  axes.spines[:].set_color('#d0d0d0')


def _legend(figure: Any, colours: Mapping[str, Any], attribute: str) -> None:
  handles = [
    lines.Line2D(
      [], [], marker='o', linestyle='', ms=6, color=colour, label=value
    )
    for value, colour in colours.items()
  ]
  figure.legend(
    handles=handles,
    title=attribute,
    loc='outside right upper',
    frameon=False,
    fontsize=9,
    title_fontsize=9.5,
    alignment='left',
  )
