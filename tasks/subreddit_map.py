"""Draws the vectors of a run's users as a map, as in the FURL paper's Figure 5.

`python -m tasks.subreddit_map --output_dir=OUT` writes OUT/user_map.csv with
every author's vector and most used subreddit, and OUT/user_map.png with their
map by t-SNE and its silhouette. With `--beside=OTHER`, a run that has its
user_map.csv already, both maps stand in the picture.
"""

import pathlib

from absl import flags
import numpy as np
import pandas as pd

from tasks import evaluate
from tasks import runs
from tasks import subreddit
from tasks import subreddit_models
from tasks.errors import OptionError
from tff_partial import programs
from tff_partial import tiers
from tff_partial.analysis import embeddings

FLAGS = flags.FLAGS
_RUN = runs.run_flags()
_FILE, _PICTURE = 'user_map.csv', 'user_map.png'
_AUTHOR, _ATTRIBUTE = 'author', 'most used subreddit'
# Where a model with a table of all users has their vectors.
_TABLE_WEIGHTS = 'user_embedding/embeddings'

flags.DEFINE_string('beside', None, 'Folder of a run whose map is drawn, too.')


def user_vectors(
  task: subreddit.Subreddit, saved: programs.Saved
) -> pd.DataFrame:
  """Reads the vectors of the authors who took part in training.

  Args:
    task: The task that was learned.
    saved: What the run left: authors remember their vectors, or the best
      weights hold a table of them.

  Returns:
    A row for each author: its name, the attribute, and its vector.

  Raises:
    OptionError: If the model does not know who writes.
  """
  attribute = task.author_attribute
  if saved.best_client_store is not None:
    remembered = saved.best_client_store.read(list(attribute))
    vectors = np.stack(
      [state[subreddit_models.LOCAL_WEIGHTS] for state in remembered]
    )
  else:
    shared = saved.best_weights.trainable[tiers.GLOBAL]
    if _TABLE_WEIGHTS not in shared:
      raise OptionError(
        f'--output_dir={FLAGS.output_dir}: the model of this run does not know '
        'who writes. Choose a run with user vectors.'
      )
    places = {name: row for row, name in enumerate(task.documents.authors)}
    vectors = shared[_TABLE_WEIGHTS][[places[author] for author in attribute]]
  frame = pd.DataFrame(vectors)
  frame.insert(0, _AUTHOR, list(attribute))
  frame.insert(1, _ATTRIBUTE, list(attribute.values()))
  return frame


def _users(path: pathlib.Path) -> embeddings.Users:
  if not path.exists():
    raise OptionError(
      f'{path}: there is no such file. Draw the map of that run first.'
    )
  frame = pd.read_csv(path, dtype={_AUTHOR: str, _ATTRIBUTE: str})
  vectors = frame.drop(columns=[_AUTHOR, _ATTRIBUTE]).to_numpy()
  return embeddings.Users(vectors, frame[_ATTRIBUTE].tolist())


def main() -> None:
  """Writes the vectors and the picture."""
  runs.quiet_libraries()
  folder = pathlib.Path(FLAGS.output_dir)
  task = _RUN.task()
  if not isinstance(task, subreddit.Subreddit):
    raise OptionError(
      f'--output_dir={FLAGS.output_dir}: this is a run of the task '
      f'{task.name}. Choose one of {subreddit.NAME}.'
    )
  with runs.runtime():
    trainable = _RUN.trainable(task)
    saved = programs.load(trainable.process, folder)
    user_vectors(task, saved).to_csv(folder / _FILE, index=False)
  folders = [folder, *([pathlib.Path(FLAGS.beside)] if FLAGS.beside else [])]
  scores = embeddings.draw(
    {path.name: _users(path / _FILE) for path in folders},
    folder / _PICTURE,
    attribute=_ATTRIBUTE,
    seed=FLAGS.seed,
  )
  for name, score in scores.items():
    print(f'{name}: silhouette {score.embeddings:.3f}, map {score.map:.3f}')
  print(f'Written to {folder / _PICTURE}.')


if __name__ == '__main__':
  runs.run_main(main, evaluate.with_flags_of_the_run)
