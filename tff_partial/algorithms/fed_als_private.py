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

import numpy as np
import tensorflow as tf

from tff_partial.composition import Aggregation
from tff_partial.contexts import ClientContext
from tff_partial.model import models
from tff_partial.processes import PartialProcess
from tff_partial.templates import private_ratings
from tff_partial.templates import rating_posteriors as posteriors
from tff_partial.templates.private_items import PrivateItems
from tff_partial.tiers import GLOBAL


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
    attributes: Attributes of items, `[items, width]`, roughly from 0 to 1. They
      must be public, known without any rating.

  Example:
    >>> model = templates.rating_posteriors.build_model(1_000, 2)
    >>> process = algorithms.build_fed_als_private(
    ...   model, aggregation=tff_partial.Aggregation(aggregator=plan.mean())
    ... )

  Raises:
    SettingError: If it is another model, or the attributes do not fit it.
    PrivacyError: If the aggregator is not such a mean.
  """
  return private_ratings.compose_released(
    'build_fed_als_private',
    model,
    aggregation,
    attributes,
    rows=_slopes,
    refined=PrivateItems.refined,
  )


def _slopes(client: ClientContext, items: PrivateItems) -> tf.Tensor:
  """Return residuals times the user's vector, less what its uncertainty adds.

  That is what it adds to the second moments.
  """
  mean, covariance = posteriors.moments(client)
  found = client.predict()[posteriors.RATING]
  error = (client.examples['y'] - found) / client.weight(
    GLOBAL, posteriors.UNIT
  )
  item = tf.gather(
    client.weight(GLOBAL, posteriors.ITEM), private_ratings.items_rated(client)
  )
  learned = slice(1, items.num_factors + 1)
  slopes = error[:, None] * mean[learned] - tf.matmul(
    posteriors.with_one(item), covariance[:, learned]
  )
  return tf.concat([error[:, None], slopes], 1)
