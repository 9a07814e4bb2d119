"""What references came to, recorded so that it needs no checkout to compare."""

from collections.abc import Mapping
import json
import pathlib
import subprocess

import numpy as np

from tests.references import problem
from tests.references import table

_FILE = pathlib.Path(__file__).with_name('recorded.json')


def read() -> dict[str, problem.Arrays]:
  """Returns the results by name, with every departure taken out."""
  content = json.loads(_FILE.read_text(encoding='utf-8'))
  return {
    name: {key: np.array(value, np.float32) for key, value in arrays.items()}
    for reference in content.values()
    for name, arrays in reference['results'].items()
  }


def write(
  reference: str, results: Mapping[str, problem.Arrays], source: pathlib.Path
) -> None:
  """Replaces what is recorded of one reference."""
  content = {}
  if _FILE.exists():
    content = json.loads(_FILE.read_text(encoding='utf-8'))
  names = [o.name for o in table.COMPARISONS if o.reference == reference]
  of_it = table.REFERENCES[reference]
  content[reference] = {
    'source': of_it.source,
    'licence': of_it.licence,
    'version': _version(reference, source),
    'results': {
      name: {
        key: _as_lists(results[name][key]) for key in sorted(results[name])
      }
      for name in names
    },
  }
  lines = json.dumps(content, indent=1, sort_keys=True)
  _FILE.write_text(_compact(lines), encoding='utf-8')


def _as_lists(array: np.ndarray) -> list:
  """Nine digits tell a float32."""
  return json.loads(
    json.dumps(np.asarray(array, np.float64).tolist()),
    parse_float=lambda text: float(f'{float(text):.9g}'),
  )


def _compact(lines: str) -> str:
  """Joins the lines of arrays."""
  joined: list[str] = []
  for line in lines.splitlines():
    inner = line.lstrip()
    if joined and (inner[0] in '-0123456789[]'):
      joined[-1] += inner
    else:
      joined.append(line)
  return '\n'.join(joined) + '\n'


def _version(reference: str, source: pathlib.Path) -> str:
  if reference == table.TFF:
    import tensorflow_federated as tff

    return tff.__version__
  done = subprocess.run(
    ['git', '-C', str(source), 'rev-parse', 'HEAD'],
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  )
  return done.stdout.strip()
