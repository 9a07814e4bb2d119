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
from tff_partial.solvers import affine
from tff_partial.solvers import newton
from tff_partial.solvers.exact import Exact
from tff_partial.solvers.exact import Prior
from tff_partial.sparse import lookups


class ExactSolve:
  """Solve of one client for the weights that a phase trains by `Exact`."""

  def __init__(
    self,
    phase: phases.Phase,
    model: lookups.RowModel,
    context: ClientContext,
    part_seed: tf.Tensor,
  ):
    """Choose the examples, of which `part_seed` draws random parts."""
    self._phase = phase
    self._settings = phase.exact or Exact()
    self._model = model
    self._context = context
    batches = client_batches.Batches(
      dataclasses.replace(phase, batch_size=None),
      {**context.examples, 'places': model.places},
      phase.on.choose(context.examples, context.count, part_seed),
      context.seed,
      None,
    )
    self._batch, self._is_real = batches.at(tf.constant(0))
    self._mine = trained_by([phase], context.weights, context.model.state)
    self._flat = affine.Flat(self._mine)

  def solve(self, weights: tiers.Weights) -> newton.Solution:
    """Return the minimum, given the other weights."""
    prior = self._prior(weights)
    return newton.minimize(
      self._settings,
      self._objective(weights),
      lambda vector: self._predict(weights, vector)[0],
      self._flat,
      self._flat.vector(prior.mean),
      prior.precision,
    )

  def solved(self) -> tiers.Weights:
    """Return the weights at the minimum by tier; empty if there are none."""
    if not self._mine:
      return self._mine
    solution = self.solve(self._context.weights)
    found = self._flat.named(solution.weights)
    if self._settings.covariance is not None:
      found.setdefault(tiers.LOCAL, collections.OrderedDict())[
        self._settings.covariance
      ] = solution.covariance
    return found

  def followed(
    self, weights: tiers.Weights, solution: newton.Solution
  ) -> tiers.Weights:
    """Return weights with a minimum that gradients pass through.

    The slope of the objective is zero at the minimum for any value `w` of the
    other weights, so that the minimum moves with them by `- inverse Hessian *
    derivative of the slope by w` (the implicit function theorem). Gradients by
    `w` take one more solve, of as many unknowns as there are weights.

    Args:
      weights: All weights of the client, of which a tape watches some.
      solution: The minimum that `solve` found for them.
    """
    prior = self._prior(weights)
    objective = self._objective(weights)
    mean = self._flat.vector(prior.mean)
    precision = tf.cast(prior.precision, tf.float32)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
      vector = solution.weights
      tape.watch(vector)
      value = objective.value(vector, self._predict(weights, vector)[0])
      value += newton.penalty(precision, vector - mean)
    slope = tape.gradient(value, vector)

    @tf.custom_gradient
    def moved(slope: tf.Tensor) -> tuple[tf.Tensor, Any]:
      return tf.zeros_like(slope), lambda upstream: -solution.solve(upstream)

    named = self._flat.named(solution.weights + moved(slope))
    return replaced(weights, named)

  def _predict(self, weights: tiers.Weights, vector: tf.Tensor) -> Any:
    return self._model.predict(
      self._phase.read(replaced(weights, self._flat.named(vector))),
      self._batch,
      training=False,
      seed=self._context.seed,
    )

  def _objective(self, weights: tiers.Weights) -> newton.Objective:
    """Return the loss, and what is added to it, given the other weights."""
    phase, context, batch = self._phase, self._context, self._batch

    def rest(vector: tf.Tensor, predictions: Any) -> tf.Tensor:
      """Return regularization and terms."""
      found = tf.constant(0.0)
      if context.model.is_regularized:
        for term in self._predict(weights, vector)[1]:
          found += tf.cast(tf.reduce_sum(term), tf.float32)
      known = context._replace(
        weights=replaced(weights, self._flat.named(vector)),
        batch=Batch.of(batch, self._is_real, predictions),
      )
      return found + sum(term(known) for term in phase.terms)

    def loss(predictions: Any) -> Any:
      found = context.model.loss(
        *(batch['y'], predictions, batch['weight'], self._is_real),
        *((), phase.loss),
      )
      if phase.use_model_loss:
        return found
      return dataclasses.replace(found, total=0.0 * found.total)

    return newton.Objective(
      loss,
      rest if phase.terms or context.model.is_regularized else None,
      context.model.sums(phase.loss),
    )

  def _prior(self, weights: tiers.Weights) -> Prior:
    """Return the prior of the weights, with means by tier and name."""
    context = self._context._replace(
      weights=weights, batch=Batch.of(self._batch, self._is_real, None)
    )
    given = Prior(None, self._settings.ridge)
    if self._settings.prior is not None:
      given = self._settings.prior(context)

    def mean_of(tier: str, name: str, tensor: tf.Tensor) -> tf.Tensor:
      if given.mean is not None:
        return tf.reshape(given.mean[name], tf.shape(tensor))
      if tier == tiers.LOCAL:
        return tf.zeros_like(tensor)
      return context.received[tiers.of_model(tier)][name]

    return Prior(tiers.mapped(mean_of, self._mine), given.precision)
