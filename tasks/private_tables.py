"""Shows what a run of HPFL's tasks knows of the tables that clients keep.

`tff-partial private_tables --output_dir=OUT` reads a trained run of the
tasks assist and movielens_hpfl. It writes into OUT

- `attribute_shares.csv` and `.png`: how often each attribute occurs at the ten
  clients with the most records, as in Figure 4 of HPFL;
- `private_tables_map.csv` and `.png`: the hidden characteristics (Eq. 8) of the
  users of the five clients with the most records, and their map by t-SNE with
  the silhouette by client, as in Figures 5 and 6. Crosses are the centers of
  users that these clients send. Models without Eq. 8 are drawn by their users'
  vectors;
- `drafts.csv`: every draft, how many rows it stands for, and its distance to
  the nearest row, a real user's or item's vector, of any client. `centers` are
  what clients send in the paper, or would send where a run shares no drafts or
  others; `centers of at least m rows` what `--hpfl_min_users=m` leaves of them;
  `global centers` or `sums` what the server holds after the last round.

With `--beside=OTHER`, a run that was drawn already, both stand on the map.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib
from typing import cast

import numpy as np
import pandas as pd
import tensorflow as tf

from tasks.errors import OptionError
from tasks.experiment.command_line.program import Program
from tasks.experiment.config import Config
from tasks.experiment.options import hyperparameters
from tasks.experiment.options.loop import Output
from tasks.experiment.run.folder import Folder
from tasks.experiment.run.folder import with_flags_of_the_run
from tasks.experiment.run.running import executing
from tasks.experiment.run.running import load
from tasks.experiment.trainable import Trainable
from tasks.user_modeling import clients as clients_lib
from tasks.user_modeling import kept_tables
from tasks.user_modeling import models as user_models
from tasks.user_modeling import records as records_lib
from tasks.user_modeling.task import UserModeling
from tasks.users import Picture
from tff_partial import tiers
from tff_partial.analysis import embeddings
from tff_partial.analysis import shares
from tff_partial.analysis import spreadsheets
from tff_partial.clustering import k_means as clustering
from tff_partial.drafts import centers as drafts_lib
from tff_partial.training import personal_models
from tff_partial.training import programs

_SHARES, _SHARES_PICTURE = 'attribute_shares.csv', 'attribute_shares.png'
_MAP, _MAP_PICTURE = 'private_tables_map.csv', 'private_tables_map.png'
_DRAFTS = 'drafts.csv'

# Clients in Figure 4, and in Figures 5 and 6.
_COMPARED, _MAPPED = 10, 5

# Columns of the map; further ones are the numbers of vectors.
_CLIENT, _WHAT, _USER, _X, _Y = 'client', 'what', 'user', 'x', 'y'
_NAMES = [_CLIENT, _WHAT, _USER]
_OF_USER, _OF_CENTER = 'user', 'center'

# Column headings of the printed table of drafts.
_HEADS = {
  'number': 'drafts',
  'quantile': '5 %',
  'least': 'smallest',
  'share_equal': 'share that is a row',
  'between_rows': 'between rows',
}


def largest(records: records_lib.Records, number: int) -> list[int]:
  """Find the clients with the most records, the largest first.

  Args:
    records: All records.
    number: The most clients to return.

  Returns:
    Their indices in `records.clients`.
  """
  counts = np.bincount(records.client, minlength=len(records.clients))
  return np.argsort(-counts, kind='stable')[:number].tolist()


# ---- attributes by client ----------------------------------------------------


def _draw_shares(records: records_lib.Records, folder: pathlib.Path) -> None:
  """Write and draw how often attributes occur at the largest clients."""
  places = largest(records, _COMPARED)
  table = records_lib.attribute_shares(records)[places]
  names = list(records.attribute_names)
  clients = [records.clients[place] for place in places]
  frame = pd.DataFrame(table, columns=names)
  frame.insert(0, _CLIENT, clients)
  counts = np.bincount(records.client, minlength=len(records.clients))
  frame.insert(1, 'records', counts[places])
  spreadsheets.escaped_frame(frame).to_csv(folder / _SHARES, index=False)
  shares.draw(
    dict(zip(clients, table, strict=True)), names, folder / _SHARES_PICTURE
  )
  # Half the sum of differences: the share of records that would have to change.
  everyone = dataclasses.replace(
    records, clients=('all',), client=np.zeros_like(records.client)
  )
  differ = np.abs(table - records_lib.attribute_shares(everyone)).sum(axis=1)
  print(
    f'{len(clients)} largest clients: their shares of attributes differ from '
    f'those of all by {differ.mean() / 2:.3f} on average (total variation).'
  )


# ---- the map -----------------------------------------------------------------


def characteristics(keras_model: tf.keras.Model) -> np.ndarray | None:
  """Return the representation that a model has of its users, `[users, size]`.

  Args:
    keras_model: A user model.

  Returns:
    Its hidden characteristics (Eq. 8) if it has any, otherwise its vectors of
    users; None if it has neither.
  """
  hidden = user_models.hidden_characteristics(keras_model)
  if hidden is not None:
    return hidden
  layers = {layer.name: layer for layer in keras_model.layers}
  names = [variable.split('/')[0] for variable in user_models.VECTORS]
  vectors = [
    layers[name].get_weights()[0]
    for name in names
    if name in layers and name.startswith('user')
  ]
  return np.concatenate(vectors, axis=1) if vectors else None


def _characteristics(
  config: Config,
  task: UserModeling,
  trainable: Trainable,
  saved: programs.Saved,
  sent: Mapping[str, clustering.KMeans],
) -> pd.DataFrame | None:
  """Collect the vectors of the users of the largest clients.

  Args:
    config: The experiment.
    task: Its task.
    trainable: The trained algorithm.
    saved: The saved run.
    sent: Client to the clusters of its users, if it sends their centers.

  Returns:
    A row for each user and center: client, type of the row, the user's name,
    and its vector, which for a center is the mean of its users; None if the
    model has no vectors of users.
  """
  measured = trainable.evaluation_set(task.validation)
  numbers = clients_lib.Clients(task.records, {})
  is_own = tiers.LOCAL in trainable.process.model.tiers
  frames = []
  for place in largest(task.records, _MAPPED):
    client = task.records.clients[place]
    keras_model = personal_models.personalise(
      saved,
      measured.clients,
      client,
      evaluation=measured.evaluation,
      seed=config.seed,
    )
    vectors = characteristics(keras_model)
    if vectors is None:
      return None
    if not is_own:  # The server's table has the users of all clients.
      vectors = vectors[numbers.first_user[place] :][: numbers.num_users[place]]
    users = task.records.user_names[place]
    frames.append(_named(client, _OF_USER, users, vectors))
    if client in sent:
      centers = _means(vectors, sent[client])
      frames.append(_named(client, _OF_CENTER, [''] * len(centers), centers))
  return pd.concat(frames, ignore_index=True)


def _named(
  client: str, what: str, users: Sequence[str], vectors: np.ndarray
) -> pd.DataFrame:
  frame = pd.DataFrame(vectors)
  frame.insert(0, _CLIENT, client)
  frame.insert(1, _WHAT, what)
  frame.insert(2, _USER, list(users))
  return frame


def _means(vectors: np.ndarray, clusters: clustering.KMeans) -> np.ndarray:
  """Average the vectors of each cluster with a real center."""
  means = [
    vectors[clusters.assignment == center].mean(axis=0)
    for center in np.flatnonzero(clusters.is_real)
  ]
  return np.reshape(means, [-1, vectors.shape[1]])


def _draw_map(
  frame: pd.DataFrame, folder: pathlib.Path, picture: Picture, seed: int
) -> None:
  """Project vectors to the plane, and draw them next to other runs."""
  vectors = frame.drop(columns=_NAMES).to_numpy()
  is_user = (frame[_WHAT] == _OF_USER).to_numpy()
  # Raises an error with a clear message if nothing can be drawn.
  embeddings.silhouette(vectors[is_user], frame[_CLIENT][is_user].tolist())
  points = embeddings.project(vectors, seed)
  frame.insert(3, _X, points[:, 0])
  frame.insert(4, _Y, points[:, 1])
  spreadsheets.escaped_frame(frame).to_csv(folder / _MAP, index=False)
  maps, places = {}, {}
  for path in (folder, *map(pathlib.Path, picture.beside)):
    maps[path.name], places[path.name] = _read(path / _MAP)
  scores = embeddings.draw(
    maps, folder / _MAP_PICTURE, attribute=_CLIENT, seed=seed, places=places
  )
  for name, score in scores.items():
    print(
      f'{name}: silhouette of users by client {score.embeddings:.3f}, of the '
      f'map {score.map:.3f}.'
    )


def _read(path: pathlib.Path) -> tuple[embeddings.Users, embeddings.Places]:
  """Read a map that was written."""
  texts = dict.fromkeys((_CLIENT, _USER), spreadsheets.unescaped)
  frame = pd.read_csv(path, converters=texts)
  is_user = (frame[_WHAT] == _OF_USER).to_numpy()
  points = frame[[_X, _Y]].to_numpy()
  users = embeddings.Users(
    frame.drop(columns=[*_NAMES, _X, _Y]).to_numpy()[is_user],
    frame[_CLIENT][is_user].tolist(),
  )
  return users, embeddings.Places(points[is_user], points[~is_user])


# ---- drafts ------------------------------------------------------------------


def _clustered(
  config: Config, tables: Mapping[str, Sequence[int]], rows: kept_tables.Tables
) -> dict[str, dict[str, clustering.KMeans]]:
  """Cluster the rows of all clients, as for the paper's drafts.

  Args:
    config: The experiment.
    tables: Table to its number of rows at each client.
    rows: Table to client to rows.

  Returns:
    Table to client to clusters.
  """
  if not rows:
    return {}
  how = dataclasses.replace(
    config.hyperparameters.hpfl, drafts=hyperparameters.CENTERS, min_users=1
  )
  centers = cast(drafts_lib.Centers, how.drafting(tables))
  return {
    table: kept_tables.clustered(centers, of_table, table, config.seed)
    for table, of_table in rows.items()
  }


def _sent_of_users(
  config: Config,
  saved: programs.Saved,
  clusters: Mapping[str, Mapping[str, clustering.KMeans]],
) -> dict[str, clustering.KMeans]:
  """Return the clusters of users whose centers clients send in this run."""
  how = config.hyperparameters.hpfl
  held = drafts_lib.at_server(saved.state, kept_tables.USERS)
  if held is None or how.drafts == hyperparameters.SUMS:
    return {}
  return {
    client: found._replace(is_real=found.counts >= max(how.min_users, 1))
    for client, found in clusters.get(kept_tables.USERS, {}).items()
  }


def measured(
  config: Config,
  clients: Sequence[str],
  saved: programs.Saved,
  rows: kept_tables.Tables,
  clusters: Mapping[str, Mapping[str, clustering.KMeans]],
) -> pd.DataFrame:
  """Measure all drafts of a run.

  Args:
    config: The experiment.
    clients: The names of all clients.
    saved: The saved run.
    rows: Table to client to rows after the best round.
    clusters: Table to client to clusters of these rows.

  Returns:
    A row for each draft.
  """
  how = config.hyperparameters.hpfl
  kind = kept_tables.GLOBAL_CENTERS
  if how.drafts == hyperparameters.SUMS:
    kind = kept_tables.SUMS
  # The server's state is of the last round, so it is compared with rows of it.
  last = rows
  if saved.client_store is not None and saved.best_round != saved.rounds:
    last = kept_tables.read(saved.client_store, clients, rows)
  frames = []
  for table, found in clusters.items():
    frames.append(
      kept_tables.sent(table, rows[table], found, how.min_users, config.seed)
    )
    held = drafts_lib.at_server(saved.state, table)
    if held is not None and len(held):
      frames.append(
        kept_tables.at_server(table, kind, held, last[table], config.seed)
      )
  return pd.concat(frames, ignore_index=True)


def _say_drafts(frame: pd.DataFrame, saved: programs.Saved) -> None:
  """Print the table of drafts, and an explanation."""
  found = kept_tables.summary(frame).rename(columns=_HEADS)
  print(found.to_string(index=False, float_format='%.4g'))
  print(
    'Distances to the nearest row of any client; between rows: the median '
    'distance of rows to their nearest other row (of more than '
    f'{kept_tables.MOST_ROWS:,} rows so many are drawn for that). Drafts of '
    f'clients are of their rows after round {saved.best_round or saved.rounds}'
    ', with other draws of k-means than in the run.'
  )
  if frame[kept_tables.KIND].isin(kept_tables.OF_SERVER).any():
    print(
      f'What the server holds is of round {saved.rounds}, the last one, as '
      'are the rows beside it.'
    )


def main(config: Config, output: Output, picture: Picture) -> None:
  """Write the tables and the figures."""
  folder = pathlib.Path(str(output.output_dir))
  for other in picture.beside:
    if not (pathlib.Path(other) / _MAP).exists():
      raise OptionError(
        f'--beside={other}: there is no file {_MAP}. Draw that run first.'
      )
  task = load(config, Folder(str(folder)))
  if not isinstance(task, UserModeling):
    raise OptionError(
      f'--output_dir={folder}: clients of the task {task.name} keep no tables '
      'of many users. Choose a run of assist or movielens_hpfl.'
    )
  written = [_SHARES, _SHARES_PICTURE]
  with executing(config.runtime):
    trainable = Trainable(config, task)
    saved = trainable.saved(folder)
    _draw_shares(task.records, folder)
    tables = task.kept_tables()
    rows = kept_tables.read(
      saved.best_client_store, task.records.clients, tables
    )
    clusters = _clustered(config, tables, rows)
    sent = _sent_of_users(config, saved, clusters)
    frame = _characteristics(config, task, trainable, saved, sent)
  if frame is None:
    print('No map: the model has no vectors of users.')
  else:
    _draw_map(frame, folder, picture, config.seed)
    written += [_MAP, _MAP_PICTURE]
  if clusters:
    drafts = measured(config, task.records.clients, saved, rows, clusters)
    spreadsheets.escaped_frame(drafts).to_csv(folder / _DRAFTS, index=False)
    _say_drafts(drafts, saved)
    written.append(_DRAFTS)
  else:
    print('No drafts: clients of this run keep no tables of vectors.')
  if config.privacy.is_on:
    print('Not private: all of this is exact, for who may read checkpoints.')
  print(f'Written to {folder}: {", ".join(written)}.')


PROGRAM = Program(main, (Config(), Output(), Picture()), with_flags_of_the_run)

if __name__ == '__main__':
  PROGRAM.run()
