"""Functions of flat tensors, traced once and cheap to call."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def trace(
  run: Callable[..., Any], inputs: Sequence[tf.TensorSpec], jit: bool = False
) -> Any:
  """Trace a function of tensors, given by their specs."""
  function = tf.function(run, autograph=False, jit_compile=jit or None)
  return function.get_concrete_function(*inputs)


def quick(
  traced: Callable[..., Any], inputs: Sequence[tf.TensorSpec]
) -> Callable[..., Any]:
  """Make a traced function cheap to call.

  TensorFlow checks the arguments of a traced function, which takes longer than
  some rounds; a wrapped function is called directly.
  """
  return tf.compat.v1.wrap_function(lambda *flat: traced(*flat), inputs)
