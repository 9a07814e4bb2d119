"""TFF beside TensorFlows that it was not released for."""

import os
import subprocess
import sys
import types

import pytest
import tensorflow as tf

from tff_partial._environment import newer_tensorflow

later = pytest.mark.skipif(
  sys.version_info < (3, 12), reason='TFF is at home beside TensorFlow 2.14.'
)


def run(code: str, **variables: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, '-c', code],
    capture_output=True,
    text=True,
    env={'PATH': '/usr/bin:/bin', 'TF_CPP_MIN_LOG_LEVEL': '3', **variables},
    cwd=newer_tensorflow.__file__.rsplit('/', 3)[0],
  )


@pytest.fixture
def stood_in(monkeypatch):
  """Within an import, as beside TensorFlow 2.20, of this test's TensorFlow."""
  # Set again after the test: XLA ends a process that gives it unknown flags.
  monkeypatch.setenv('XLA_FLAGS', os.environ.get('XLA_FLAGS', ''))
  monkeypatch.setattr(newer_tensorflow, '_tensorflow_version', lambda: (2, 20))
  monkeypatch.setattr(newer_tensorflow, '_choose_keras_2', lambda version: None)
  real = types.ModuleType('jax')
  monkeypatch.setitem(sys.modules, 'jax', real)
  with newer_tensorflow.adapted():
    yield
  assert sys.modules['jax'] is real  # Whoever imports it has it.
  left = [type(module).__name__ for module in sys.modules.values()]
  assert '_StandIn' not in left


def test_stand_ins_have_every_name_and_refuse_to_be_used(stood_in):
  import jax
  from jax.lib import xla_client
  from vizier import pyvizier

  class Derived(pyvizier.Study):
    pass

  assert jax.tree_util.register_pytree_node_class(Derived) is Derived
  jax.tree_util.register_pytree_node(Derived, lambda x: x, lambda x: x)
  assert xla_client.dtype_to_etype.one is not None
  with pytest.raises(ImportError, match=r'jax\.jit belongs to .* needs JAX'):
    jax.jit(lambda x: x)
  with pytest.raises(ImportError, match='google-vizier'):
    Derived()


_THUNKS = '--xla_cpu_use_thunk_runtime'


@pytest.mark.parametrize(
  ('version', 'before', 'after'),
  [
    ((2, 20), '', f'{_THUNKS}=false'),
    ((2, 20), '--x=1', f'--x=1 {_THUNKS}=false'),
    ((2, 20), f'{_THUNKS}=true', f'{_THUNKS}=true'),
    ((2, 21), '', ''),  # Where it makes no difference.
  ],
)
def test_xla_runs_loops_as_it_did(version, before, after, monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', before)
  newer_tensorflow._choose_xla_runtime(version)
  assert os.environ['XLA_FLAGS'] == after


def test_noise_is_taken_out_and_nothing_else(capfd):
  noise = (
    'WARNING: All log messages before absl::InitializeLog() is called are ...\n'
    'E0000 00:00:1.1 7 cuda_dnn.cc:8579] Unable to register cuDNN factory\n'
    'W0000 00:00:1.1 7 computation_placer.cc:177] already registered\n'
  )
  with newer_tensorflow._without_noise():
    os.write(2, f'{noise}A warning of a library.\n'.encode())
  assert capfd.readouterr().err == 'A warning of a library.\n'
  with pytest.raises(ValueError, match='it fails'):
    with newer_tensorflow._without_noise():
      os.write(2, noise.encode())
      raise ValueError('it fails')
  assert capfd.readouterr().err == noise  # Perhaps it says why.


@later
def test_the_import_is_silent():
  done = run('import tff_partial')
  assert (done.returncode, done.stderr) == (0, '')


@pytest.mark.skipif(
  sys.version_info >= (3, 12), reason='There it does what it is for.'
)
def test_nothing_happens_beside_the_tensorflow_of_tff():
  finders = list(sys.meta_path)
  with newer_tensorflow.adapted():
    assert sys.meta_path == finders
  assert tf.keras.Model.__module__.startswith('keras.')


@later
def test_keras_3_in_use_is_told_what_to_do():
  done = run('import tensorflow as tf; tf.keras.Model; import tff_partial')
  assert done.returncode == 1
  said = done.stderr.replace('\n', ' ').replace('This', 'this')
  assert 'this program has used tf.keras, which is Keras' in said
  assert 'export TF_USE_LEGACY_KERAS=1' in done.stderr


@later
def test_a_failed_import_of_tff_does_no_harm():
  """As in a notebook, whose first cell imports TFF by itself."""
  done = run(
    'import tensorflow\n'
    'try:\n'
    '  import tensorflow_federated\n'
    'except ImportError as error:\n'
    '  print(error)\n'
    'import tff_partial\n'
    'import tensorflow_federated as tff\n'
    'print(tff.__version__, tensorflow.keras.Model.__module__)\n'
  )
  assert done.returncode == 0, done.stderr
  first, second = done.stdout.splitlines()
  assert 'tensorflow_estimator' in first
  assert second == '0.87.0 tf_keras.src.engine.training'


@later
def test_a_missing_tf_keras_is_named(monkeypatch):
  found_by = newer_tensorflow.importlib.util
  monkeypatch.setattr(found_by, 'find_spec', lambda name: None)
  with pytest.raises(ImportError, match=r"pip install --no-deps 'tf_keras~=2"):
    with newer_tensorflow.adapted():
      pass
