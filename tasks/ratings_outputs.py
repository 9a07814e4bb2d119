"""Additional outputs of a run on custom ratings.

`top_n.csv` recommends items to users, and the folder `export` has the model for
devices. Both are made from saved files, so that repeating the command of a
finished run writes them again, for instance for another user.
"""

from collections.abc import Iterator
import pathlib
import shutil
from typing import NamedTuple

import numpy as np
import pandas as pd
import tensorflow as tf

from tasks.experiment.config import Config
from tasks.experiment.options.loop import Output
from tasks.experiment.runs import devices
from tasks.experiment.runs import folder as folder_lib
from tasks.experiment.runs.running import executing
from tasks.experiment.trainable import Trainable
from tasks.movielens import models as movielens_models
from tasks.ratings import task as ratings_task
from tasks.ratings.options import Ends
from tasks.ratings.options import RatingsOptions
from tff_partial import errors
from tff_partial.analysis import spreadsheets
from tff_partial.training import files
from tff_partial.training import personal_models
from tff_partial.training import programs

TOP_N_FILE = 'top_n.csv'
EXPORT_FOLDER = 'export'


class _TopNRow(NamedTuple):
  """A line of `top_n.csv`."""

  user: str
  rank: int
  item: str
  score: str


def write(config: Config, output: Output) -> None:
  """Write the outputs that the options of a run on ratings request.

  An output that the algorithm cannot give, such as items for each user where
  users have no local part, is left out, and the reason is printed. For a task
  without ratings nothing is written.
  """
  options = config.task
  if not isinstance(options, RatingsOptions):
    return
  ends = options.ends
  if not (ends.top_n_csv or ends.export_formats):
    return
  run = folder_lib.Folder(str(output.output_dir))
  done = run.read_result() or {}
  task = options.load(config.data, config.seed)
  with executing(config.runtime, done.get('jit_choices')):
    trainable = Trainable(config, task)
    saved = trainable.saved(run.path)
    for is_wanted, name, write_one in (
      (ends.top_n_csv, TOP_N_FILE, _write_top_n),
      (ends.export_formats, f'folder {EXPORT_FOLDER}', _write_export),
    ):
      try:
        if is_wanted:
          write_one(config, task, trainable, saved, ends, run.path)
      except errors.UserError as error:
        if isinstance(error.__cause__, (OSError, tf.errors.OpError)):
          raise  # Of a full disk.
        print(f'No {name} is written. {error}')


def _write_top_n(
  config: Config,
  task: ratings_task.RatingsTask,
  trainable: Trainable,
  saved: programs.Saved,
  ends: Ends,
  folder: pathlib.Path,
) -> None:
  personal = trainable.personal()
  predictor = personal_models.Predictor(
    saved,
    task.everybody(personal.example_spec),
    evaluation=personal,
    seed=config.seed,
  )
  names = task.ratings.user_names
  users = names if ends.top_n_user is None else (ends.top_n_user,)
  rows = [x for user in users for x in best(task, predictor, user, ends.top_n)]
  table = pd.DataFrame(rows, columns=_TopNRow._fields)
  path = folder / TOP_N_FILE
  files.write_whole(path, table.to_csv(index=False))
  whom = f'{len(users):,} users' if len(users) > 1 else f'user {users[0]}'
  print(f'The {ends.top_n} best items for {whom}: {path}')


def best(
  task: ratings_task.RatingsTask,
  predictor: personal_models.Predictor,
  user: str,
  number: int,
) -> Iterator[_TopNRow]:
  """Rank the items that a user has not rated; fewer if there are not enough.

  Yields:
    Lines of `top_n.csv`, the best item first, with texts that a spreadsheet
    treats as texts.
  """
  ratings = task.ratings
  scores = predictor.predict(user, np.arange(ratings.num_items, dtype=np.int32))
  scores = movielens_models.ratings_of(scores)
  rated = task.rated_by(user)['item_id'].to_numpy()
  unrated = np.setdiff1d(np.arange(ratings.num_items), rated)
  best = unrated[np.argsort(-scores[unrated], kind='stable')][:number]
  for rank, item in enumerate(best, 1):
    yield _TopNRow(
      spreadsheets.escaped(user),
      rank,
      spreadsheets.escaped(ratings.item_titles[item]),
      f'{np.clip(scores[item], *ratings.scale):.4f}',
    )


def _write_export(
  config: Config,
  task: ratings_task.RatingsTask,
  trainable: Trainable,
  saved: programs.Saved,
  ends: Ends,
  folder: pathlib.Path,
) -> None:
  counts = task.ratings.frame['user_id'].value_counts()
  target = folder / EXPORT_FOLDER
  with files.replacing(target) as made:
    exported = devices.write(
      task,
      devices.served(trainable, saved),
      made,
      ends.export_formats,
      int(counts.max()),
      config.seed,
    )
    # Earlier output, once the new one is complete.
    shutil.rmtree(target, ignore_errors=True)
  names = ', '.join(path.name for path in exported.paths.values())
  print(f'The model for devices: {target} ({names}, vocabularies.json)')
