"""Federated alternating least squares for implicit feedback.

A client has interacted with some items and not with others. Its vector
minimizes the weighted squared error over all items, which is one linear solve:
the server sends the Gram matrix of the item table, so that a client needs only
the rows of its own items. The server solves for each item from sums over the
clients that have it, and from the Gram matrix of all clients' vectors.

This is iALS (Hu et al., "Collaborative filtering for implicit feedback
datasets", ICDM 2008), with the regularization of Rendle et al. ("Revisiting the
performance of iALS on item recommendation benchmarks", RecSys 2022), in a
federation as of Ammad-ud-din et al. ("Federated collaborative filtering for
privacy-preserving personalized recommendation system", 2019).

Deviations: the server solves for items exactly, where Ammad-ud-din et al. take
gradient steps. Clients need not all take part in a round: sums of earlier
rounds then count by the weight `memory`, and a client's own earlier part is not
replaced. A round in which no client counts changes nothing.
"""

import collections
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tff_partial import client_state
from tff_partial import evaluation
from tff_partial.client_statistics import check_memory
from tff_partial.client_statistics import Server
from tff_partial.client_statistics import Statistic
from tff_partial.composition import compose
from tff_partial.contexts import ClientContext
from tff_partial.data import splits
from tff_partial.joins.row_aggregations import SumOfRowsFactory
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.solvers.triangles import Packing
from tff_partial.templates import implicit_factors as factors
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import LOCAL


def build_fed_ials(
  model: models.PartialModel,
  *,
  weighting: factors.Weighting = factors.Weighting(),
  memory: float = 0.0,
) -> PartialProcess:
  """Build federated alternating least squares for implicit feedback.

  Args:
    model: The model, from `templates.implicit_factors.build_model`.
    weighting: Weights of unobserved items and of the regularization.
    memory: Weight of the sums of earlier rounds, from 0, for cohorts of all
      clients, to less than 1: about `1 - cohort / clients`.

  Example:
    >>> model = templates.implicit_factors.build_model(1_000, 20)
    >>> process = algorithms.build_fed_ials(model)

  Raises:
    SettingError: If the memory is impossible, or it is another model.
  """
  factors.check_model('build_fed_ials', model)
  weighting.check()
  check_memory(memory)
  num_items, size = model.specs(GLOBAL)[factors.ITEM].shape
  packing = Packing(size)

  def add_users(server: Server, found: Any) -> Server:
    kept = tf.where(found['number'] > 0, memory, 1.0)
    sums = {name: kept * server.state[name] + found[name] for name in found}
    state = collections.OrderedDict(server.state, **sums)
    return server._replace(state=state)

  def solve_items(server: Server, found: tf.Tensor) -> Server:
    counts = tf.reduce_any(found[:, 0] > 0)
    items = tf.where(counts, memory, 1.0) * server.state['items'] + found
    item = _solved(server.state, items, packing, weighting)
    new = {
      factors.ITEM: item,
      factors.GRAM: tf.matmul(item, item, transpose_a=True),
    }
    state = collections.OrderedDict(server.state, items=items)
    return server.with_solved(new, state, counts)

  return compose(
    model,
    client_state=client_state.persist_local,
    work=[
      factors.user_phase(weighting, num_items),
      Phase(train=(), batch_size=100, measured=True),
    ],
    statistics=[
      Statistic(
        'user_sums', lambda client: _of_user(client, packing), update=add_users
      ),
      Statistic(
        'item_sums',
        lambda client: _of_items(client, packing, weighting, num_items),
        join=SumOfRowsFactory(num_items),
        update=solve_items,
      ),
    ],
    server_state=lambda model: _first_state(num_items, packing),
  )


def _first_state(num_items: int, packing: Packing) -> Any:
  """Return the sums over users, and over the users of each item."""
  return collections.OrderedDict(
    number=tf.zeros([]),
    gram=tf.zeros([packing.number]),
    items=tf.zeros([num_items, 1 + packing.number + packing.size]),
  )


def _of_user(
  client: ClientContext, packing: Packing
) -> Mapping[str, tf.Tensor]:
  """Return 1 and the outer product of a client's vector; 0 without examples."""
  user = client.weight(LOCAL, factors.USER)
  has_any = tf.cast(tf.reduce_any(client.counts), tf.float32)
  return collections.OrderedDict(
    number=has_any, gram=has_any * packing.pack(user[:, None] * user)
  )


def _of_items(
  client: ClientContext,
  packing: Packing,
  weighting: factors.Weighting,
  num_items: int,
) -> Any:
  """Return for each interaction the normal equations of its item."""
  user = client.weight(LOCAL, factors.USER)
  left = tf.concat([tf.ones([1]), packing.pack(user[:, None] * user)], 0)
  of_left, of_right = [[0, packing.size]], [[packing.number + 1, 0]]
  ids = tf.where(client.is_real, client.examples['x'], 0)
  weights = client.example_weights
  net = weighting.net(ids, weights, num_items)
  return collections.OrderedDict(
    ids=ids,
    weights=tf.stack([net, weights * client.examples['y']], 1),
    parts=tf.stack([tf.pad(left, of_left), tf.pad(user, of_right)]),
  )


def _solved(
  state: Mapping[str, tf.Tensor],
  items: tf.Tensor,
  packing: Packing,
  weighting: factors.Weighting,
) -> tf.Tensor:
  """Return the items' vectors, float64 `[items, size]`, by sums over users."""
  number, square, right = tf.split(
    tf.cast(items, tf.float64), [1, packing.number, packing.size], 1
  )
  of_all = packing.unpack(tf.cast(state['gram'], tf.float64))
  users = tf.cast(state['number'], tf.float64)
  penalty = weighting.penalty(number, users)
  penalty = tf.where(users > 0, penalty, 1.0)  # Without users, all is zero.
  matrices = packing.unpack(square) + weighting.unobserved * of_all
  matrices += penalty[:, :, None] * tf.eye(packing.size, dtype=tf.float64)
  return tf.linalg.solve(matrices, right[:, :, None])[:, :, 0]


def build_fed_ials_eval(
  model: models.PartialModel,
  *,
  weighting: factors.Weighting = factors.Weighting(),
  split: splits.Split | None = None,
) -> evaluation.Evaluation:
  """Build an evaluation with the vector of each client's support set.

  Args:
    model: The model, from `templates.implicit_factors.build_model`.
    weighting: As in training.
    split: Support and query set; the two halves by default.

  Example:
    >>> model = templates.implicit_factors.build_model(1_000, 20)
    >>> evaluation = algorithms.build_fed_ials_eval(model)

  Raises:
    SettingError: If a weight is impossible, or it is another model.
  """
  factors.check_model('build_fed_ials_eval', model)
  weighting.check()
  num_items, _ = model.specs(GLOBAL)[factors.ITEM].shape
  return evaluation.build_query_evaluation(
    model,
    client_state=client_state.persist_local,
    train=(LOCAL,),
    personalise=factors.user_phase(weighting, num_items),
    split=split,
  )
