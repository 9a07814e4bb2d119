"""Dissimilarity of clients' public components: HPFL, section 5.3.3."""

from collections.abc import Mapping

import numpy as np


def dissimilarity(components: Mapping[str, np.ndarray]) -> float:
  """Sum the cosine distances of the clients' attribute vectors (Eq. 11).

  For each ordered pair of clients (i, j), the mean over attributes k of
  1 - cos(c_ki, c_kj) is added; a client with itself adds nothing. The paper
  prints cos itself, whose sum could not fall as clients become alike, and says
  that lower values mean more similar ones: its values (Table 5) are such sums
  of distances. They grow with the square of the number of clients, so only
  equal numbers of clients compare; the paper takes its ten largest clients.

  A vector of zeros has no direction: it has distance 1 from those of all other
  clients, as in scikit-learn.

  Args:
    components: Name of each client to its component, floats
      `[attributes, size]`.

  Returns:
    A number from 0, if all clients' vectors have the same directions, to twice
    the number of pairs; NaN if a component is not finite.
  """
  vectors = np.stack([np.asarray(c, np.float64) for c in components.values()])
  norms = np.linalg.norm(vectors, axis=2, keepdims=True)
  num_zeros = np.count_nonzero(norms == 0.0)
  total = np.divide(vectors, np.where(norms == 0.0, 1.0, norms)).sum(axis=0)
  # The cosines of all pairs of clients, their own included, add up to the
  # square of the norm of the summed directions.
  num_attributes = max(len(total), 1)
  cosines = float(np.square(total).sum()) + num_zeros
  return max(len(components) ** 2 - cosines / num_attributes, 0.0)
