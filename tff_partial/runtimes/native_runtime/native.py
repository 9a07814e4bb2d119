"""TFF's own C++ runtime, with control over the lifetime of its worker.

TFF runs a computation in a child process, `worker_binary`. Started by TFF, that
child outlives Python and keeps its standard output open, so that
`python train.py | tail -1` never ends; and it keeps the values of every cohort
size it has seen, so that its memory grows for as long as the sizes vary. Here
TFF's contexts, compiler and executors use a child that we start:

*   The kernel itself kills the worker when this process ends, however it ends
    (Linux's parent death signal). So no signal handler is touched, exit
    statuses are unchanged, and SIGKILL leaves nothing behind either.
*   Leaving the `with`, or dropping the runtime, ends its worker at once.
*   Ctrl-C reaches only Python, and stops the running computation.
*   The same holds outside any `with`: TFF's own default runtime, whose worker
    survives a program that is killed, is replaced on import.
*   The worker's memory for a cohort size is freed when the size is not in use.

```python
with native():
  state = process.initialize()

native().set_default()  # In a notebook.

with native(asynchronous=True) as context:  # For TFF's own programs.
  federated = tff.program.NativeFederatedContext(context)
  with tff.framework.get_context_stack().install(federated):
    asyncio.run(tff.learning.programs.train_model(...))
```

Values placed at clients may be any `Sequence`, for instance one that reads
clients on access; TFF itself takes only lists and tuples.
"""

import asyncio
from collections.abc import Callable, Sequence
import contextlib
from typing import Any, Self
import weakref

import tensorflow_federated as tff

from tff_partial.runtimes.native_runtime import worker
from tff_partial.runtimes.values import typed_values


def _with_lists(value: Any, type_spec: tff.Type | None) -> object:
  """Turn sequences of clients' values into the lists that TFF requires."""
  if isinstance(type_spec, tff.FederatedType):
    is_other_sequence = isinstance(value, Sequence) and not isinstance(
      value, (list, tuple, str, bytes)
    )
    if is_other_sequence and typed_values.is_at_clients(type_spec):
      return list(value)
    return value
  if not isinstance(type_spec, tff.StructType):
    return value
  try:
    elements = tff.structure.from_container(value)
  except TypeError:  # One of TFF's own values, or one it will refuse.
    return value
  if len(elements) != len(type_spec):
    return value  # TFF raises the error.
  converted = [
    (name, _with_lists(element, element_type))
    for (name, element), (_, element_type) in zip(
      tff.structure.iter_elements(elements),
      tff.structure.iter_elements(type_spec),
      strict=True,
    )
  ]
  if all(new is old for (_, new), old in zip(converted, elements, strict=True)):
    return value  # In its original container.
  return tff.structure.Struct(converted)


class _NativeContext:
  """Base of both kinds of runtime: a worker, and a place on TFF's stack."""

  def __init__(
    self,
    compiler: Callable[[tff.Computation], object] = (
      tff.backends.native.desugar_and_transform_to_native
    ),
  ):
    self._worker = worker.Worker()
    super().__init__(  # type: ignore[call-arg]  # In the other base.
      executor_fn=self._worker,
      compiler_fn=compiler,
      transform_args=tff.tensorflow.transform_args,
      transform_result=tff.tensorflow.transform_result,
    )
    self._places: list[contextlib.AbstractContextManager] = []
    # Also runs when Python ends.
    weakref.finalize(self, self._worker.close)

  def __enter__(self) -> Self:
    place = tff.framework.get_context_stack().install(self)
    place.__enter__()
    self._places.append(place)
    self._worker.open = True
    return self

  def __exit__(self, *error: Any) -> None:
    try:
      self._places.pop().__exit__(*error)
    finally:
      if not self._places:
        self.close()

  def close(self) -> None:
    """End the worker, as leaving the last `with` does."""
    self._worker.close()

  def set_default(self) -> None:
    """Make this the default context of this thread, outside any `with`."""
    tff.framework.set_default_context(self)
    self._places.append(contextlib.nullcontext())  # No `with` closes it now.
    self._worker.open = True

  def _prepare(self, computation: tff.Computation, argument: object) -> object:
    if not self._worker.is_ours:
      raise worker.NativeRuntimeError(
        'A native runtime cannot be used in a fork of the process that made '
        'it: make one in the new process.'
      )
    worker.noted_failures.set([])
    return _with_lists(argument, computation.type_signature.parameter)


class NativeRuntime(_NativeContext, tff.framework.SyncExecutionContext):
  """Runtime that runs a computation when called and returns its result."""

  def invoke(self, comp: tff.Computation, arg: object) -> object:
    """Run `comp`; an interrupt ends it and the worker."""
    arg = self._prepare(comp, arg)
    try:
      return super().invoke(comp, arg)
    except (KeyboardInterrupt, SystemExit) as interrupt:
      # The computation is in another thread, which would otherwise retry.
      worker.noted_failures.get().extend([interrupt] * worker.ATTEMPTS)
      self._worker.end()
      raise


class AsyncNativeRuntime(_NativeContext, tff.framework.AsyncExecutionContext):
  """Runtime that runs a computation when awaited."""

  async def invoke(self, comp: tff.Computation, arg: object) -> object:
    """Run `comp` on `arg`, or on its result if it is a coroutine."""
    if asyncio.iscoroutine(arg):
      arg = await arg
    return await super().invoke(comp, self._prepare(comp, arg))


def native(*, asynchronous: bool = False) -> NativeRuntime | AsyncNativeRuntime:
  """Create a TFF native runtime whose worker never outlives its use.

  Keep one for a whole run: each compiles its own computations, and its worker
  starts with the first.

  Args:
    asynchronous: Whether computations are awaited, as TFF's programs and
      `tff.program.NativeFederatedContext` require, instead of called.

  Returns:
    A context for `with`, or for its method `set_default`.
  """
  if asynchronous:
    return AsyncNativeRuntime()
  return NativeRuntime()


def replace_stock_default() -> NativeRuntime | None:
  """Make a native runtime the default in place of TFF's own.

  TFF sets its own on import: the same compiler and executors around a worker
  that outlives a killed program. A default of another kind stays, such as an
  asynchronous one.

  Returns:
    The new default, if there is one.
  """
  current = tff.framework.get_context_stack().current
  if type(current) is not tff.framework.SyncExecutionContext:
    return None
  runtime = NativeRuntime()
  runtime.set_default()
  return runtime
