"""An export, compared with the simulation."""

import math
from unittest import mock

import numpy as np
import pytest

from tasks.experiment.runs import devices
from tests.support import planted
import tff_partial
from tff_partial import algorithms
from tff_partial.exporting import exports
from tff_partial.exporting import running
from tff_partial.exporting import serving


def test_a_device_without_a_finite_prediction_is_not_called_alike(monkeypatch):
  # It predicts what it is given.
  monkeypatch.setattr(
    running, 'load', lambda path: {serving.PREDICT: lambda x: {'p': x}}
  )
  exported = mock.Mock(paths={'tflite': ''}, sizes=lambda: {'tflite': 1})
  clients = [
    devices._Client({}, {'x': np.array(given)}, {}, {'p': np.ones(2)})
    for given in ([1.0, 1.0], [1.0, math.nan])
  ]
  assert devices.measure(exported, 'tflite', clients[:1], None).predictions == 0
  found = devices.measure(exported, 'tflite', clients, None)
  assert math.isnan(found.predictions)


@pytest.mark.slow
@pytest.mark.parametrize(
  'build', [algorithms.build_fed_recon_eval, algorithms.build_furl_eval]
)
def test_a_device_starts_from_the_simulations_first_weights(build, tmp_path):
  model = planted.factorization()
  step = tff_partial.Phase(batch_size=2)
  evaluation = build(model, personalise=step, split=tff_partial.splits.same())
  weights = planted.as_model_weights(model.initial_weights('global', [0, 0]))
  of_run = devices.Served(evaluation, model, weights)
  exported = exports.export(
    model,
    weights,
    tmp_path / 'out',
    ['saved_model'],
    reconstruct=of_run.reconstruction,
    num_support=3,
  )
  ones = np.ones([3], np.float32)
  examples = {'x': np.arange(3, dtype=np.int32), 'y': ones, 'weight': ones}
  client = devices.simulated(
    of_run, exported, {'examples': examples, 'count': 3}
  )
  row = devices.measure(exported, 'saved_model', [client], None)
  assert max(row.local, row.predictions) < 1e-6
