"""Whether XLA compiles a loop: chosen by measuring, once, and remembered.

XLA makes some clients many times faster (embeddings, recurrent steps) and
others many times slower (convolutions on a CPU). The two differ in the last
bits, so the measured executions are thrown away: a run that measured equals,
bit for bit, a run that was told the same choice from the start.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import threading
import time
from typing import Any, Literal

from absl import logging
import tensorflow as tf

from tff_partial.runtimes import errors
from tff_partial.runtimes import stages

Jit = bool | Literal['auto']
# Measuring stops after so many executions, or so many seconds.
_REPEATS = 3
_BUDGET = 0.5


class Chooser:
  """Picks a compiled loop for a signature.

  Attributes:
    choices: What was chosen so far, from a stable signature to whether XLA
      compiles it; JSON can hold it.
  """

  def __init__(self, jit: Jit, choices: Mapping[str, bool] | None,
               strict: bool, threads: int):
    if jit not in ('auto', True, False):
      raise ValueError(
          f"Expected jit to be 'auto', True or False, found {jit!r}.")
    self._jit, self._strict, self._threads = jit, strict, threads
    self.choices: dict[str, bool] = dict(choices or {})
    self._lock = threading.Lock()
    self._ready: dict[Any, Callable[..., Any]] = {}

  def choose(self, name: str, loop: stages.ClientLoop,
             signature: stages.Signature,
             sample: Sequence[tf.Tensor]) -> Callable[..., Any]:
    """The compiled loop to use.

    Args:
      name: A name that is the same in every process.
      loop: The loop.
      signature: What it is compiled for.
      sample: Inputs with few clients, to measure on.
    """
    key = (id(loop), signature)
    function = self._ready.get(key)
    if function is None:
      # Only one thread compiles or measures at a time.
      with self._lock:
        function = self._ready.get(key)
        if function is None:
          jit = self._decide(name, loop, signature, sample)
          function = self._ready[key] = loop.compiled(signature, jit)
    return function

  def _decide(self, name: str, loop: stages.ClientLoop,
              signature: stages.Signature, sample) -> bool:
    if self._jit is False:
      return False
    if name in self.choices and self._jit == 'auto':
      return self.choices[name]
    try:
      jitted = loop.compiled(signature, True)
      jitted(*sample)
    except (tf.errors.OpError, ValueError, TypeError) as error:
      reason = str(error).split('\n')[0][:300]
      if self._jit is True and self._strict:
        raise errors.XlaRefusedError(reason) from error
      logging.warning('XLA refuses the loop %s (%s); it runs without.', name,
                      reason)
      self.choices[name] = False
      return False
    if self._jit is True:
      return True
    plain = loop.compiled(signature, False)
    plain(*sample)
    seconds = {True: self._seconds(jitted, sample),
               False: self._seconds(plain, sample)}
    choice = seconds[True] < seconds[False]
    logging.info(
        'The loop %s runs %s: %.2g s with XLA against %.2g s without.', name,
        'with XLA' if choice else 'without XLA', seconds[True],
        seconds[False])
    self.choices[name] = choice
    return choice

  def _seconds(self, function: Callable[..., Any], sample) -> float:
    """The least time that as many executions as there are threads take.

    All at once, since a plain kernel that has all cores to itself would look
    faster than it is in a round.
    """
    least, start = float('inf'), time.perf_counter()
    with futures.ThreadPoolExecutor(self._threads) as pool:
      for _ in range(_REPEATS):
        before = time.perf_counter()
        for results in pool.map(
            lambda _: function(*sample), range(self._threads)):
          # A device may answer before it is done.
          results[0].numpy()
        least = min(least, time.perf_counter() - before)
        if time.perf_counter() - start > _BUDGET:
          break
    return least
