"""A small comparison in place of one of half a thousand rounds."""

from typing import Any

import numpy as np
import pytest
from sklearn import datasets
import tensorflow as tf

import tff_partial


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
  """Digits of scikit-learn in place of MNIST, and one round of one seed."""
  digits = datasets.load_digits()
  images = np.kron(digits.images, np.ones([1, 4, 4]))[:, 2:-2, 2:-2]
  monkeypatch.setattr(
    tf.keras.datasets.mnist,
    'load_data',
    lambda: ((images * 16, digits.target), None),
  )
  compare = tff_partial.compare

  def small(methods: Any, clients: Any, **options: Any) -> Any:
    return compare(methods, clients, **{**options, 'rounds': 1, 'seeds': [0]})

  monkeypatch.setattr(tff_partial, 'compare', small)
