"""Drafts of private tables: centers of their rows, and their aggregation.

In HPFL (Wu et al., 2021) the rows of a private table, the vectors of users and
items, never leave a client. Clients send drafts instead: centers of clusters of
these rows. The server aggregates the drafts of all clients into global centers,
and clients pull their rows towards these (Eq. 2).

There are two methods. `ClientCenters` is the paper's: each client clusters its
rows and sends the centers, and the server clusters the collected centers. The
center of one row is that row, and the center of a few is near to them, so that
drafts may reveal the rows that they represent. With `Sums` no client sends
centers: the server sends its centers, a client sums its rows nearest to each,
and the server divides the sums of all clients, one step of Lloyd's algorithm in
each round. Sums may be clipped and noised with the update, and are then
accounted for like it.
"""

import collections
from collections.abc import Sequence
import dataclasses
from typing import Any

import tensorflow as tf

from tff_partial import random_bits
from tff_partial.client_statistics import Join
from tff_partial.client_statistics import Server
from tff_partial.client_statistics import Statistic
from tff_partial.clustering import k_means as clustering
from tff_partial.clustering import row_blocks
from tff_partial.contexts import ClientContext
from tff_partial.contexts import outcome_of
from tff_partial.drafts import row_means
from tff_partial.joins.row_aggregations import CollectRowsFactory
from tff_partial.joins.row_aggregations import IS_REAL
from tff_partial.joins.row_aggregations import ROWS
from tff_partial.model import models
from tff_partial.tiers import LOCAL

# Key of the centers in the server's state, by table.
CENTERS = 'centers'
_SUMS, _COUNTS = 'sums', 'counts'
# A center does not move if fewer rows of all clients than this are near to it.
_LEAST = 0.5


@dataclasses.dataclass(frozen=True)
class ClientCenters:
  """Drafts by clients' centers, which the server clusters again.

  Attributes:
    num_collected: Maximum number of centers of all clients at the server; a
      round of which more are sent is refused.
    num_centers: Maximum number of global centers.
    rows_per_center: Number of rows per center, at a client and again at the
      server; ten in the paper.
    init: Initialization of k-means, one of `clustering.INITS`.
    max_iterations: Maximum number of iterations of k-means.
  """

  num_collected: int
  num_centers: int
  rows_per_center: int = 10
  init: str = clustering.K_MEANS_PLUS_PLUS
  max_iterations: int = 20

  def clusters(
    self, rows: tf.Tensor, is_real: tf.Tensor, seed: tf.Tensor
  ) -> clustering.KMeans:
    """Cluster a client's rows of a table; the real centers are its drafts.

    Args:
      rows: Float `[rows, width]`.
      is_real: bool `[rows]`; False for padding, which comes last.
      seed: Integer `[2]`.
    """
    return clustering.k_means(
      rows,
      is_real,
      is_real[:: self.rows_per_center],
      self._wanted(is_real),
      seed,
      init=self.init,
      max_iterations=self.max_iterations,
    )

  def statistic(self, model: models.PartialModel, table: str) -> Statistic:
    """Return the statistic of a table's drafts."""

    def summarize(client: ClientContext) -> Any:
      seed = random_bits.fold_in(client.seed, f'drafts of {table}')
      found = self.clusters(*_drafted(client, table), seed)
      return collections.OrderedDict(
        {ROWS: found.centers, IS_REAL: found.is_real}
      )

    def update(server: Server, collected: Any) -> Server:
      too_many = tf.debugging.assert_less_equal(
        collected['num_sent'],
        self.num_collected,
        f'{table}: clients sent more centers than num_collected='
        f'{self.num_collected}. Give the most that all of a round send.',
      )
      with tf.control_dependencies([too_many] if too_many is not None else []):
        is_real = tf.identity(collected[IS_REAL])
      seed = tf.constant(random_bits.derive(model.seed, f'centers of {table}'))
      found = clustering.k_means(
        collected[ROWS],
        is_real,
        self.num_centers,
        tf.minimum(self._wanted(is_real), self.num_centers),
        seed,
        init=self.init,
        max_iterations=self.max_iterations,
      )
      before = server.state[CENTERS][table]
      is_any = tf.reduce_any(found.is_real)  # Else no client counts.
      return _with_centers(
        server,
        table,
        tf.where(is_any, found.centers, before[ROWS]),
        tf.where(is_any, found.is_real, before[IS_REAL]),
      )

    return Statistic(
      f'drafts/{table}',
      summarize,
      join=CollectRowsFactory(self.num_collected),
      update=update,
    )

  def _wanted(self, is_real: tf.Tensor) -> tf.Tensor:
    """Return the number of centers for rows, at least 1 if there are any."""
    number = tf.reduce_sum(tf.cast(is_real, tf.int32))
    return -(-number // self.rows_per_center)


@dataclasses.dataclass(frozen=True)
class Sums:
  """Drafts by sums of clients' rows nearest to each of the server's centers.

  In the first round there are no centers yet, and each row is assigned to a
  random one.

  With WITH_UPDATE, clients send shares of their rows instead of counts, and
  instead of sums the differences of their rows from the centers, divided by
  their number of rows, so that a client with many rows counts no more than
  others. Centers move by the means of these differences (`row_means.moved`), by
  less if few rows are near.

  Attributes:
    num_centers: The number of global centers.
    join: How sums are aggregated; WITH_UPDATE clips and noises them like the
      update.
  """

  num_centers: int
  join: Join = Join.SUM

  def statistic(self, model: models.PartialModel, table: str) -> Statistic:
    """Return the statistic of a table's drafts."""
    del model
    by_shares = self.join is Join.WITH_UPDATE

    def summarize(client: ClientContext) -> Any:
      rows, is_real = _drafted(client, table)
      centers = client.server[CENTERS][table]
      sums, counts = clustering.sums_and_counts(
        rows, is_real, centers[ROWS], centers[IS_REAL]
      )
      any_sums, any_counts = _at_random(
        rows,
        is_real,
        self.num_centers,
        random_bits.fold_in(client.seed, f'drafts of {table}'),
      )
      has_centers = tf.reduce_any(centers[IS_REAL])
      sums = tf.where(has_centers, sums, any_sums)
      counts = tf.cast(tf.where(has_centers, counts, any_counts), tf.float32)
      if by_shares:
        number = tf.reduce_sum(counts)
        ways = sums - counts[:, None] * centers[ROWS]
        sums = tf.math.divide_no_nan(ways, number)
        counts = row_means.WEIGHT_SCALE * tf.math.divide_no_nan(counts, number)
      return collections.OrderedDict({_SUMS: sums, _COUNTS: counts})

    def update(server: Server, joined: Any) -> Server:
      before = server.state[CENTERS][table]
      sums, counts = joined[_SUMS], joined[_COUNTS]
      if by_shares:
        rows = row_means.moved(
          before[ROWS], sums, counts, 1.0 / self.num_centers
        )
        # Shares of all rows are zero only if no client counts.
        are_real = before[IS_REAL] | tf.reduce_any(counts != 0.0)
        return _with_centers(server, table, rows, are_real)
      counts_enough = counts >= _LEAST
      means = sums / tf.where(counts_enough, counts, 1.0)[:, None]
      return _with_centers(
        server,
        table,
        tf.where(counts_enough[:, None], means, before[ROWS]),
        counts_enough | before[IS_REAL],
      )

    return Statistic(
      f'drafts/{table}', summarize, join=self.join, update=update
    )


def rows_of(client: ClientContext, table: str) -> tuple[tf.Tensor, tf.Tensor]:
  """Return a client's rows of a local table, and the mask of real ones."""
  rows = client.weight(LOCAL, table)
  is_real = client.rows.get(table)
  if is_real is None:
    is_real = tf.ones(tf.shape(rows)[:1], tf.bool)
  return rows, is_real


def _drafted(client: ClientContext, table: str) -> tuple[tf.Tensor, tf.Tensor]:
  """Return a client's rows, and the mask of those to draft.

  A client that trained on nothing has none: its rows are the random first ones.
  """
  rows, is_real = rows_of(client, table)
  return rows, is_real & (outcome_of(client).num_examples > 0)


def first_centers(
  model: models.PartialModel, tables: Sequence[str], num_centers: int
) -> Any:
  """Return the server's centers before the first round: none is real."""
  specs = model.specs(LOCAL)
  return collections.OrderedDict(
    (
      table,
      collections.OrderedDict(
        {
          ROWS: tf.zeros([num_centers, specs[table].shape[1]]),
          IS_REAL: tf.zeros([num_centers], tf.bool),
        }
      ),
    )
    for table in tables
  )


def toward_centers(
  rows: tf.Tensor, centers: Any, own_share: tf.Tensor, *, by_nearness: bool
) -> tf.Tensor:
  """Move rows towards a mean of all centers (Eq. 2), if there are any.

  Args:
    rows: `[rows, width]`.
    centers: The server's centers of one table.
    own_share: The share of each row that does not move: a scalar, or `[width]`.
    by_nearness: True to weight centers by the inverse of their distance. The
      equation as printed weights them by distance, so that far ones count more.
  """
  is_real = tf.cast(centers[IS_REAL], tf.float32)
  points = centers[ROWS]
  squared = (
    tf.reduce_sum(tf.square(rows), -1)[:, None]
    - 2.0 * tf.matmul(rows, points, transpose_b=True)
    + tf.reduce_sum(tf.square(points), -1)
  )
  distances = tf.sqrt(tf.maximum(squared, 1e-12))
  weights = (1.0 / distances if by_nearness else distances) * is_real
  total = tf.reduce_sum(weights, -1, keepdims=True)
  mean = tf.math.divide_no_nan(tf.matmul(weights, points), total)
  moved = own_share * rows + (1.0 - own_share) * mean
  return tf.where(tf.reduce_any(centers[IS_REAL]), moved, rows)


def _at_random(
  rows: tf.Tensor, is_real: tf.Tensor, number: int, seed: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
  """Return sums and counts of rows that are assigned to random centers."""
  drawn = random_bits.uniform(seed, tf.shape(is_real), 0.0, float(number))
  places = tf.minimum(tf.cast(drawn, tf.int32), number - 1)
  return row_blocks.sums(rows, is_real, places, number)


def _with_centers(
  server: Server, table: str, rows: tf.Tensor, is_real: tf.Tensor
) -> Server:
  state = collections.OrderedDict(server.state)
  state[CENTERS] = collections.OrderedDict(state[CENTERS])
  state[CENTERS][table] = collections.OrderedDict(
    {ROWS: rows, IS_REAL: is_real}
  )
  return server._replace(state=state)
