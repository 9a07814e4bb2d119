"""What a client remembers from one round to the next.

The state enters and leaves a round as a value placed at clients. No type at the
server contains it.
"""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tff_partial import local_training
from tff_partial import models
from tff_partial import random_bits
from tff_partial import tiers


class PrivateRule(NamedTuple):
  """How what clients remember depends on the cohort: FURL, Eq. 3.

  It makes a client's new state from its old one, from the one that its training
  came to, and from summaries of the clients' data that the server adds up. The
  summaries are sent, so they must tell nothing private.

  Attributes:
    summarize: (what the phases made, the client's weight) -> a structure of
      tensors.
    settle: (remembered before, remembered after training, own summary, sum of
      all summaries) -> remembered.
  """

  summarize: Callable[[local_training.Worked, tf.Tensor], Any]
  settle: Callable[[Any, Any, Any, Any], Any]


class Memory(NamedTuple):
  """A rule for what a client remembers.

  Attributes:
    first: (model, seed) -> what a client remembers that never took part.
    recall: (model, remembered, received weights by tier, seed) -> the weights
      that the client holds as a round begins, by tier: LOCAL, and PERSONAL if
      it has a copy of its own.
    keep: (what the phases made) -> what it remembers after the round.
    rule: What else decides what it remembers, or None.
    leaves_local: Whether local weights may stay as they begin, untrained.
  """

  first: Callable[[models.PartialModel, tf.Tensor], Any]
  recall: Callable[
    [models.PartialModel, Any, tiers.Weights, tf.Tensor], tiers.Weights
  ]
  keep: Callable[[local_training.Worked], Any]
  rule: PrivateRule | None = None
  leaves_local: bool = False


def _local(
  model: models.PartialModel, seed: tf.Tensor
) -> collections.OrderedDict[str, Any]:
  """First local weights as a tier, or nothing if the model has none."""
  if tiers.LOCAL not in model.tiers:
    return collections.OrderedDict()
  return collections.OrderedDict(
    [(tiers.LOCAL, model.initial_weights(tiers.LOCAL, seed))]
  )


# Nothing is remembered: local weights begin anew, as in FedRecon.
forget = Memory(
  first=lambda model, seed: collections.OrderedDict(),
  recall=lambda model, remembered, received, seed: _local(model, seed),
  keep=lambda worked: collections.OrderedDict(),
)


def _same_for_all(
  model: models.PartialModel, remembered: Any, received: Any, seed: Any
) -> tiers.Weights:
  del remembered, received, seed
  return _local(model, tf.constant(random_bits.derive(model.seed, 'alike')))


# Nothing is remembered, and all clients begin with the same local weights in
# every round, as with the fixed head of FedBABU.
begin_alike = forget._replace(recall=_same_for_all, leaves_local=True)

# Local weights are remembered, as in FURL.
keep_local = Memory(
  first=lambda model, seed: model.initial_weights(tiers.LOCAL, seed),
  recall=lambda model, remembered, received, seed: collections.OrderedDict(
    [(tiers.LOCAL, remembered)] if tiers.LOCAL in model.tiers else []
  ),
  keep=lambda worked: worked.weights.get(
    tiers.LOCAL, collections.OrderedDict()
  ),
)


# Where a client's state has the group that it chose.
GROUP = 'group'


def remember_group(memory: Memory) -> Memory:
  """A client remembers also which group it chose; -1 if it never took part.

  No computation reads it: it is there to be looked at (Figure 3 of FedEmbed).

  Args:
    memory: What else it remembers.
  """
  return memory._replace(
    first=lambda model, seed: collections.OrderedDict(
      {'held': memory.first(model, seed), GROUP: tf.constant(-1)}
    ),
    recall=lambda model, remembered, received, seed: memory.recall(
      model, remembered['held'], received, seed
    ),
    keep=lambda worked: collections.OrderedDict(
      {'held': memory.keep(worked), GROUP: worked.group}
    ),
  )


def _first_personal(model: models.PartialModel, seed: tf.Tensor) -> Any:
  kept = collections.OrderedDict(took_part=tf.constant(False))
  kept.update(_local(model, seed))
  kept[tiers.PERSONAL] = collections.OrderedDict(
    (name, tf.zeros(spec.shape, spec.dtype))
    for name, spec in model.specs(tiers.GLOBAL).items()
  )
  return kept


def _recall_personal(
  model: models.PartialModel,
  remembered: Any,
  received: tiers.Weights,
  seed: tf.Tensor,
) -> tiers.Weights:
  held = collections.OrderedDict(remembered)
  took_part = held.pop('took_part')
  held[tiers.PERSONAL] = collections.OrderedDict(
    (name, tf.where(took_part, own, received[tiers.GLOBAL][name]))
    for name, own in held[tiers.PERSONAL].items()
  )
  return held


def _keep_personal(worked: local_training.Worked) -> Any:
  kept = collections.OrderedDict(took_part=tf.constant(True))
  for tier in (tiers.LOCAL, tiers.PERSONAL):
    if tier in worked.weights:
      kept[tier] = worked.weights[tier]
  return kept


# A client remembers a copy of its own of the whole model, as in Ditto. It
# begins as the global weights that the client first receives.
keep_personal = Memory(_first_personal, _recall_personal, _keep_personal)


def _share_of_step(before: Any, after: Any, own: Any, total: Any) -> Any:
  share = tf.math.divide_no_nan(own, total)
  return tf.nest.map_structure(
    lambda old, new: old + tf.cast(share, old.dtype) * (new - old),
    before,
    after,
  )


# Eq. 6 of FURL: a client keeps only that share of its own step which is its
# share of the cohort's examples, as plain FedAvg over all users' rows does.
scaled_by_share = PrivateRule(
  summarize=lambda worked, weight: weight, settle=_share_of_step
)
