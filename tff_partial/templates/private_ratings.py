"""Rounds in which private clients send one bounded message of their ratings.

As one message, bounded as a whole and noised by the aggregator, clients send a
count of the items that they rated in the first round, and rows for these items
in each later one: which rows, and what the server learns from noisy sums of
them, is the algorithm's. `fed_als_private.py` says the rest.
"""

import collections
from collections.abc import Callable
import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial import client_state
from tff_partial.client_statistics import Join
from tff_partial.client_statistics import Server
from tff_partial.client_statistics import Statistic
from tff_partial.composition import Aggregation
from tff_partial.composition import check_aggregation
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


def compose_released(
  builder: str,
  model: models.PartialModel,
  aggregation: Aggregation,
  attributes: np.ndarray | None,
  *,
  rows: Callable[[ClientContext, PrivateItems], tf.Tensor],
  refined: Callable[..., tuple[Any, tf.Tensor, tf.Tensor]],
) -> PartialProcess:
  """Compose clients that solve for their posterior and send one message of it.

  Args:
    builder: Name of the builder, for errors.
    model: The model.
    aggregation: The aggregator that clips and noises.
    attributes: Attributes of items.
    rows: (a client after its work, the items) -> what it says of each of its
      ratings' items, `[capacity, width]`.
    refined: As `PrivateItems.refined`, of sums of these rows.

  Raises:
    SettingError: If the model is another, or the attributes do not fit it.
    PrivacyError: If the aggregator is no mean of a plan with a `FixedClip`.
  """
  check_aggregation(aggregation)
  posteriors.check_model(builder, model)
  mechanism = getattr(aggregation.aggregator, 'mechanism', None)
  clip = getattr(mechanism, 'clipping', None)
  if mechanism is None or not isinstance(clip, clipping.FixedClip):
    raise PrivacyError(
      f'{builder}: expected the mean of a plan with a fixed clip, '
      f'found {aggregation.aggregator}. Pass the aggregator plan.mean(), and '
      'the plan FixedClip(1.0); with the binaries --dp=central and --clip=1.'
    )
  clients = mechanism.clients_per_round
  if posteriors.tables_of(model.specs(GLOBAL)):
    raise SettingError(
      f'{builder}: nothing is learned of what attributes of users, or the '
      'items that they rated, say. Make the model without user_attributes and '
      'rated_items.'
    )
  num_items, size = model.specs(GLOBAL)[posteriors.ITEM].shape
  items = PrivateItems(num_items, size - 1, attributes)
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
          lambda part: clip.clip * part,
          _message(client, items, rows(client, items)),
        ),
        join=Join.WITH_UPDATE,
        update=functools.partial(
          _update,
          items=items,
          refine=functools.partial(refined, items),
          stddev=mechanism.noise_multiplier,
          clients=clients,
          clip=clip.clip,
        ),
      )
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


def items_rated(client: ClientContext) -> tf.Tensor:
  """Return the items of a client's ratings, `[capacity]`; 0 for padding."""
  ids = posteriors.items_of(client.examples['x'])
  return tf.where(client.counts, ids, 0)


def _message(
  client: ClientContext, items: PrivateItems, rows: tf.Tensor
) -> Any:
  """Return a client's message, whose norm is at most 1."""
  weight = client.example_weights
  number = tf.maximum(tf.reduce_sum(weight), 1.0)
  is_real = weight > 0
  square = tf.reduce_sum(posteriors.excess(client)) / number
  ids = items_rated(client)
  counts = tf.one_hot(tf.zeros_like(ids), rows.shape[1])
  is_first = tf.equal(client.server['round'], 0.0)
  by_item = tf.gather(items.weights(client.server['count']), ids)
  rows = tf.where(is_first, counts, by_item[:, None] * rows)
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
  refine: Callable[..., tuple[Any, tf.Tensor, tf.Tensor]],
  stddev: float,
  clients: float,
  clip: float,
) -> Server:
  """Update items by the mean of messages.

  Args:
    server: The server's weights and state.
    found: The mean.
    items: What is known of the items.
    refine: Learns of them from sums, as `PrivateItems.refined`.
    stddev: Standard deviation of the noise of each number.
    clients: Number of messages.
    clip: Length of a message of norm 1.
  """
  scale = clients / clip
  found = tf.nest.map_structure(lambda mean: scale * mean, found)
  weights, state = server.weights[GLOBAL], server.state
  is_first = tf.equal(state['round'], 0.0)
  item, noise = weights[posteriors.ITEM], weights[posteriors.NOISE]
  learned = items.num_factors + 1
  state = collections.OrderedDict(
    state, count=tf.where(is_first, found['rows'][:, 0], state['count'])
  )
  share = tf.minimum(_LATEST / tf.maximum(state['round'], 1.0), 1.0)
  refined, mean, variance = refine(
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
      is_first, items.first(item), tf.concat([mean, item[:, learned:]], 1)
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
