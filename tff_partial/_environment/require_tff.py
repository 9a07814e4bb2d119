"""Import of TensorFlow Federated, with advice on how to install it.

Also warns if a package installed with it breaks TensorFlow's checkpoints.

The package imports this module before TensorFlow (see `lazily`), so that users
without TFF see the advice below and not a traceback from one of our modules.
"""

from collections.abc import Callable, Iterator
import contextlib
import importlib.metadata
import sys
import warnings

from tff_partial._environment import newer_tensorflow

_ADVICE = """\
tff_partial needs TensorFlow Federated 0.87, {problem}.

A plain `pip install tensorflow-federated` cannot work: {reason}.
{where}, type one of these.

In a clone of tff_partial, for the tested environment in .venv:

    make env

In a clone of tff_partial, for the same packages in an environment of yours:

    pip install {options} -r {lock}

"""
_ON_3_11 = """\
Anywhere, with uv:

    printf '%s\\n' jax==0.4.20 jaxlib==0.4.20 sqlalchemy==1.4.54 > overrides.txt
    uv pip install --override overrides.txt \\
        tensorflow-federated==0.87.0 'setuptools<81'
"""
_LATER = """\
Where TensorFlow is installed already, as in Google Colab:

    pip install --no-deps --ignore-requires-python \\
        tensorflow-federated==0.87.0 tensorflow-privacy==0.9.0 \\
        dp-accounting==0.4.3 portpicker 'setuptools<81'
"""


def _explain(error: ImportError) -> str:
  """Return a description of this environment's TFF problem, and its fixes."""
  if error.name == 'tensorflow_federated':
    problem = 'which is not installed here'
  else:
    # Installed but broken, usually by a setuptools without pkg_resources or by
    # another jaxlib. The same commands fix it.
    problem = f'which is installed here but cannot be imported ({error})'
  if sys.version_info < (3, 12):
    return (
      _ADVICE.format(
        problem=problem,
        reason='version 0.87.0 pins\njaxlib==0.4.14, which was withdrawn, so '
        'the pin must be overridden',
        where='With Python\n3.11 on Linux (x86-64)',
        options='--no-deps --require-hashes',
        lock='requirements/base-3.11.txt',
      )
      + _ON_3_11
    )
  python = f'{sys.version_info.major}.{sys.version_info.minor}'
  return (
    _ADVICE.format(
      problem=problem,
      reason='it finds 0.1.0, the last\nversion that did not say which Pythons '
      'it is for',
      where='With Python 3.12 or 3.13 on Linux (x86-64)',
      options='--no-deps --require-hashes --ignore-requires-python',
      lock=f'requirements/base-{python}.txt',
    )
    + _LATER
  )


def problem_of_checkpoints() -> str | None:
  """Return why TensorFlow cannot write checkpoints here, and a fix, or None.

  From 4.6 on, typing-extensions inspects objects in a way that fails for the
  wrapped dictionaries of TensorFlow 2.14, with any version of wrapt. This
  function tries it on a similar object.
  """
  try:
    import typing_extensions
    import wrapt
  except ImportError:
    return None

  @typing_extensions.runtime_checkable
  class Anything(typing_extensions.Protocol):
    def nobody_has_this(self) -> None:
      """Exist only to be looked up."""

  class Ours:
    pass

  class Wrapped(Ours, wrapt.ObjectProxy):
    pass

  try:
    isinstance(Wrapped({}), Anything)
  except TypeError:
    version = importlib.metadata.version('typing-extensions')
    return (
      f'With the typing-extensions {version} that is installed here, '
      'TensorFlow 2.14 cannot write checkpoints. Pin it, and whatever asks for '
      'a newer one (ipython does from 8.23 on): '
      "pip install 'typing-extensions<4.6' 'ipython<8.23'. In a clone, "
      '`make notebook` starts a JupyterLab that goes with it.'
    )
  return None


@contextlib.contextmanager
def _delayed_callbacks() -> Iterator[None]:
  """Delay what TensorFlow has absl call once flags are parsed.

  In a program that has parsed its flags, absl would call it at once, when
  TensorFlow is half imported.
  """
  app = sys.modules.get('absl.app')
  if app is None:
    yield  # No flags were parsed.
    return
  call, callbacks = app.call_after_init, list[Callable[[], None]]()
  app.call_after_init = callbacks.append  # type: ignore[attr-defined]
  try:
    yield
  finally:
    app.call_after_init = call  # type: ignore[attr-defined]
  for callback in callbacks:
    call(callback)


with warnings.catch_warnings():
  # TFF's dependencies still use pkg_resources; users cannot change that.
  warnings.filterwarnings('ignore', message='pkg_resources is deprecated')
  try:
    with _delayed_callbacks(), newer_tensorflow.adapted():
      import tensorflow_federated  # noqa: F401
  except ImportError as error:
    raise ImportError(_explain(error), name=error.name) from error

if _problem := problem_of_checkpoints():
  warnings.warn(_problem, stacklevel=2)
