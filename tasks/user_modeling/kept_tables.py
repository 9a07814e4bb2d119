"""The tables that clients keep after a run, and what drafts reveal of them.

Drafts (HPFL, section 4.2) are what leaves a client of its tables. Each is
measured by its distance to the nearest row, a real user's or item's vector, of
any client (`nearest_rows`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import pandas as pd
import tensorflow as tf

from tff_partial.analysis import nearest_rows
from tff_partial.clustering import k_means as clustering
from tff_partial.drafts import centers as drafts_lib
from tff_partial.training.client_store import client_store
from tff_partial.training.participation import sampling

# The table of users' vectors.
USERS = 'user/embeddings'

# Kinds of drafts.
CENTERS, ENOUGH = 'centers', 'centers of at least {} rows'
OF_SERVER = GLOBAL_CENTERS, SUMS = 'global centers', 'sums'
# Columns: whose a draft is, how many rows it stands for, its distance to the
# nearest row, and the median distance of rows to their nearest other row.
TABLE, KIND, CLIENT, ROWS = 'table', 'kind', 'client', 'rows'
DISTANCE, BETWEEN = 'distance', 'between_rows'

# Of more rows, so many are compared with all others.
MOST_ROWS = 2000

# Client to its rows of a table, `[rows, width]`; and table to that.
Rows: TypeAlias = Mapping[str, np.ndarray]
Tables: TypeAlias = Mapping[str, Rows]


def read(
  store: client_store.ClientStates | None,
  clients: Sequence[str],
  tables: Iterable[str],
) -> dict[str, dict[str, np.ndarray]]:
  """Read the tables that clients keep, without padding.

  Args:
    store: What clients remember, or None if that is nothing.
    clients: Their names.
    tables: The names of the variables.

  Returns:
    Table to client to rows, `[rows, width]`, of clients who took part; only
    tables that they keep.
  """
  found: dict[str, dict[str, np.ndarray]] = {table: {} for table in tables}
  if store is None:
    return {}
  for client in clients:
    kept: Mapping[str, np.ndarray] = store.client(client) or {}
    for table, of_table in found.items():
      # What stands before a variable's name differs by algorithm.
      leaves = [
        leaf
        for name, leaf in kept.items()
        if name.endswith(f'/{table}') and leaf.ndim == 2
      ]
      number = kept.get(f'num_rows/{table}')
      if leaves and number is not None:
        of_table[client] = leaves[0][: int(number)]
  return {table: of_table for table, of_table in found.items() if of_table}


def clustered(
  centers: drafts_lib.Centers, rows: Rows, table: str, seed: int
) -> dict[str, clustering.KMeans]:
  """Clusters the rows of each client as it does to make its drafts.

  The draws of k-means are others than those of the run.

  Args:
    centers: How drafts are made.
    rows: Client to its rows, of one client at least.
    table: The table.
    seed: Decides what is drawn.

  Returns:
    Client to its clusters, as arrays.
  """
  width = next(iter(rows.values())).shape[1]

  @tf.function(
    input_signature=[
      tf.TensorSpec([None, width], tf.float32),
      tf.TensorSpec([2], tf.int32),
    ]
  )
  def cluster(own: tf.Tensor, seed: tf.Tensor) -> clustering.KMeans:
    return centers.clusters(own, tf.ones(tf.shape(own)[:1], tf.bool), seed)

  seeds = sampling.client_seeds(list(rows), seed, f'drafts of {table}')
  return {
    client: clustering.KMeans(*(leaf.numpy() for leaf in cluster(own, drawn)))
    for (client, own), drawn in zip(rows.items(), seeds, strict=True)
  }


def sent(
  table: str,
  rows: Rows,
  clusters: Mapping[str, clustering.KMeans],
  min_rows: int = 1,
  seed: int = 0,
) -> pd.DataFrame:
  """Measures the drafts that clients send, or would send.

  Args:
    table: The table.
    rows: Client to its rows.
    clusters: Client to its clusters, whose real centers count.
    min_rows: How many rows a draft stands for at least; more than 1 adds the
      kind of those that do.
    seed: Decides which rows are compared with others, of many.

  Returns:
    A row for each draft of each kind.
  """
  frames = [
    pd.DataFrame({CLIENT: client, ROWS: found.counts[found.is_real]})
    for client, found in clusters.items()
  ]
  centers = [found.centers[found.is_real] for found in clusters.values()]
  every = _measured(
    table, CENTERS, pd.concat(frames), np.concatenate(centers), rows, seed
  )
  if min_rows == 1:
    return every
  enough = every[every[ROWS] >= min_rows]
  return pd.concat([every, enough.assign(**{KIND: ENOUGH.format(min_rows)})])


def at_server(
  table: str, kind: str, centers: np.ndarray, rows: Rows, seed: int = 0
) -> pd.DataFrame:
  """Measures the centers that the server holds.

  Args:
    table: The table.
    kind: What they are.
    centers: Floats `[centers, width]`.
    rows: Client to its rows after the same round. A center stands for those
      that are nearest to it.
    seed: Decides which rows are compared with others, of many.

  Returns:
    A row for each center.
  """
  nearest, _ = clustering.assign(
    np.concatenate(list(rows.values())), centers, np.ones(len(centers), bool)
  )
  counts = np.bincount(nearest.numpy(), minlength=len(centers))
  frame = pd.DataFrame({CLIENT: '', ROWS: counts})
  return _measured(table, kind, frame, centers, rows, seed)


def _measured(
  table: str,
  kind: str,
  frame: pd.DataFrame,
  drafts: np.ndarray,
  rows: Rows,
  seed: int,
) -> pd.DataFrame:
  """Add to a frame of drafts what they are, and their distances."""
  all_rows = np.concatenate(list(rows.values()))
  between = nearest_rows.to_nearest_other(all_rows, MOST_ROWS, seed)
  found = frame.reset_index(drop=True)
  found.insert(0, TABLE, table)
  found.insert(1, KIND, kind)
  found[DISTANCE] = nearest_rows.to_nearest(drafts, all_rows)
  found[BETWEEN] = float(np.median(between))
  return found


def summary(frame: pd.DataFrame) -> pd.DataFrame:
  """Sum up drafts by table and kind.

  Args:
    frame: A row for each draft, as above.

  Returns:
    A row for each table and kind that has drafts, with what
    `nearest_rows.Nearness` says of them.
  """
  found = []
  for (table, kind), drafts in frame.groupby([TABLE, KIND], sort=False):
    nearness = nearest_rows.nearness(
      drafts[DISTANCE].to_numpy(), drafts[BETWEEN].iloc[0]
    )
    found.append({TABLE: table, KIND: kind, **nearness._asdict()})
  return pd.DataFrame(found)
