"""Times `reconstruct` of exact ALS on a device: TFLite, one thread.

    python -m benchmarks.reconstruct

Exports a model of 3,706 items with 20 factors and random weights, solves for
the posterior of a user with 100 ratings, and compares it with NumPy's.
"""

import collections
import pathlib
import tempfile
import time

import numpy as np

from benchmarks import measuring
import tff_partial
from tff_partial import algorithms
from tff_partial import tiers
from tff_partial.exporting import running
from tff_partial.templates import rating_posteriors

_ITEMS, _FACTORS, _RATINGS = 3706, 20, 100
_REPEATS = 300


def main() -> None:
  """Print the size, the time of a call and the largest difference."""
  measuring.begin('Reconstruction on a device')
  model = rating_posteriors.build_model(_ITEMS, _FACTORS)
  draw = np.random.default_rng(0)
  weights = dict(model.initial_weights(tiers.GLOBAL, np.zeros(2, np.int32)))
  item = draw.normal(size=[_ITEMS, _FACTORS + 1]).astype(np.float32)
  weights[rating_posteriors.ITEM] = item
  user = {
    'x': draw.permutation(_ITEMS)[:_RATINGS].astype(np.int32),
    'y': draw.normal(size=_RATINGS).astype(np.float32),
  }
  with tempfile.TemporaryDirectory() as folder:
    exported = tff_partial.export(
      model,
      collections.OrderedDict(weights),
      pathlib.Path(folder) / 'device',
      reconstruct=algorithms.build_fed_als(model),
      num_support=_RATINGS,
    )
    measuring.say(f'{exported.sizes()["tflite"] / 1e6:.1f} MB')
    reconstruct = running.load(exported.paths['tflite'])['reconstruct']
    given = {**user, 'count': np.int32(_RATINGS)}
    found = reconstruct(**given)
    seconds = []
    for _ in range(_REPEATS):
      begin = time.perf_counter()
      reconstruct(**given)
      seconds.append(time.perf_counter() - begin)
  a = np.concatenate([np.ones([_RATINGS, 1]), item[user['x'], 1:]], 1)
  wanted = np.linalg.solve(
    a.T @ a + np.eye(_FACTORS + 1), a.T @ (user['y'] - item[user['x'], 0])
  )
  (name,) = [
    n for n, v in exported.local.items() if v == rating_posteriors.USER
  ]
  difference = np.abs(found[name] - wanted).max()
  median, least = np.median(seconds), np.min(seconds)
  measuring.say(
    f'{1e3 * median:.3f} ms in the median, {1e3 * least:.3f} ms at least; '
    f'largest difference from NumPy {difference:.1e}'
  )


if __name__ == '__main__':
  main()
