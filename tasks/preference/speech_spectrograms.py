"""Log-mel spectrograms of short recordings, as images.

Windows of 40 ms (Hann) every 20 ms; for each the power in 40 triangular bands
that are equally wide on the mel scale, from 80 Hz to half the sampling rate; in
decibels below the loudest band of the recording, down to -80. In the image the
loudest is 255, -80 dB or less is 0, and so are the frames after the end. The
image is thus independent of a speaker's loudness.

FedEmbed's spectrograms are of 200 x 375 numbers and its sounds are sentences.
Ours are words: 40 x 48 for 0.96 seconds; longer recordings are cut to that.
"""

import functools

import numpy as np
import tensorflow as tf

# Height and width of an image: low bands first, time from left to right.
NUM_BANDS, NUM_FRAMES = 40, 48
FULL_INK = 255

_WINDOW_SECONDS, _HOP_SECONDS = 0.04, 0.02
_LOWEST_HERTZ = 80.0
_RANGE_DECIBELS = 80.0
# Lower powers are silence.
_LEAST_POWER = 1e-10


def log_mel(samples: np.ndarray, rate: int) -> np.ndarray:
  """Compute the spectrogram of a recording, at most `NUM_FRAMES` frames.

  Args:
    samples: float32 `[samples]`, at least one.
    rate: Samples per second.

  Returns:
    Decibels, float32 `[frames, NUM_BANDS]`, from -80 to 0; a frame for each
    started 20 ms. Silence is -80 throughout.
  """
  hop, window = (round(s * rate) for s in (_HOP_SECONDS, _WINDOW_SECONDS))
  samples = samples[: NUM_FRAMES * hop]
  starts = np.arange(0, len(samples), hop)
  padded = np.pad(samples, [0, starts[-1] + window - len(samples)], 'constant')
  hann, bands = _window_and_bands(rate, window)
  frames = padded[starts[:, np.newaxis] + np.arange(window)] * hann
  power = np.abs(np.fft.rfft(frames, 2 * (len(bands) - 1))) ** 2 @ bands
  loudest = power.max()
  if loudest < _LEAST_POWER:
    return np.full(power.shape, -_RANGE_DECIBELS, np.float32)
  return from_loudest(10 * np.log10(np.maximum(power, _LEAST_POWER)))


def from_loudest(decibels: np.ndarray) -> np.ndarray:
  """Shift the maximum to 0 dB and clip at -80 dB."""
  below = decibels - decibels.max()
  return np.maximum(below, -_RANGE_DECIBELS).astype(np.float32)


def to_picture(decibels: np.ndarray) -> np.ndarray:
  """Make an image of a spectrogram, with frames cut off or added as needed."""
  ink = np.rint((decibels / _RANGE_DECIBELS + 1) * FULL_INK).astype(np.uint8)
  picture = np.zeros([NUM_BANDS, NUM_FRAMES], np.uint8)
  picture[:, : len(ink)] = ink[:NUM_FRAMES].T
  return picture


@functools.cache
def _window_and_bands(rate: int, window: int) -> tuple[np.ndarray, np.ndarray]:
  """Return a Hann window, and the weights of bands `[bins, NUM_BANDS]`.

  The transform's length is the second power of two from the window's length up,
  so that the narrow low bands have several bins.
  """
  length = 2 ** (int(np.ceil(np.log2(window))) + 1)
  bands = tf.signal.linear_to_mel_weight_matrix(
    NUM_BANDS, length // 2 + 1, rate, _LOWEST_HERTZ, rate / 2
  )
  return tf.signal.hann_window(window).numpy(), bands.numpy()
