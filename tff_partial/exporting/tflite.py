"""Conversion of a SavedModel to TFLite, with builtin operators only."""

from collections.abc import Iterable, Iterator
import contextlib
import os
import pathlib
import re
import shutil
import sys
import tempfile

import tensorflow as tf

from tff_partial.exporting import builtin_ops
from tff_partial.exporting.errors import ExportError
from tff_partial.model import tracing

# Remedies for operators with known causes.
_REMEDIES = {
  'BroadcastGradientArgs': 'It is the gradient of what has no known shape. '
  'Give inputs one length, and let batch normalization be global.',
  'StatelessRandomUniformFullIntV2': 'Each step draws, as for a dropout. '
  'Reconstruct without.',
  'TensorListReserve': 'Loops over time need sizes that are known: give '
  '`num_predicted`, the `batch_size` of phases and inputs of one length, and '
  'take the recurrent layers of Keras.',
  'StridedSliceGrad': 'It is the gradient of a slice such as `x[:, 0]`. Take '
  '`tf.gather`, or `tf.reshape`.',
  'Conv2DBackpropFilter': 'It trains a convolution. Let that be global.',
}


def convert(folder: pathlib.Path, signatures: Iterable[str]) -> bytes:
  """Convert a SavedModel.

  Args:
    folder: The SavedModel, which is not changed.
    signatures: Names of its signatures.

  Returns:
    The content of a TFLite file.

  Raises:
    ExportError: If TFLite lacks operators; the message names them.
  """
  with tempfile.TemporaryDirectory() as scratch:
    copy = pathlib.Path(scratch) / 'saved_model'
    shutil.copytree(folder, copy)
    builtin_ops.substitute(copy)
    converter = tf.lite.TFLiteConverter.from_saved_model(
      str(copy), signature_keys=list(signatures)
    )
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
    converter.experimental_enable_resource_variables = True
    try:
      with _silence():
        return bytes(converter.convert())
    except Exception as error:  # The converter raises whatever it met.
      raise _explained(error) from error


def _explained(error: Exception) -> ExportError:
  """Return an error that names the operators TFLite lacks, if known."""
  # An error may carry an operator without being about it.
  names = sorted(
    {
      found.operator.name.removeprefix('tf.')
      for found in getattr(error, 'errors', ())
      if found.operator.name
      and f"'{found.operator.name}'" in found.error_message
    }
  )
  otherwise = "Or leave it out: formats=('saved_model',)."
  precision = re.search(r'x(b?)f(16|64)>', str(error))
  if precision:
    return ExportError(
      f'tflite: layers compute in {precision[1]}float{precision[2]}, which '
      'TFLite does not train. Export what `from_keras` makes under the policy '
      f'float32 of the same weights. {otherwise}'
    )
  if not names:
    return ExportError(
      f'tflite: the model cannot be converted: {tracing.reason(error)} '
      f'{otherwise}'
    )
  remedies = [_REMEDIES[name] for name in names if name in _REMEDIES]
  remedies = remedies or ['Write that part of the model with others.']
  return ExportError(
    f'tflite: the model has the operations {", ".join(names)}, for which '
    f'TFLite has no builtin operators. {" ".join(remedies)} {otherwise}'
  )


@contextlib.contextmanager
def _silence() -> Iterator[None]:
  """Suppress what the converter's native code writes to stderr."""
  sys.stderr.flush()
  kept = os.dup(2)
  with open(os.devnull, 'wb') as nothing:
    os.dup2(nothing.fileno(), 2)
  try:
    yield
  finally:
    os.dup2(kept, 2)
    os.close(kept)
