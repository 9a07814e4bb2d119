"""Whether XLA compiles a loop: chosen by measuring, once, and remembered.

XLA makes some clients many times faster (embeddings, recurrent steps) and
others many times slower (convolutions on a CPU). The two differ in the last
bits, so the measured executions are thrown away: a run that measured equals,
bit for bit, a run that was told the same choice from the start.
"""

from collections.abc import Mapping, Sequence
from concurrent import futures
import threading
import time
from typing import Literal, TypeAlias

from absl import logging
import tensorflow as tf

from tff_partial.runtimes import client_loop
from tff_partial.runtimes import compiled_loop
from tff_partial.runtimes import errors

Jit: TypeAlias = bool | Literal['auto']

# Measuring stops after so many executions, or so many seconds.
_REPEATS = 3
_BUDGET = 0.5


class Chooser:
  """Compiles loops, with or without XLA.

  Attributes:
    choices: What was chosen so far, from a name that is the same in every
      process to whether XLA compiles the loop; JSON can hold it.
  """

  def __init__(self, jit: Jit, choices: Mapping[str, bool] | None,
               strict: bool, threads: int):
    if jit not in ('auto', True, False):
      raise ValueError(
          f"Expected jit to be 'auto', True or False, found {jit!r}.")
    self._jit, self._strict, self._threads = jit, strict, threads
    self.choices: dict[str, bool] = dict(choices or {})
    self._lock = threading.Lock()
    self._loops: dict[tuple[client_loop.ClientLoop, compiled_loop.Signature],
                      compiled_loop.CompiledLoop] = {}
    self.num_compiled = 0

  def compiled(self, name: str, loop: client_loop.ClientLoop,
               signature: compiled_loop.Signature,
               sample: Sequence[tf.Tensor]) -> compiled_loop.CompiledLoop:
    """The program to run a loop with.

    Args:
      name: A name of program and shapes that is the same in every process.
      loop: The loop.
      signature: The exact shapes.
      sample: Inputs with a single client, to measure on.
    """
    key = (loop, signature)
    if key not in self._loops:
      # Only one thread compiles or measures at a time.
      with self._lock:
        if key not in self._loops:
          self._loops[key] = self._choose(name, loop, signature, sample)
    return self._loops[key]

  def _choose(self, name: str, loop: client_loop.ClientLoop,
              signature: compiled_loop.Signature,
              sample: Sequence[tf.Tensor]) -> compiled_loop.CompiledLoop:
    wanted = self._jit
    if wanted == 'auto':
      wanted = self.choices.get(name, 'auto')
    if wanted is False:
      return self._compile(loop, signature, False)
    try:
      jitted = self._compile(loop, signature, True)
      jitted(sample)  # XLA compiles when it is first called.
    except (tf.errors.OpError, ValueError, TypeError) as error:
      if self._jit is True and self._strict:
        raise errors.XlaRefusedError(_reason(error)) from error
      plain = self._compile(loop, signature, False)
      plain(sample)  # A failure of the client itself is not XLA's.
      logging.warning('XLA refuses the loop %s, which runs without it: %s',
                      name, _reason(error))
      self.choices[name] = False
      return plain
    if wanted is True:
      self.choices[name] = True
      return jitted
    plain = self._compile(loop, signature, False)
    plain(sample)
    with_xla, without = self._seconds(jitted, sample), self._seconds(
        plain, sample)
    self.choices[name] = with_xla < without
    logging.info(
        'The loop %s runs %s XLA: %.2g s a client with it, %.2g s without.',
        name, 'with' if self.choices[name] else 'without', with_xla, without)
    return jitted if self.choices[name] else plain

  def _compile(self, loop: client_loop.ClientLoop,
               signature: compiled_loop.Signature,
               jit: bool) -> compiled_loop.CompiledLoop:
    self.num_compiled += 1
    logging.info(
        'Program %d: a loop over up to %d clients of %s, %s XLA.',
        self.num_compiled, signature.bucket, signature,
        'with' if jit else 'without')
    return compiled_loop.CompiledLoop(loop, signature, jit)

  def _seconds(self, compiled: compiled_loop.CompiledLoop,
               sample: Sequence[tf.Tensor]) -> float:
    """The least time that as many executions as there are threads take.

    All at once, since a plain kernel that has all cores to itself would look
    faster than it is in a round.
    """
    least, start = float('inf'), time.perf_counter()
    with futures.ThreadPoolExecutor(self._threads) as pool:
      for _ in range(_REPEATS):
        before = time.perf_counter()
        for results in pool.map(
            lambda _: compiled(sample), range(self._threads)):
          results[0].numpy()  # A device may answer before it is done.
        least = min(least, time.perf_counter() - before)
        if time.perf_counter() - start > _BUDGET:
          break
    return least


def _reason(error: Exception) -> str:
  """The line of TensorFlow's message that says what the matter is."""
  lines = [line.strip() for line in str(error).split('\n') if line.strip()]
  telling = [line for line in lines if not line.startswith((
      'Graph execution error', 'Detected at node', 'File ', 'Traceback'))]
  return (telling or lines or [type(error).__name__])[0][:300]
