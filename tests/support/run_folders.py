"""Folders as runs leave them."""

import json
import pathlib
from typing import Any

_ROUNDS = 'round,loss,validation_rmse\n1,3.0,\n2,2.0,1.5\n3,1.0,\n4,0.5,1.1\n'


def write(
  root: pathlib.Path,
  name: str,
  *,
  seed: int = 0,
  rmse: Any = 1.0,
  diverged: bool = False,
  ended: bool = True,
  rounds: str = _ROUNDS,
  more: Any = None,
  **flags: Any,
) -> pathlib.Path:
  """A folder as a run leaves it."""
  folder = root / name
  folder.mkdir(parents=True)
  flags = {'algorithm': 'fed_recon', 'seed': seed, **flags}
  lines = [f'--{name}={value}' for name, value in flags.items()]
  lines += [f'--output_dir={folder}', '# clip is not set']
  (folder / 'flags.txt').write_text('\n'.join(lines) + '\n')
  (folder / 'metrics.csv').write_text(rounds)
  if ended:
    test = {'rmse': rmse, 'num_clients': 3, 'per_client': {'rmse': {}}}
    best = {**test, 'rmse': 0.5}
    run = {'seed': seed, 'diverged': diverged, 'privacy': None}
    tests = {'test': {'unseen': test}, 'best': {'test': {'unseen': best}}}
    result = {**run, **tests, 'seconds': {'total': 7.5}, **(more or {})}
    (folder / 'result.json').write_text(json.dumps(result))
  return folder
