"""Imports TensorFlow Federated, or says what to type where that fails.

The package's `__init__` imports this module before any other, so that whoever
lacks TFF reads the advice below and not a traceback out of some module of ours.
"""

import warnings

_ADVICE = """\
tff_partial needs TensorFlow Federated 0.87, {problem}.

A plain `pip install tensorflow-federated` cannot work: version 0.87.0 pins
jaxlib==0.4.14, which was withdrawn, so the pin must be overridden. With Python
3.11 on Linux (x86-64), type one of these.

In a clone of tff_partial, for the tested environment in .venv:

    make env

In a clone of tff_partial, for the same packages in an environment of yours:

    pip install --no-deps --require-hashes -r requirements.txt

Anywhere, with uv:

    printf '%s\\n' jax==0.4.20 jaxlib==0.4.20 sqlalchemy==1.4.54 > overrides.txt
    uv pip install --override overrides.txt \\
        tensorflow-federated==0.87.0 'setuptools<81'
"""


def _explain(error: ImportError) -> str:
  """Says what is wrong with this environment's TFF, and the way out."""
  if error.name == 'tensorflow_federated':
    problem = 'which is not installed here'
  else:
    # Installed but broken, most often by a setuptools without pkg_resources or
    # by another jaxlib. The same commands repair it.
    problem = f'which is installed here but cannot be imported ({error})'
  return _ADVICE.format(problem=problem)


with warnings.catch_warnings():
  # TFF's dependencies still use pkg_resources, which its users cannot help.
  warnings.filterwarnings('ignore', message='pkg_resources is deprecated')
  try:
    import tensorflow_federated  # noqa: F401
  except ImportError as error:
    raise ImportError(_explain(error), name=error.name) from error
