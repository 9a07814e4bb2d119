"""Keras models of a few layers one after another, said in a line."""

from collections.abc import Callable
import functools
from typing import Any

import tensorflow as tf


def stack(width: int, *inner: Callable[[], Any]) -> Callable[[], Any]:
  """A callable for a model of layers, which it makes each time."""
  return lambda: tf.keras.Sequential(
    [tf.keras.Input([width]), *(make() for make in inner)]
  )


def dense(units: int, *given: Any, **options: Any) -> Callable[[], Any]:
  """A callable for a dense layer."""
  return functools.partial(tf.keras.layers.Dense, units, *given, **options)


def linear(
  first: Any = 'glorot_uniform', units: int = 1, **options: Any
) -> Callable[[], Any]:
  """A callable for one without biases, whose kernel begins as is said."""
  return dense(units, use_bias=False, kernel_initializer=first, **options)
