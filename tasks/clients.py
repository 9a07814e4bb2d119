"""Shows, exports or deletes what one client remembers of a run.

  tff-partial clients --output_dir=OUT --client=42
  tff-partial clients --output_dir=OUT --client=42 --do=export --file=A.json
  tff-partial clients --output_dir=OUT --client=42 --do=delete

A client is named as in the task's data. Its state is shown and exported as of
the newest checkpoint, also while the run is under way; a file ends in .json, or
in .npz for NumPy. A state can only be deleted while the run is not under way. A
deleted client that takes part again starts from the beginning. Deletion does
not change what the global weights have learned from the client, nor copies of
the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
import contextlib
import dataclasses
import pathlib
from typing import TYPE_CHECKING

from tasks.errors import OptionError
from tasks.experiment.command_line.program import Program
from tasks.options import option
from tasks.options import Options

if TYPE_CHECKING:
  import numpy as np

_SHOWN = 8  # Numbers of each leaf.


@dataclasses.dataclass(frozen=True)
class Request(Options):
  """Options of which client's state to show, export or delete."""

  output_dir: str | None = option(
    None, 'Folder for everything that the run writes.'
  )
  client: str | None = option(None, 'The client, as named in the data.')
  do: str = option(
    'show', 'What to do with its state.', choices=('show', 'export', 'delete')
  )
  file: str | None = option(None, 'File to export to, .json or .npz.')


def main(request: Request) -> None:
  if not (request.output_dir and request.client):
    missing = 'client' if request.output_dir else 'output_dir'
    raise OptionError(f'--{missing}: name the run and the client.')
  if (request.do == 'export') != bool(request.file):
    raise OptionError(
      f'--do={request.do} --file={request.file or ""}: an export has a file, '
      'and nothing else does.'
    )
  from tff_partial.training import checkpoints
  from tff_partial.training import programs
  from tff_partial.training.client_store import client_store
  from tff_partial.training.client_store import sqlite_backend

  folder = pathlib.Path(request.output_dir)
  stored = folder / programs.CLIENTS_FOLDER
  with contextlib.closing(
    sqlite_backend.Versions(stored, writable=False)
  ) as versions:
    held = versions.versions(request.client)
    if not held:
      raise OptionError(
        f'--client={request.client}: {versions.path} holds nothing of this '
        'client. It never took part, was deleted, or has another name.'
      )
    if request.do != 'delete':
      number = checkpoints.newest_round(folder / programs.CHECKPOINTS_FOLDER)
      state = client_store.look_up(versions, request.client, number)
      if state is None:
        at = f'at the checkpoint of round {number}, since it took part later'
        raise OptionError(
          f'--client={request.client}: it remembers nothing '
          f'{at if number else "yet: no round has a checkpoint"}. Let the run '
          'go on.'
        )
      if request.file is None:
        print(_table(request.client, state, number))
      else:
        client_store.export(state, request.file)
        print(f'Written to {request.file}, as of round {number}.')
      return
  with contextlib.closing(sqlite_backend.Versions(stored)) as versions:
    number = versions.delete(request.client)
  print(
    f'Deleted {number} versions of what client {request.client} remembered. It '
    'starts over if it takes part again. What the global weights have learned '
    'from it stays learned; copies and exports stay where they are.'
  )


def _table(client: str, state: Mapping[str, np.ndarray], number: int) -> str:
  """Format a line for each leaf."""
  lines = [f'Client {client} remembers, as of round {number}:']
  for name, leaf in state.items():
    numbers = [f'{value:.6g}' for value in leaf.flat[:_SHOWN]]
    more = ['...'] if leaf.size > _SHOWN else []
    lines.append(
      f'  {name}  {leaf.dtype}{list(leaf.shape)}  {" ".join(numbers + more)}'
    )
  return '\n'.join(lines)


PROGRAM = Program(main, (Request(),))

if __name__ == '__main__':
  PROGRAM.run()
