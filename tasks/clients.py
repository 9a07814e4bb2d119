"""Shows, exports or deletes what one client remembers of a run.

  python -m tasks.clients --output_dir=OUT --client=42
  python -m tasks.clients --output_dir=OUT --client=42 --do=export --file=A.json
  python -m tasks.clients --output_dir=OUT --client=42 --do=delete

A client is named as in the task's data. What is shown and exported is what the
client remembers at the newest checkpoint, also while the run goes on; a file
ends in .json, or in .npz for NumPy. To delete, the run must not be under way.
Then the client begins anew, should it take part again. What the global weights
have learned from it stays learned, and copies of the folder stay what they are.
"""

from collections.abc import Mapping
import contextlib
import pathlib

from absl import flags
import numpy as np

from tasks import runs
from tasks.errors import OptionError
from tff_partial.training import checkpoints
from tff_partial.training import client_store
from tff_partial.training import programs
from tff_partial.training import sqlite_backend

FLAGS = flags.FLAGS
runs.run_flags()
flags.declare_key_flag('output_dir')
flags.DEFINE_string('client', None, 'Whose state.')
flags.DEFINE_enum(
  'do', 'show', ['show', 'export', 'delete'], 'What to do with it.'
)
flags.DEFINE_string('file', None, 'Where to export it: a .json or .npz file.')

_SHOWN = 8  # Numbers of each leaf.


def main() -> int | None:
  """Does what is asked with the state of one client."""
  runs.quiet_libraries()
  for name in ('output_dir', 'client'):
    if not FLAGS[name].value:
      raise OptionError(f'--{name}: name the run and the client.')
  if (FLAGS.do == 'export') != bool(FLAGS.file):
    raise OptionError(
      f'--do={FLAGS.do} --file={FLAGS.file or ""}: an export has a file, and '
      'nothing else does.'
    )
  folder = pathlib.Path(FLAGS.output_dir)
  stored = folder / programs.CLIENTS_FOLDER
  with contextlib.closing(
    sqlite_backend.Versions(stored, writable=False)
  ) as versions:
    held = versions.versions(FLAGS.client)
    if not held:
      raise OptionError(
        f'--client={FLAGS.client}: {versions.path} holds nothing of this '
        'client. It never took part, was deleted, or has another name.'
      )
    if FLAGS.do != 'delete':
      number = checkpoints.newest_round(folder / programs.CHECKPOINTS_FOLDER)
      state = client_store.look_up(versions, FLAGS.client, number)
      if state is None:
        raise OptionError(
          f'--client={FLAGS.client}: it remembers nothing at the checkpoint of '
          f'round {number}, since it took part later. Let the run go on.'
        )
      if FLAGS.do == 'show':
        print(_table(state, number))
      else:
        client_store.export(state, FLAGS.file)
        print(f'Written to {FLAGS.file}, as of round {number}.')
      return None
  with contextlib.closing(sqlite_backend.Versions(stored)) as versions:
    number = versions.delete(FLAGS.client)
  print(
    f'Deleted {number} versions of what client {FLAGS.client} remembered. It '
    'begins anew if it takes part again. What the global weights have learned '
    'from it stays learned; copies and exports stay where they are.'
  )
  return None


def _table(state: Mapping[str, np.ndarray], number: int) -> str:
  """A line for each leaf."""
  lines = [f'Client {FLAGS.client} remembers, as of round {number}:']
  for name, leaf in state.items():
    numbers = [f'{value:.6g}' for value in leaf.flat[:_SHOWN]]
    more = ['...'] if leaf.size > _SHOWN else []
    lines.append(
      f'  {name}  {leaf.dtype}{list(leaf.shape)}  {" ".join(numbers + more)}'
    )
  return '\n'.join(lines)


if __name__ == '__main__':
  runs.run_main(main)
