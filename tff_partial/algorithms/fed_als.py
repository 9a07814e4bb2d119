"""Federated alternating least squares, in its variational form.

The model of ratings is `r = mean + b_u + m_i + <u, v_i> + noise`. A client's
local weights are the posterior of its bias and vector: their mean, which is one
linear solve (`Exact`), and their covariance. The server keeps the posterior of
each item's bias and vector, which it solves from sums that clients send for the
items that they rated; the priors of users and items, and the variance of the
noise, are estimated again in each round. Only the number of factors has to be
chosen, and predictions have error bars.

This is the variational Bayes of Lim and Teh ("Variational Bayesian approach to
movie rating prediction", KDD Cup 2007), with full covariances; with those of
items zero it is alternating least squares (Zhou et al., 2008), whose federated
form is in Chien et al. (ICML 2021).

Deviations: clients need not all take part in a round. Sums of earlier rounds
then count by the weight `memory`, as in incremental EM (Neal and Hinton, 1998),
but a client's own earlier part is not replaced. A round in which no client
counts changes nothing.
"""

import collections
from typing import Any

import numpy as np
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
from tff_partial.templates import private_items
from tff_partial.templates import rating_posteriors as posteriors
from tff_partial.tiers import GLOBAL

# Smallest variances of the noise and of users, in units: below, sums of float32
# cancel, as where the model explains all ratings.
_LEAST = 1e-5


def build_fed_als(
  model: models.PartialModel,
  *,
  memory: float = 0.0,
  attributes: np.ndarray | None = None,
) -> PartialProcess:
  """Build variational federated alternating least squares.

  Args:
    model: The model, from `templates.rating_posteriors.build_model`.
    memory: Weight of the sums of earlier rounds, from 0, for cohorts of all
      clients, to less than 1: about `1 - cohort / clients`.
    attributes: Attributes of items, `[items, width]`, roughly from 0 to 1, such
      as genres: the mean of an item's prior follows them, also if the item has
      no ratings. Those of users are in the model.

  Example:
    >>> model = templates.rating_posteriors.build_model(1_000, 20)
    >>> process = algorithms.build_fed_als(model)

  Raises:
    SettingError: If the memory is impossible, it is another model, or the
      attributes do not fit it.
  """
  posteriors.check_model('build_fed_als', model)
  check_memory(memory)
  num_items, size = model.specs(GLOBAL)[posteriors.ITEM].shape
  packing = Packing(size)
  known = private_items.checked(attributes, num_items)
  specs = model.specs(GLOBAL)
  of_user = 1 + sum(
    specs[name].shape[0] for name in posteriors.tables_of(specs)
  )

  def first_state(model: models.PartialModel) -> Any:
    del model
    return collections.OrderedDict(
      users=collections.OrderedDict(
        number=tf.zeros([]),
        examples=tf.zeros([]),
        error=tf.zeros([]),
        known=tf.zeros([of_user, of_user]),
        mean=tf.zeros([of_user, size]),
        square=tf.zeros([size, size]),
      ),
      items=tf.zeros([num_items, packing.number + size]),
    )

  return compose(
    model,
    client_state=client_state.persist_local,
    work=[
      *posteriors.posterior_phases(),
      Phase(train=(), batch_size=100, measured=True),
    ],
    statistics=[
      Statistic(
        'user_sums',
        _user_sums,
        # Priors forget faster than the sums of single items.
        update=lambda server, found: _update_priors(
          server, found, min(memory, 0.9)
        ),
      ),
      Statistic(
        'item_sums',
        lambda client: _item_sums(client, packing),
        join=SumOfRowsFactory(num_items),
        update=lambda server, found: _update_items(
          server, found, memory, packing, known
        ),
      ),
    ],
    server_state=first_state,
  )


def build_fed_als_eval(
  model: models.PartialModel, *, split: splits.Split | None = None
) -> evaluation.Evaluation:
  """Build an evaluation with the posterior of each client's support set.

  Args:
    model: The model, from `templates.rating_posteriors.build_model`.
    split: Support and query set; the two halves by default.

  Example:
    >>> model = templates.rating_posteriors.build_model(1_000, 20)
    >>> evaluation = algorithms.build_fed_als_eval(model)
  """
  posteriors.check_model('build_fed_als_eval', model)
  return evaluation.build_query_evaluation(
    model,
    client_state=client_state.persist_local,
    before=posteriors.posterior_phases(),
    split=split,
  )


def _user_sums(client: ClientContext) -> Any:
  """Return what priors and the noise are estimated from."""
  mean, covariance = posteriors.moments(client)
  number = tf.reduce_sum(client.example_weights)
  counts = tf.cast(number > 0, tf.float32)
  known = counts * posteriors.known_of(client)
  return collections.OrderedDict(
    number=counts,
    examples=number,
    error=tf.reduce_sum(posteriors.excess(client)),
    known=known[:, None] * known,
    mean=known[:, None] * mean,
    square=counts * (mean[:, None] * mean + covariance),
  )


def _item_sums(client: ClientContext, packing: Packing) -> Any:
  """Return a row for each rating: the normal equations of its item."""
  mean, covariance = posteriors.moments(client)
  second = mean[:, None] * mean + covariance
  one = posteriors.with_one(mean)
  # E[(1, u)(1, u)'] and E[(1, u) b].
  square = tf.concat(
    [one[None], tf.concat([one[1:, None], second[1:, 1:]], 1)], 0
  )
  by_bias = tf.concat([mean[:1], second[1:, 0]], 0)
  labels = client.examples['y'] - client.weight(GLOBAL, posteriors.MEAN)
  labels /= client.weight(GLOBAL, posteriors.UNIT)
  triangle, is_real = packing.pack(square), client.is_real[:, None]
  weights = tf.stack([tf.ones_like(labels), labels], 1)
  weights *= client.example_weights[:, None]
  return collections.OrderedDict(
    ids=tf.where(client.is_real, posteriors.items_of(client.examples['x']), 0),
    weights=tf.where(is_real, weights, 0.0),
    parts=tf.stack(
      [
        tf.concat([triangle, -by_bias], 0),
        tf.concat([tf.zeros_like(triangle), one], 0),
      ]
    ),
  )


def _update_priors(server: Server, found: Any, memory: float) -> Server:
  """Estimate the users' prior and the noise from sums over users."""
  counts = found['number'] > 0
  kept = tf.where(counts, memory, 1.0)
  sums = tf.nest.map_structure(
    lambda old, new: kept * old + new, server.state['users'], found
  )
  number = tf.maximum(sums['number'], 1.0)
  known, right, square = (
    tf.cast(sums[name], tf.float64) for name in ('known', 'mean', 'square')
  )
  has_any = sums['number'] > square.shape[0]
  known = tf.where(has_any, known, tf.eye(known.shape[0], dtype=known.dtype))
  means = tf.linalg.solve(known + private_items.ridge(known.shape[0]), right)
  explained = tf.matmul(right, means, transpose_a=True)
  fitted = tf.matmul(means, tf.matmul(known, means), transpose_a=True)
  covariance = square - explained - tf.transpose(explained) + fitted
  unit = tf.eye(square.shape[0], dtype=tf.float64)
  covariance = covariance / tf.cast(number, tf.float64) + _LEAST * unit
  noise = tf.maximum(sums['error'] / tf.maximum(sums['examples'], 1.0), _LEAST)
  precision = tf.linalg.inv(tf.where(has_any, covariance, unit))
  tables = posteriors.tables_of(server.weights[GLOBAL])
  sizes = [server.weights[GLOBAL][name].shape[0] for name in tables]
  mean, *of_values = tf.split(means, [1, *sizes])
  new = {
    posteriors.USER_MEAN: mean[0],
    **dict(zip(tables, of_values, strict=True)),
    posteriors.USER_PRECISION: noise * tf.cast(precision, tf.float32),
    posteriors.NOISE: noise,
  }
  state = collections.OrderedDict(server.state, users=sums)
  return server.with_solved(new, state, has_any & counts)


def _update_items(
  server: Server,
  found: tf.Tensor,
  memory: float,
  packing: Packing,
  known: np.ndarray,
) -> Server:
  """Solve for the items' posteriors from sums over their raters."""
  counts = tf.reduce_any(found[:, 0] > 0)
  sums = tf.where(counts, memory, 1.0) * server.state['items'] + found
  weights = server.weights[GLOBAL]
  noise = tf.cast(weights[posteriors.NOISE], tf.float64)
  totals = tf.cast(sums, tf.float64)
  square = packing.unpack(totals[:, : packing.number])
  right = totals[:, packing.number :]
  mean, precision = _items_prior(server, packing, known)
  inverse = tf.linalg.inv(square + precision)
  item = tf.linalg.matvec(inverse, right + tf.matmul(mean, precision))
  new = {
    posteriors.ITEM: item,
    posteriors.COVARIANCE: packing.pack(noise * inverse),
  }
  state = collections.OrderedDict(server.state, items=sums)
  return server.with_solved(new, state, counts)


def _items_prior(
  server: Server, packing: Packing, known: np.ndarray
) -> tuple[tf.Tensor, tf.Tensor]:
  """Estimate the items' prior from the posteriors of the round before.

  Return means, `[items, size]`, and the precision in units of the noise's,
  `[size, size]`; zeros and the unit matrix before the first round. Attributes
  are `[items, width]`.
  """
  weights = server.weights[GLOBAL]
  item = tf.cast(weights[posteriors.ITEM], tf.float64)
  is_rated = tf.cast(server.state['items'][:, :1] > 0, tf.float64)
  has_any = tf.reduce_any(is_rated > 0)
  number = tf.maximum(tf.reduce_sum(is_rated), 1.0)
  known = tf.concat([tf.ones_like(is_rated), known], 1)
  mean = private_items.regressed(known, item, is_rated)
  centred = is_rated * (item - mean)
  spread = tf.matmul(centred, centred, transpose_a=True)
  held = tf.cast(weights[posteriors.COVARIANCE], tf.float64)
  spread += packing.unpack(tf.reduce_sum(is_rated * held, 0))
  unit = tf.eye(packing.size, dtype=tf.float64)
  noise = tf.cast(weights[posteriors.NOISE], tf.float64)
  precision = noise * tf.linalg.inv(tf.where(has_any, spread / number, unit))
  precision = tf.where(has_any, precision, unit)
  return tf.where(has_any, mean, 0.0), precision
