"""Runners of exports in either format, on arrays."""

from collections.abc import Callable
import pathlib
from typing import Any

import numpy as np
import tensorflow as tf

# Maps arrays by name to arrays by name.
Runner = Callable[..., dict[str, np.ndarray]]


def load(path: str | pathlib.Path) -> dict[str, Runner]:
  """Load an export, with its own state.

  An export is a program: load only those whose authors you trust.

  Args:
    path: A TFLite file, or the folder of a SavedModel.

  Returns:
    Name of each signature to its runner.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    saved = tf.saved_model.load(str(path))
    return {name: _of_saved_model(saved, name) for name in saved.signatures}
  interpreter = tf.lite.Interpreter(str(path), num_threads=1)
  return {
    name: interpreter.get_signature_runner(name)
    for name in interpreter.get_signature_list()
  }


def _of_saved_model(saved: Any, name: str) -> Runner:
  """Return a runner of a signature, which keeps its variables alive."""

  def run(**inputs: Any) -> dict[str, np.ndarray]:
    signature = saved.signatures[name]
    specs = signature.structured_input_signature[1]
    tensors = {
      given: tf.constant(value, specs[given].dtype)
      for given, value in inputs.items()
    }
    outputs = signature(**tensors)
    return {output: found.numpy() for output, found in outputs.items()}

  return run


def padded(array: Any, size: int) -> np.ndarray:
  """Pad examples at the end to a given number, with zeros or empty texts.

  Args:
    array: `[examples, ...]`; those beyond `size` are cut off.
    size: Number of examples.
  """
  array = np.asarray(array)[:size]
  empty = np.zeros([size - len(array), *array.shape[1:]], array.dtype)
  if array.dtype == object:
    empty[...] = ''
  return np.concatenate([array, empty])
