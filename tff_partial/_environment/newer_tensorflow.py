"""Support for importing TFF 0.87 with TensorFlow 2.16 and later.

TFF 0.87 was released for Python up to 3.11 and TensorFlow 2.14. Later
TensorFlows still have what it computes with. Two obstacles prevent its import:

* `tf.keras` means Keras 3 from TensorFlow 2.16 on. TFF is written for Keras 2,
  which is now the package tf_keras and which TensorFlow uses if the environment
  has `TF_USE_LEGACY_KERAS=1`. This module sets it permanently.
* TFF and TensorFlow Privacy import packages for parts that this library does
  not use, and no version of these packages works with these TensorFlows (see
  `_ABSENT`). They are replaced by stand-ins only while TFF is imported: a
  program that imports JAX gets JAX.

The module also selects XLA's older CPU runtime: the newer one, which uses
thunks, takes twice as long for a round of small clients.

While imported, these TensorFlows write lines to stderr that no setting
silences; `_without_noise` removes them.

With TensorFlow 2.14 this module does nothing.
"""

import abc
from collections.abc import Iterator, Sequence
import contextlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import sys
import tempfile
import types
from typing import Any

# Top-level packages, and why they are imported.
_ABSENT = {
  # By TFF, for `tff.jax_computation`, with a name that JAX removed.
  'jax': 'JAX 0.4.14, for tff.jax_computation',
  # By TFF, for programs that tune with Vizier; none of its versions works with
  # protobuf 5.
  'vizier': 'google-vizier 0.1.11, for programs of Vizier',
}
# Packages that are replaced only if they are not installed.
_ABSENT_IF_MISSING = {
  # By TensorFlow Privacy, for estimators, which TensorFlow removed in 2.16.
  'tensorflow_estimator': 'tensorflow-estimator, for private estimators',
  # By TFF, for encoded aggregators. Colab, for example, lacks it.
  'tensorflow_model_optimization': (
    'tensorflow-model-optimization 0.8.0, for encoded aggregators '
    '(pip install --no-deps tensorflow-model-optimization==0.8.0)'
  ),
}

_THUNKS = 'xla_cpu_use_thunk_runtime'

_KERAS_3 = """\
tff_partial and TensorFlow Federated are written for Keras 2, which TensorFlow
takes from the package tf_keras. This program has used tf.keras, which is Keras
{version}, before it imported tff_partial. Do one of these, and start anew (in a
notebook: restart the kernel):

    import tff_partial   # before tf.keras is used

or, before Python starts,

    export TF_USE_LEGACY_KERAS=1

A model of Keras 3 goes to tff_partial.from_keras as it is: `import keras` gives
Keras 3 in the same program."""

_NO_TF_KERAS = """\
tff_partial needs the package tf_keras, Keras 2, beside TensorFlow {version}:

    pip install --no-deps 'tf_keras~={minor}.0'"""


def _tensorflow_version() -> tuple[int, int] | None:
  """Return the version of the installed TensorFlow, without importing it."""
  for name in ('tensorflow', 'tensorflow-cpu', 'tf-nightly'):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      major, minor = importlib.metadata.version(name).split('.')[:2]
      return int(major), int(minor)
  return None


def _choose_keras_2(version: tuple[int, int]) -> None:
  """Make `tf.keras` mean Keras 2, or raise an error that says why not."""
  if importlib.util.find_spec('tf_keras') is None:
    minor = '.'.join(map(str, version))
    raise ImportError(
      _NO_TF_KERAS.format(version=minor, minor=minor), name='tf_keras'
    )
  if os.environ.get('TF_USE_LEGACY_KERAS') not in ('1', 'true', 'True'):
    # TensorFlow reads it when tf.keras is first used.
    os.environ['TF_USE_LEGACY_KERAS'] = '1'
  if 'tensorflow' in sys.modules:
    keras = sys.modules['tensorflow'].keras
    if not keras.Model.__module__.startswith('tf_keras.'):
      raise ImportError(_KERAS_3.format(version=keras.__version__))


def _choose_xla_runtime(version: tuple[int, int]) -> None:
  """Choose the faster of XLA's CPU runtimes if there are two.

  XLA reads the flag when it first compiles. A choice already made is kept.
  """
  flags = os.environ.get('XLA_FLAGS', '')
  if version < (2, 21) and _THUNKS not in flags:
    os.environ['XLA_FLAGS'] = f'{flags} --{_THUNKS}=false'.strip()


class _AbsentClass(abc.ABCMeta):
  """Metaclass of stand-ins that have any attribute and raise when called."""

  def __getattr__(cls, name: str) -> Any:
    return _absent(f'{cls.__module__}.{cls.__name__}', name)

  def __call__(cls, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[0], type):
      return args[0]  # The import uses it to register or decorate a class.
    absent = _ABSENT | _ABSENT_IF_MISSING
    # TFF may derive a class from it.
    base = next(x for x in cls.__mro__ if x.__module__.split('.')[0] in absent)
    raise ImportError(
      f'{base.__module__}.{base.__name__} belongs to a part of TensorFlow '
      f'Federated that needs {absent[base.__module__.split(".")[0]]}, which is '
      'not there with this TensorFlow.'
    )


def _absent(module: str, name: str) -> _AbsentClass:
  """Return a stand-in for an attribute of an absent module."""
  if name.startswith('__'):
    raise AttributeError(name)
  # A class, since some are base classes and some are in annotations.
  return _AbsentClass(name, (), {'__module__': module})


class _StandIn(types.ModuleType):
  """A module that has any attribute."""

  def __getattr__(self, name: str) -> Any:
    return _absent(self.__name__, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Finder of stand-ins for all modules of some top-level packages."""

  def __init__(self, packages: frozenset[str]):
    self._packages = packages

  def find_spec(
    self,
    fullname: str,
    path: Sequence[str] | None,
    target: types.ModuleType | None = None,
  ) -> importlib.machinery.ModuleSpec | None:
    del path, target
    if fullname.split('.')[0] not in self._packages:
      return None
    return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

  def create_module(self, spec: importlib.machinery.ModuleSpec) -> _StandIn:
    return _StandIn(spec.name)

  def exec_module(self, module: types.ModuleType) -> None:
    del module  # It already has any attribute.


def _of(packages: frozenset[str]) -> list[str]:
  """Return the names of the packages' imported modules."""
  return [name for name in sys.modules if name.split('.')[0] in packages]


# Messages of TensorFlow about absent GPUs and its own parts, from before its
# log has a level.
_NOISE = re.compile(
  rb'WARNING: All log messages before absl::InitializeLog\(\)'
  rb'|[IWE]\d{4} .*(cuda|computation_placer\.cc|port\.cc|cpu_feature_guard\.cc)'
)


def _flush() -> None:
  if sys.stderr is not None:
    sys.stderr.flush()


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
  """Delay all writes to stderr, and drop its noise.

  TensorFlow bypasses Python's stderr. If the import fails, nothing is lost.
  """
  try:
    kept = os.dup(2)
  except OSError:  # There is no stderr.
    yield
    return
  with tempfile.TemporaryFile() as held:
    _flush()
    os.dup2(held.fileno(), 2)
    failed = True
    try:
      yield
      failed = False
    finally:
      _flush()
      os.dup2(kept, 2)
      os.close(kept)
      held.seek(0)
      for line in held:
        if failed or not _NOISE.match(line):
          os.write(2, line)


@contextlib.contextmanager
def adapted() -> Iterator[None]:
  """Adapt the imports inside to TensorFlow 2.16 or later, if installed.

  Raises:
    ImportError: If `tf.keras` is Keras 3 already, or there is no tf_keras.
  """
  version = _tensorflow_version()
  if version is None or version < (2, 16):
    yield
    return
  _choose_keras_2(version)
  _choose_xla_runtime(version)
  packages = frozenset(_ABSENT) | frozenset(
    name
    for name in _ABSENT_IF_MISSING
    if importlib.util.find_spec(name) is None
  )
  if 'tensorflow_federated' not in sys.modules:
    # An earlier import of it failed halfway.
    for name in _of(frozenset({'tensorflow_federated'})):
      del sys.modules[name]
  real = {name: sys.modules.pop(name) for name in _of(packages)}
  finder = _Finder(packages)
  sys.meta_path.insert(0, finder)
  try:
    # Any other level shows TensorFlow's messages by choice.
    is_quiet = os.environ.get('TF_CPP_MIN_LOG_LEVEL') == '3'
    with _without_noise() if is_quiet else contextlib.nullcontext():
      yield
  finally:
    sys.meta_path.remove(finder)
    for name in _of(packages):
      del sys.modules[name]
    sys.modules.update(real)
