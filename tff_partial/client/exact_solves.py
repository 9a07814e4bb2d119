"""A phase of a client that solves for weights instead of taking steps."""

import collections
import dataclasses
from typing import Any

import tensorflow as tf

from tff_partial import phases
from tff_partial import tiers
from tff_partial.client import client_batches
from tff_partial.client.descent import replaced
from tff_partial.client.descent import trained_by
from tff_partial.contexts import Batch
from tff_partial.contexts import ClientContext
from tff_partial.data import splits
from tff_partial.solvers import affine
from tff_partial.solvers import newton
from tff_partial.solvers.exact import Exact
from tff_partial.solvers.exact import Prior
from tff_partial.sparse import lookups


def solved(
  phase: phases.Phase,
  model: lookups.RowModel,
  context: ClientContext,
  chosen: splits.Chosen,
) -> tiers.Weights:
  """Solve for the weights that a phase trains by `Exact`.

  Args:
    phase: The phase.
    model: The client's model.
    context: The client's context before it.
    chosen: The examples that it chose.

  Returns:
    The weights at the minimum, by tier; empty if the model has none of them.
  """
  settings, mine = phase.exact, trained_by([phase], context.weights)
  if settings is None or not mine:
    return mine
  batches = client_batches.Batches(
    dataclasses.replace(phase, batch_size=None),
    {**context.examples, 'places': model.places},
    chosen,
    context.seed,
    None,
  )
  batch, is_real = batches.at(tf.constant(0))
  flat = affine.Flat(mine)
  prior = _prior(
    settings, mine, context._replace(batch=Batch.of(batch, is_real, None))
  )

  def predict(vector: tf.Tensor) -> tuple[Any, Any]:
    return model.predict(
      phase.read(replaced(context.weights, flat.named(vector))),
      batch,
      training=False,
      seed=context.seed,
    )

  def rest(vector: tf.Tensor, predictions: Any) -> tf.Tensor:
    """Return regularization and terms."""
    found = tf.constant(0.0)
    if context.model.is_regularized:
      for term in predict(vector)[1]:
        found += tf.cast(tf.reduce_sum(term), tf.float32)
    known = context._replace(
      weights=replaced(context.weights, flat.named(vector)),
      batch=Batch.of(batch, is_real, predictions),
    )
    return found + sum(term(known) for term in phase.terms)

  def loss(predictions: Any) -> Any:
    found = context.model.loss(
      *(batch['y'], predictions, batch['weight'], is_real, (), phase.loss)
    )
    if phase.use_model_loss:
      return found
    return dataclasses.replace(found, total=0.0 * found.total)

  solution = newton.minimize(
    settings,
    newton.Objective(
      loss,
      rest if phase.terms or context.model.is_regularized else None,
      context.model.sums(phase.loss),
    ),
    lambda vector: predict(vector)[0],
    flat,
    flat.vector(prior.mean),
    prior.precision,
  )
  found = flat.named(solution.weights)
  if settings.covariance is not None:
    found.setdefault(tiers.LOCAL, collections.OrderedDict())[
      settings.covariance
    ] = solution.covariance
  return found


def _prior(
  settings: Exact, mine: tiers.Weights, context: ClientContext
) -> Prior:
  """Return the prior of the weights, with means by tier and name."""
  given = Prior(None, settings.ridge)
  if settings.prior is not None:
    given = settings.prior(context)

  def mean_of(tier: str, name: str, tensor: tf.Tensor) -> tf.Tensor:
    if given.mean is not None:
      return tf.reshape(given.mean[name], tf.shape(tensor))
    if tier == tiers.LOCAL:
      return tf.zeros_like(tensor)
    return context.received[tiers.of_model(tier)][name]

  means = collections.OrderedDict(
    (
      tier,
      collections.OrderedDict(
        (n, mean_of(tier, n, t)) for n, t in named.items()
      ),
    )
    for tier, named in mine.items()
  )
  return Prior(means, given.precision)
