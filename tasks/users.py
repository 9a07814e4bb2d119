"""Draws a map of a run's users, and their groups.

`tff-partial users --output_dir=OUT` reads the vector of each user of a trained
run, which the user remembers or which is a row of a table at the server. It
writes into OUT

- `users.csv`: every user, the attribute by which it is coloured (the subreddit
  that it uses most, the digit that it likes), its group and its vector;
- `user_map.png`: their map by t-SNE with its silhouette, as in Figure 5 of FURL
  and Figure 4 of FedEmbed;
- `user_groups.png`: how many users of each value are in each group, as in
  Figures 3 and 5 of FedEmbed. Groups are those that users chose. Where users
  choose none, k-means finds as many in the vectors as the attribute has values.
  Groups are numbered so that as many users as possible match their attribute.

With `--beside=OTHER`, a run that was drawn already, the figures show both.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import pathlib
from typing import TYPE_CHECKING

from tasks import task as tasks_lib
from tasks.errors import OptionError
from tasks.experiment.command_line.program import Program
from tasks.experiment.config import Config
from tasks.experiment.options.loop import Output
from tasks.experiment.runs.folder import with_flags_of_the_run
from tasks.options import option
from tasks.options import Options
import tff_partial
from tff_partial import analysis
from tff_partial.training import files

if TYPE_CHECKING:
  import numpy as np
  import pandas as pd

  from tff_partial.training import programs

_FILE, _MAP, _GROUPS = 'users.csv', 'user_map.png', 'user_groups.png'
_USER, _VALUE, _GROUP = 'user', 'attribute', 'group'


@dataclasses.dataclass(frozen=True)
class Picture(Options):
  """Options of the figures."""

  beside: tuple[str, ...] = option(
    (),
    'Folder of another drawn run to show, too; may be given repeatedly.',
    is_repeated=True,
  )


def described(
  task: tasks_lib.Task, saved: programs.Saved, num_groups: int, seed: int
) -> pd.DataFrame:
  """Describe the users who took part in training.

  Args:
    task: The task.
    saved: The saved run.
    num_groups: The number of groups to choose from; with fewer than two,
      k-means finds some.
    seed: The seed of k-means.

  Returns:
    A row for each user: its name, attribute, group, and vector.

  Raises:
    OptionError: If users have no vectors.
  """
  import pandas as pd
  from sklearn import cluster

  from tasks.experiment.runs import user_vectors
  from tff_partial import random_bits

  attributes = task.attributes
  groups: list[int] = []
  if saved.best_client_store is not None:
    vectors = {}
    for user in attributes:
      remembered: Mapping[str, np.ndarray] = (
        saved.best_client_store.client(user) or {}
      )
      own = user_vectors.own_vector(remembered, task.own_weights)
      if own is not None:
        vectors[user] = own
        if num_groups > 1 and tff_partial.client_state.GROUP in remembered:
          groups.append(int(remembered[tff_partial.client_state.GROUP]))
  else:
    vectors = task.vectors_at_server(saved.best_weights)
  if not vectors:
    raise OptionError(
      'The model of this run does not know its users. Choose a run in which '
      'they have something of their own.'
    )
  frame = pd.DataFrame(list(vectors.values()))
  values = [attributes[user] for user in vectors]
  if not groups:
    drawn = random_bits.not_negative(seed, 'k-means')
    means = cluster.KMeans(len(set(values)), n_init=10, random_state=drawn)
    groups = means.fit_predict(frame.to_numpy()).tolist()
  frame.insert(0, _USER, list(vectors))
  frame.insert(1, _VALUE, values)
  frame.insert(2, _GROUP, groups)
  return frame


def _read(folder: pathlib.Path) -> pd.DataFrame:
  import pandas as pd

  path = folder / _FILE
  if not path.exists():
    raise OptionError(
      f'{path}: there is no such file. Draw the users of that run first.'
    )
  texts = dict.fromkeys(
    (_USER, _VALUE, _GROUP), analysis.spreadsheets.unescaped
  )
  return pd.read_csv(path, converters=texts)


def main(config: Config, output: Output, picture: Picture) -> None:
  from tasks.experiment.runs.running import reopened

  confusion, embeddings = analysis.confusion, analysis.embeddings
  folder = pathlib.Path(str(output.output_dir))
  files.refuse_read_only(folder)
  with reopened(config, output.output_dir) as (task, trainable, saved):
    if not task.attribute:
      raise OptionError(
        f'--output_dir={folder}: of its users the task {task.name} '
        'knows nothing to colour them by. Choose a run of another task.'
      )
    num_groups = trainable.process.model.num_groups
    frame = described(task, saved, num_groups, config.seed)
    escaped = analysis.spreadsheets.escaped_frame(frame)
    files.write_whole(folder / _FILE, escaped.to_csv(index=False))
  paths = [folder, *map(pathlib.Path, picture.beside)]
  are_told_apart = len({path.name for path in paths}) == len(paths)
  frames = {
    path.name if are_told_apart else str(path): _read(path) for path in paths
  }
  scores = embeddings.draw(
    {
      name: embeddings.Users(
        frame.drop(columns=[_USER, _VALUE, _GROUP]).to_numpy(),
        frame[_VALUE].tolist(),
      )
      for name, frame in frames.items()
    },
    folder / _MAP,
    attribute=task.attribute,
    seed=config.seed,
  )
  matrices = {
    name: confusion.confusion(
      frame[_VALUE].tolist(), frame[_GROUP].tolist()
    ).matched()
    for name, frame in frames.items()
  }
  confusion.draw(
    matrices, folder / _GROUPS, truth=task.attribute, assigned='group'
  )
  for name, score in scores.items():
    print(
      f'{name}: silhouette {score.embeddings:.3f}, map {score.map:.3f}; '
      f'groups: purity {matrices[name].purity:.3f}, accuracy '
      f'{matrices[name].accuracy:.3f}'
    )
  print(f'Written to {folder}: {_FILE}, {_MAP}, {_GROUPS}.')


PROGRAM = Program(main, (Config(), Output(), Picture()), with_flags_of_the_run)

if __name__ == '__main__':
  PROGRAM.run()
