"""Federated alternating least squares with differential privacy of users.

The model is that of `fed_als.py`, and so is what clients compute. What they
send differs: as one message, bounded as a whole and noised by the aggregator,

1.  in the first round a count of the items that they rated, and
2.  in each later one, for each of these items, its residual times the user's
    bias (1) and vector: half the slope of the expected squared error.

Users' vectors have a prior of unit variance, so that the second moments over an
item's raters are about their number times the unit matrix: no matrices need to
be released. The server makes a Newton step by the noisy counts, averages it
with those of earlier rounds, and shrinks each item by the noise that it knows
(`templates/private_items.py`). Matrices cost DP-ALS (Chien et al., "Private
alternating least squares", ICML 2021) most of its budget.

Public attributes of items, such as genres, are columns of their vectors that
are never learned: a user's own tastes for them cost no privacy.

A user's ratings have the weight of one over the root of their number, so that
a user with many counts for as much as one with few. The bound is public: the
message of a user whose errors are about one star has the norm 1.
"""

import collections
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial import client_state
from tff_partial.client_statistics import Join
from tff_partial.client_statistics import Server
from tff_partial.client_statistics import Statistic
from tff_partial.composition import Aggregation
from tff_partial.composition import compose
from tff_partial.contexts import ClientContext
from tff_partial.dp import clipping
from tff_partial.errors import PrivacyError
from tff_partial.errors import SettingError
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.solvers.triangles import Packing
from tff_partial.templates import rating_posteriors as posteriors
from tff_partial.templates.private_items import PrivateItems
from tff_partial.tiers import GLOBAL

# A message's parts: norms of the rows and of the mean squared error, together
# at most 1, and the error that is as long as that.
_ROWS, _ERROR, _LARGEST_ERROR = 0.99, 0.1, 2.0
# Variance of users' biases, and that of the noise until it is estimated.
_BIAS, _NOISE = 0.2, 0.8
_LEAST_NOISE = 0.05
# The releases of about the last quarter of the rounds are averaged.
_LATEST = 4.0


def build_fed_als_private(
  model: models.PartialModel,
  *,
  aggregation: Aggregation,
  attributes: np.ndarray | None = None,
) -> PartialProcess:
  """Build federated alternating least squares with noise.

  Args:
    model: The model, from `templates.rating_posteriors.build_model`, with as
      many factors as are learned and attributes together.
    aggregation: With the aggregator that clips and noises: `plan.mean()` of a
      plan with a `FixedClip`. All clients should take part in each round.
    attributes: Attributes of items, `[items, width]`, about from 0 to 1. They
      must be public, known without any rating.

  Example:
    >>> model = templates.rating_posteriors.build_model(1_000, 2)
    >>> process = algorithms.build_fed_als_private(
    ...   model, aggregation=tff_partial.Aggregation(aggregator=plan.mean())
    ... )

  Raises:
    SettingError: If the model is another, or the attributes do not fit it.
    PrivacyError: If the aggregator is not such a mean.
  """
  posteriors.check_model(model)
  mechanism = getattr(aggregation.aggregator, 'mechanism', None)
  clip = getattr(mechanism, 'clipping', None)
  if mechanism is None or not isinstance(clip, clipping.FixedClip):
    raise PrivacyError(
      'build_fed_als_private: expected the mean of a plan with a fixed clip, '
      f'found {aggregation.aggregator}. Pass the aggregator plan.mean(), and '
      'the plan FixedClip(1.0); with the binaries --dp=central and --clip=1.'
    )
  clients = mechanism.clients_per_round
  if posteriors.tables_of(model.specs(GLOBAL)):
    raise SettingError(
      'build_fed_als_private: nothing is learned of what attributes of users '
      'say. Make the model without user_attributes.'
    )
  num_items, size = model.specs(GLOBAL)[posteriors.ITEM].shape
  items = PrivateItems(num_items, size - 1, attributes)
  # Of a mean of messages that are as long as the clip.
  scale = clients / clip.clip

  def update(server: Server, found: Any) -> Server:
    found = tf.nest.map_structure(lambda mean: scale * mean, found)
    return _update(server, found, items, mechanism.noise_multiplier, clients)

  return compose(
    model,
    client_state=client_state.persist_local,
    work=[
      *posteriors.posterior_phases(),
      Phase(train=(), batch_size=100, measured=True),
    ],
    aggregation=aggregation,
    statistics=[
      Statistic(
        'sums',
        lambda client: tf.nest.map_structure(
          lambda part: clip.clip * part, _message(client, items)
        ),
        join=Join.WITH_UPDATE,
        update=update,
      ),
    ],
    server_state=lambda model: _first_state(items),
  )


def _first_state(items: PrivateItems) -> Any:
  """Return the server's state before the first release."""
  learned = [items.num_items, items.num_factors + 1]
  return collections.OrderedDict(
    round=tf.zeros([]),
    count=tf.zeros([items.num_items]),
    estimate=tf.zeros(learned),
    variance=tf.zeros(learned),
  )


def _message(client: ClientContext, items: PrivateItems) -> Any:
  """Return a client's message, whose norm is at most 1."""
  mean, covariance = posteriors.moments(client)
  weight = client.example_weights
  number = tf.maximum(tf.reduce_sum(weight), 1.0)
  is_real = weight > 0
  square = tf.reduce_sum(posteriors.excess(client)) / number
  found = client.predict()[posteriors.RATING]
  error = (client.examples['y'] - found) / client.weight(
    GLOBAL, posteriors.UNIT
  )
  # Residuals times the user's vector, less what its uncertainty adds to the
  # second moments.
  ids = tf.where(is_real, posteriors.items_of(client.examples['x']), 0)
  item = tf.gather(client.weight(GLOBAL, posteriors.ITEM), ids)
  learned = slice(1, items.num_factors + 1)
  slopes = error[:, None] * mean[learned] - tf.matmul(
    posteriors.with_one(item), covariance[:, learned]
  )
  slopes = tf.concat([error[:, None], slopes], 1)
  counts = tf.one_hot(tf.zeros_like(ids), items.num_factors + 1)
  is_first = tf.equal(client.server['round'], 0.0)
  by_item = tf.gather(items.weights(client.server['count']), ids)
  rows = tf.where(is_first, counts, by_item[:, None] * slopes)
  rows *= (weight / tf.sqrt(number))[:, None]
  rows = tf.math.unsorted_segment_sum(
    tf.where(is_real[:, None], rows, 0.0), ids, items.num_items
  )
  norm = tf.maximum(tf.norm(rows), _ROWS)
  has_any = tf.cast(tf.reduce_any(is_real), tf.float32)
  bounded = tf.clip_by_value(square / _LARGEST_ERROR, 0.0, 1.0)
  return collections.OrderedDict(
    rows=_ROWS / norm * rows, error=_ERROR * has_any * bounded
  )


def _update(
  server: Server,
  found: Any,
  items: PrivateItems,
  stddev: float,
  clients: float,
) -> Server:
  """Update items by sums of messages.

  Args:
    server: The server's weights and state.
    found: The sums.
    items: What is known of the items.
    stddev: Standard deviation of the noise of each number.
    clients: Number of messages.
  """
  weights, state = server.weights[GLOBAL], server.state
  is_first = tf.equal(state['round'], 0.0)
  item, noise = weights[posteriors.ITEM], weights[posteriors.NOISE]
  learned = items.num_factors + 1
  state = collections.OrderedDict(
    state, count=tf.where(is_first, found['rows'][:, 0], state['count'])
  )
  share = tf.minimum(_LATEST / tf.maximum(state['round'], 1.0), 1.0)
  refined, mean, variance = items.refined(
    state, item[:, :learned], found['rows'], share, stddev, noise
  )
  has_any = tf.reduce_sum(state['count']) > 0
  error = found['error'] * _LARGEST_ERROR / (_ERROR * clients)
  error = tf.maximum(error, _LEAST_NOISE)
  noise += share * (error - noise)
  noise = tf.where(is_first, _NOISE, noise)
  packing = Packing(item.shape[1])
  covariance = tf.linalg.diag(
    tf.pad(variance, [[0, 0], [0, item.shape[1] - learned]])
  )
  precision = tf.linalg.diag(
    tf.concat([[1.0 / _BIAS], tf.ones([item.shape[1] - 1])], 0)
  )
  held = weights[posteriors.COVARIANCE]
  new = {
    posteriors.ITEM: tf.where(
      is_first,
      items.first(item),
      tf.concat([mean, item[:, learned:]], 1),
    ),
    posteriors.COVARIANCE: tf.where(is_first, held, packing.pack(covariance)),
    posteriors.NOISE: noise,
    posteriors.USER_PRECISION: noise * precision,
  }
  state = tf.nest.map_structure(
    lambda old, new: tf.where(is_first, old, new), state, refined
  )
  state['round'] = server.state['round'] + 1.0
  return server.with_solved(new, state, has_any)
