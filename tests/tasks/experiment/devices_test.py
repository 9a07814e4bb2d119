"""An export, compared with the simulation."""

import math
from unittest import mock

import numpy as np

from tasks.experiment.runs import devices
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
