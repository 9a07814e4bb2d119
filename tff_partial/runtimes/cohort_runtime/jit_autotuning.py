"""Choice of XLA for each loop, measured once and then kept.

XLA makes some clients many times faster (embeddings, recurrent steps) and
others many times slower (convolutions on a CPU). The two differ in the last
bits, so the results of measured executions, each of one client, are discarded:
a run that measured equals, bit for bit, a run given the same choice from the
start.

On a CPU, XLA wins for convolutions only where they are so small that starting
a kernel takes longer than running it. A client that convolves, and takes long
without XLA, is not tried with it, since that may take as long as many rounds.

There is one choice for each loop of a computation, measured on the first shapes
that it meets and used for all others. So a choice in a checkpoint, made on some
clients, applies to all: an evaluation of test users has the same bits whether
or not the run was interrupted before it.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import functools
import re
import threading
import time
from typing import Literal, TypeAlias

from absl import logging
import tensorflow as tf

from tff_partial.runtimes import errors
from tff_partial.runtimes.cohort_runtime import client_loop
from tff_partial.runtimes.cohort_runtime import compiled_loop
from tff_partial.runtimes.cohort_runtime import loop_inputs

Jit: TypeAlias = bool | Literal['auto']
# Runs a loop over clients: from `loop_inputs.Inputs.flat` to its results.
Run: TypeAlias = Callable[[Sequence[tf.Tensor]], compiled_loop.Results]

# Measuring stops after this many executions, or this many seconds.
_REPEATS = 3
_BUDGET = 0.5
# XLA is chosen unless TensorFlow's own kernels take less than this share of its
# time, so that the choice is the same every time where it hardly matters.
_SHARE = 0.8
# A client that convolves on a CPU is tried with XLA only if it takes at most
# this many seconds without; XLA may take thirty times as long.
_LONG = 0.01
_CONVOLUTION = re.compile(r'Conv\dD', re.IGNORECASE)


class Chooser:
  """Compiler of loops, with or without XLA.

  Attributes:
    choices: The choices so far, from a loop's name, which is the same in every
      process, to whether XLA compiles it; JSON can hold it.
    num_compiled: Number of loops compiled so far.
  """

  def __init__(
    self,
    jit: Jit,
    choices: Mapping[str, bool] | None,
    strict: bool,
    threads: int,
  ):
    if jit not in ('auto', True, False):
      raise ValueError(
        f"Expected jit to be 'auto', True or False, found {jit!r}."
      )
    self._jit: Jit = jit if jit == 'auto' else bool(jit)  # 0 and 1 are equal.
    self._strict, self._threads = strict, threads
    self.choices: dict[str, bool] = dict(choices or {})
    self._lock = threading.Lock()
    self.num_compiled = 0
    self._runs: dict[
      tuple[client_loop.ClientLoop, loop_inputs.Signature], Run
    ] = {}

  def forget(self, loops: Sequence[client_loop.ClientLoop]) -> None:
    """Drop the compiled forms of loops; they are compiled again if needed."""
    with self._lock:
      for key in [key for key in self._runs if key[0] in loops]:
        del self._runs[key]

  def is_undecided(self, name: str) -> bool:
    """Check whether a loop has yet to be measured."""
    return self._jit == 'auto' and name not in self.choices

  def compiled(
    self,
    name: str,
    loop: client_loop.ClientLoop,
    signature: loop_inputs.Signature,
    sample: Callable[[], Sequence[tf.Tensor]],
  ) -> Run:
    """Compile a loop; `sample` makes inputs of one client, to measure on."""
    key = (loop, signature)
    run = self._runs.get(key)
    if run is None:
      # Only one thread compiles or measures at a time.
      with self._lock:
        run = self._runs.get(key)
        if run is None:
          compiled = compiled_loop.CompiledLoop(loop, signature)
          jit = self._choose(name, loop, compiled, sample)
          run = self._runs[key] = functools.partial(compiled, jit=jit)
          self.num_compiled += 1
          logging.info(
            'Program %d of this context: a loop over up to %d clients of %s, '
            '%s XLA.',
            self.num_compiled,
            signature.bucket,
            signature,
            'with' if jit else 'without',
          )
    return run

  def _choose(
    self,
    name: str,
    loop: client_loop.ClientLoop,
    compiled: compiled_loop.CompiledLoop,
    make_sample: Callable[[], Sequence[tf.Tensor]],
  ) -> bool:
    """Choose whether XLA compiles a loop; results of trial runs are dropped."""
    wanted = self._jit
    if wanted == 'auto':
      wanted = self.choices.get(name, 'auto')
    is_for_xla = all(leaf.is_for_xla for leaf in loop.leaves)
    if wanted is False or (
      wanted == 'auto' and (loop.reads_sequences or not is_for_xla)
    ):
      self.choices[name] = False
      return False
    sample = make_sample()
    if wanted == 'auto' and _convolves_on_cpu(loop):
      compiled.run(sample, jit=False)  # The first call takes longer.
      seconds = self._seconds(
        functools.partial(compiled.run, sample, jit=False)
      )
      if seconds > _LONG:
        self.choices[name] = False
        logging.info(
          'The loop %s runs without XLA, which was not tried: its clients '
          'convolve, and one takes %.2g s.',
          name,
          seconds,
        )
        return False
    try:
      compiled.run(sample, jit=True)  # The first call compiles.
    except (tf.errors.OpError, ValueError, TypeError) as error:
      compiled.run(sample, jit=False)  # Does it fail without XLA, too?
      if self._jit is True and self._strict:
        raise errors.CohortRuntimeError(
          'Expected a loop over the cohort that XLA compiles (jit=True), found '
          f'that it refuses: {errors.telling_line(error)}; use '
          "jit='auto' or jit=False."
        ) from error
      logging.warning(
        'XLA refuses the loop %s, which runs without it: %s',
        name,
        errors.telling_line(error),
      )
      # It may have compiled the loop for other shapes.
      self.choices.setdefault(name, False)
      return False
    if wanted is True:
      self.choices[name] = True
      return True
    compiled.run(sample, jit=False)
    with_xla = self._seconds(functools.partial(compiled.run, sample, jit=True))
    without = self._seconds(functools.partial(compiled.run, sample, jit=False))
    self.choices[name] = without >= _SHARE * with_xla
    logging.info(
      'The loop %s runs %s XLA: a client takes %.2g s with it, %.2g s without.',
      name,
      'with' if self.choices[name] else 'without',
      with_xla,
      without,
    )
    return self.choices[name]

  def _seconds(
    self, run: Callable[[], tuple[tf.Tensor, compiled_loop.Results]]
  ) -> float:
    """Measure the least time of parallel executions, one per thread.

    They run at once, since a plain kernel that has all cores to itself would
    look faster than it is in a round.
    """
    least, start = float('inf'), time.perf_counter()
    with futures.ThreadPoolExecutor(self._threads) as pool:
      for _ in range(_REPEATS):
        before = time.perf_counter()
        runs = [pool.submit(run) for _ in range(self._threads)]
        for is_doubtful, _ in [one.result() for one in runs]:
          is_doubtful.numpy()  # A device may answer before it is done.
        least = min(least, time.perf_counter() - before)
        if time.perf_counter() - start > _BUDGET:
          break
    return least


def _convolves_on_cpu(loop: client_loop.ClientLoop) -> bool:
  """Check whether clients convolve without a GPU."""
  return not tf.config.list_physical_devices('GPU') and any(
    _CONVOLUTION.search(op) for leaf in loop.leaves for op in leaf.op_types
  )
