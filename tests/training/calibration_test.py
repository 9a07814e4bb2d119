"""Calibrated intervals cover what they promise, where the model is wrong."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import planted
import tff_partial
from tff_partial import algorithms
from tff_partial import evaluation as evaluation_lib
from tff_partial.data import splits
from tff_partial.templates import rating_intervals
from tff_partial.templates import rating_posteriors
from tff_partial.training import calibration as calibration_lib

_WIDTH = 0.05
_BINS = 161


def _mass(*bins: float) -> calibration_lib.Calibration:
  return calibration_lib.Calibration([*bins, *[0.0] * (_BINS - len(bins))])


def test_scores_are_counted_by_hand() -> None:
  """Errors of 0.15, 2.02 and 99 stars at a deviation of 2."""
  metric = calibration_lib.ErrorHistogram()
  metric.update_state(
    tf.constant([3.15, 5.02, 102.0]),
    {
      rating_posteriors.RATING: tf.constant([3.0, 3.0, 3.0]),
      rating_posteriors.VARIANCE: tf.constant([4.0, 4.0, 4.0]),
    },
    tf.constant([1.0, 2.0, 3.0]),
  )
  counts = metric.result().numpy()
  assert np.flatnonzero(counts).tolist() == [1, 20, 160]
  assert counts[[1, 20, 160]].tolist() == [1.0, 2.0, 3.0]


def test_quantiles_by_hand() -> None:
  """Three quarters of the scores in the first bin, a quarter in the third."""
  found = _mass(6, 0, 2)
  np.testing.assert_allclose(found.quantile(0.375), 0.5 * _WIDTH)
  np.testing.assert_allclose(found.quantile(0.875), 2.5 * _WIDTH)
  # Noise may have made a bin negative.
  np.testing.assert_allclose(_mass(6, -1, 3).quantile(0.5), 4 / 6 * _WIDTH)


def test_coverage_by_hand() -> None:
  """Of ten users one has half of four scores outside of an interval."""
  counts = np.zeros([10, _BINS])
  counts[:, 0] = 4
  counts[0, [0, 9]] = 2
  found = _mass(8, 2).coverage(counts, 0.8)
  assert found['coverage'] == pytest.approx(38 / 40)
  assert found['worst_tenth'] == pytest.approx(0.5)
  # The least of ten shares of four trials: 0.45 in the mean.
  assert 0.35 < found['worst_tenth_by_chance'] < 0.6
  # No user is worse than the first on two scores, and the other two of it have
  # half inside in the mean.
  assert found['worst_tenth_held_out'] == pytest.approx(0.5, abs=0.1)


def test_a_worse_tenth_is_found_by_half_of_its_ratings() -> None:
  """Of 100 users, 10 have a coverage of 0.5 and 90 one of 0.9."""
  counts = np.zeros([100, _BINS])
  counts[:, 0], counts[:, 9] = 900, 100
  counts[:10, 0], counts[:10, 9] = 500, 500
  found = _mass(8, 2).coverage(counts, 0.8)
  assert found['coverage'] == pytest.approx(0.86)
  assert found['worst_tenth_held_out'] == pytest.approx(0.5, abs=0.005)


def test_clients_without_ratings_have_no_coverage() -> None:
  counts = np.zeros([3, _BINS])
  counts[:2, 0] = 4
  found = _mass(8, 2).coverage(counts, 0.8)
  assert found['coverage'] == found['worst_tenth_held_out'] == 1.0


def test_nothing_is_held_out_of_a_single_rating() -> None:
  counts = np.zeros([20, _BINS])
  counts[:, 0] = 1
  assert np.isnan(_mass(8, 2).coverage(counts, 0.8)['worst_tenth_held_out'])
  counts[:10, 0] = 2
  found = _mass(8, 2).coverage(counts, 0.8)
  assert found['coverage'] == found['worst_tenth_held_out'] == 1.0


def test_weights_may_sum_to_less_than_a_rating() -> None:
  counts = np.zeros([3, _BINS])
  counts[:, 0] = 4, 4, 0.4
  found = _mass(8, 2).coverage(counts, 0.8)
  assert found['coverage'] == found['worst_tenth'] == 1.0
  assert found['worst_tenth_by_chance'] <= 1.0


@pytest.mark.parametrize('level', [0.0, 1.0, 0.9, float('nan')])
def test_an_impossible_level_is_refused(level: float) -> None:
  beyond = calibration_lib.Calibration([8.0, *[0.0] * (_BINS - 2), 2.0])
  with pytest.raises(calibration_lib.CalibrationError, match='level'):
    beyond.quantile(level)


def _model() -> Any:
  return rating_posteriors.build_model(4, 0)


def _clients(process: Any, number: int) -> Any:
  """Whose errors have longer tails than a normal distribution's."""
  draw = np.random.default_rng(number)
  values = draw.standard_t(2, [number, 40])
  return tff_partial.pack(
    {
      f'u{k}': {
        'x': draw.integers(0, 4, 40).astype(np.int32),
        'y': y.astype(np.float32),
      }
      for k, y in enumerate(values)
    },
    process.example_spec,
  )


@pytest.mark.slow
def test_calibrated_intervals_cover_and_noise_is_of_the_promised_size() -> None:
  process = algorithms.build_fed_als(_model())
  result = tff_partial.train(
    process, _clients(process, 60), rounds=3, clients_per_round=60
  )
  evaluation = algorithms.build_fed_als_eval(_model(), split=splits.halves())
  known, new = _clients(process, 100), _clients(process, 101)
  args = (evaluation, known, result.best_weights)
  found = calibration_lib.calibrate(*args)
  counts = calibration_lib.histograms(evaluation, new, result.best_weights)
  assert counts.sum() == 101 * 20
  measured = found.coverage(counts, 0.7)['coverage']
  np.testing.assert_allclose(measured, 0.7, atol=0.03)
  normal = rating_intervals.half_width(1.0, 0.7)
  assert found.quantile(0.7) < 0.9 * normal
  low, high = tff_partial.Predictor(result, new).interval(
    'u1', np.arange(4, dtype=np.int32), 0.7, calibration=found
  )
  wide, wider = tff_partial.Predictor(result, new).interval(
    'u1', np.arange(4, dtype=np.int32), 0.7
  )
  np.testing.assert_allclose(
    (high - low) / (wider - wide), found.quantile(0.7) / normal, rtol=1e-3
  )
  noised = calibration_lib.calibrate(*args, noise_multiplier=2.0, noise_seed=1)
  noise = np.subtract(noised.mass, found.mass)
  np.testing.assert_allclose(noise.std(), 2.0, rtol=0.2)


@pytest.mark.slow
def test_clients_are_told_what_the_server_holds() -> None:
  process = algorithms.build_fed_als(_model())
  plain = algorithms.build_fed_als_eval(_model(), split=splits.halves())
  reading = evaluation_lib.build_evaluation(
    plain.model,
    work=plain.parts.work,
    client_state=plain.parts.client_state,
    server_state=lambda model: tf.zeros([]),
  )
  args = _clients(process, 3), process.get_model_weights(process.initialize())
  found = calibration_lib.calibrate(reading, *args, server_state=np.float32(0))
  assert found == calibration_lib.calibrate(plain, *args)


@pytest.mark.slow
def test_impossible_noise_is_refused() -> None:
  evaluation = algorithms.build_fed_als_eval(_model())
  with pytest.raises(calibration_lib.CalibrationError, match='noise'):
    calibration_lib.calibrate(evaluation, None, None, noise_multiplier=-1.0)


@pytest.mark.slow
def test_clients_without_ratings_to_measure_are_refused() -> None:
  evaluation = algorithms.build_fed_als_eval(_model(), split=splits.by_mark())
  fields = {'x': np.zeros([2], np.int32), 'y': np.ones([2], np.float32)}
  fields[splits.MARK] = np.zeros([2], np.int32)
  clients = tff_partial.pack({'ann': fields}, evaluation.example_spec)
  process = algorithms.build_fed_als(_model())
  weights = process.get_model_weights(process.initialize())
  with pytest.raises(
    calibration_lib.CalibrationError, match='no client has ratings to measure'
  ):
    calibration_lib.calibrate(evaluation, clients, weights)


@pytest.mark.slow
def test_a_model_without_variances_is_refused() -> None:
  evaluation = algorithms.build_fed_recon_eval(planted.factorization())
  with pytest.raises(
    calibration_lib.CalibrationError, match='no variances. Train'
  ):
    calibration_lib.histograms(evaluation, None, None)
