"""Computations drawn at random give the same under every runtime."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import random_computations
from tff_partial import runtimes

# XLA or not, and how many threads; in turn, since compiling takes long.
_SETTINGS = [[(False, 1), (True, 2)], [(False, 2), ('auto', 1)]]
_MANY = 304
# Of them, by seed, whether they fail: the last two divide by zero and the like.
_FEW = {0: False, 1: False, 3: False, 18: True, 49: True}


@pytest.fixture(scope='module')
def contexts():
  """The runtimes, the native one first."""
  return {
    'native': runtimes.native(),
    **{
      (jit, threads): runtimes.cohort(jit, threads=threads)
      for settings in _SETTINGS
      for jit, threads in settings
    },
  }


def _outcome(context: Any, drawn: random_computations.Drawn) -> Any:
  """What comes out, flat; None if it fails."""
  with context:
    try:
      result = drawn.computation(drawn.arguments)
    except Exception:  # Whatever it is called: kernels, TFF and gRPC differ.
      return None
  return tf.nest.flatten(list(map(_listed, result)))


def _listed(value: Any) -> Any:
  return list(value) if isinstance(value, list) else value


def _assert_alike(found: list[Any], expected: list[Any], where: str) -> None:
  assert len(found) == len(expected), where
  for one, other in zip(found, expected, strict=True):
    one, other = np.asarray(one), np.asarray(other)
    assert one.shape == other.shape and one.dtype.kind == other.dtype.kind
    if other.dtype.kind == 'f':
      np.testing.assert_allclose(
        one, other, rtol=1e-4, atol=1e-4, err_msg=where
      )
    else:
      np.testing.assert_array_equal(one, other, where)


def _check(seed: int, contexts: Any) -> bool:
  """Compares the runtimes; returns whether the computation fails."""
  drawn = random_computations.draw(seed)
  expected = _outcome(contexts['native'], drawn)
  if expected is None and not drawn.size:
    return True  # The native runtime refuses some cohorts of nobody.
  for setting in _SETTINGS[seed % len(_SETTINGS)]:
    where = f'seed {seed}, jit and threads {setting}, {drawn.size} clients'
    found = _outcome(contexts[setting], drawn)
    assert (found is None) == (expected is None), where
    if expected is not None:
      _assert_alike(found, expected, where)
  return expected is None


@pytest.mark.slow
def test_a_few_computations(contexts):
  for seed, fails in _FEW.items():
    assert _check(seed, contexts) == fails


@pytest.mark.slow
@pytest.mark.parametrize('start', range(4, _MANY, 50))
def test_many_computations(start, contexts):
  for seed in range(start, start + 50):
    _check(seed, contexts)


def test_a_seed_draws_the_same_computation():
  one, other = (random_computations.draw(5) for _ in range(2))
  assert one.computation.type_signature == other.computation.type_signature
  assert one.size == other.size
  assert str(one.arguments) == str(other.arguments)
