"""Files for devices that look inputs up themselves, as TFLite cannot.

`lookups.json` says for each such input of the model what layer it passed
through in the simulation, with the layer's settings. The vocabulary is in a
text file: line k, from 0, is the value with the id k.
"""

from collections.abc import Mapping
import json
import pathlib
from typing import Any

from tff_partial.exporting import serving
from tff_partial.exporting.errors import ExportError
from tff_partial.model import preprocessing

FILE = 'lookups.json'


def tables(lifted: Mapping[str, preprocessing.Lifted]) -> dict[str, list[str]]:
  """Return the lines of each input's vocabulary, if its layer has one.

  Raises:
    ExportError: If a value has a line break.
  """
  found = {}
  for path, layer in lifted.items():
    lines = [str(value) for value in layer.vocabulary]
    for line in lines:
      if len(f'{line}.'.splitlines()) > 1:
        raise ExportError(
          f'tflite: the vocabulary of the layer {layer.name!r} has {line!r}, '
          'but its file takes one value in a line. Leave that out, or the '
          "format: formats=('saved_model',)."
        )
    if lines:
      found[path] = lines
  return found


def write(
  lifted: Mapping[str, preprocessing.Lifted],
  lines: Mapping[str, list[str]],
  folder: pathlib.Path,
) -> None:
  """Write what a device needs in place of the layers.

  Args:
    lifted: Input to its layer.
    lines: What `tables` returns.
    folder: The folder of the other files.
  """
  described: dict[str, Any] = {}
  for name, path in zip(serving.names_of(lines), lines, strict=True):
    layer = lifted[path]
    file = f'{name}.txt'
    text = ''.join(f'{line}\n' for line in lines[path])
    (folder / file).write_text(text, encoding='utf-8')
    described[name] = {
      **json.loads(layer.described),
      'vocabulary': file,
      'dtype': layer.spec.dtype.name,
      'shape': layer.spec.shape.as_list(),
    }
  if described:
    (folder / FILE).write_text(
      json.dumps(described, indent=2) + '\n', encoding='utf-8'
    )
