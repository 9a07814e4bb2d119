"""What a client remembers from one round to the next.

The state enters and leaves a round as a value placed at clients. No type at the
server contains it.
"""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tff_partial import random_bits
from tff_partial import tiers
from tff_partial.contexts import ClientContext
from tff_partial.model import models


class ClientState(NamedTuple):
  """A rule for what a client remembers.

  Attributes:
    first: (model, seed) -> what a client remembers that never took part.
    recall: (model, remembered, received weights by tier, seed) -> the weights
      that the client holds as a round begins, by tier: LOCAL, and PERSONAL if
      it has a copy of its own.
    keep: (what a client knows after its work) -> what it remembers then.
    is_frozen: Whether local weights may stay as they begin, untrained.
  """

  first: Callable[[models.PartialModel, tf.Tensor], Any]
  recall: Callable[
    [models.PartialModel, Any, tiers.Weights, tf.Tensor], tiers.Weights
  ]
  keep: Callable[[ClientContext], Any]
  is_frozen: bool = False


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
stateless = ClientState(
  first=lambda model, seed: collections.OrderedDict(),
  recall=lambda model, remembered, received, seed: _local(model, seed),
  keep=lambda client: collections.OrderedDict(),
)


def _same_for_all(
  model: models.PartialModel, remembered: Any, received: Any, seed: Any
) -> tiers.Weights:
  del remembered, received, seed
  return _local(model, tf.constant(random_bits.derive(model.seed, 'alike')))


# Nothing is remembered, and all clients begin with the same local weights in
# every round, as with the fixed head of FedBABU.
frozen_init = stateless._replace(recall=_same_for_all, is_frozen=True)

# Local weights are remembered, as in FURL.
persist_local = ClientState(
  first=lambda model, seed: model.initial_weights(tiers.LOCAL, seed),
  recall=lambda model, remembered, received, seed: collections.OrderedDict(
    [(tiers.LOCAL, remembered)] if tiers.LOCAL in model.tiers else []
  ),
  keep=lambda client: client.weights.get(
    tiers.LOCAL, collections.OrderedDict()
  ),
)


# Where a client's state has the group that it chose.
GROUP = 'group'


def remember_group(client_state: ClientState) -> ClientState:
  """A client remembers also which group it chose; -1 if it never took part.

  No computation reads it: it is there to be looked at (Figure 3 of FedEmbed).

  Args:
    client_state: What else it remembers.
  """
  return client_state._replace(
    first=lambda model, seed: collections.OrderedDict(
      {'held': client_state.first(model, seed), GROUP: tf.constant(-1)}
    ),
    recall=lambda model, remembered, received, seed: client_state.recall(
      model, remembered['held'], received, seed
    ),
    keep=lambda client: collections.OrderedDict(
      {'held': client_state.keep(client), GROUP: client.group}
    ),
  )


def _first_personal(model: models.PartialModel, seed: tf.Tensor) -> Any:
  kept = collections.OrderedDict(initialized=tf.constant(False))
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
  initialized = held.pop('initialized')
  held[tiers.PERSONAL] = collections.OrderedDict(
    (name, tf.where(initialized, own, received[tiers.GLOBAL][name]))
    for name, own in held[tiers.PERSONAL].items()
  )
  return held


def _keep_personal(client: ClientContext) -> Any:
  kept = collections.OrderedDict(initialized=tf.constant(True))
  for tier in (tiers.LOCAL, tiers.PERSONAL):
    if tier in client.weights:
      kept[tier] = client.weights[tier]
  return kept


# A client remembers a copy of its own of the whole model, as in Ditto. It
# begins as the global weights that the client first receives.
persist_personal = ClientState(
  _first_personal, _recall_personal, _keep_personal
)


def persist_numbers(client_state: ClientState, **first: float) -> ClientState:
  """A client remembers also numbers that are no variables of the model.

  Its phases find them in the tier OTHER.

  Args:
    client_state: What else it remembers.
    **first: Each number's name and first value.
  """
  return ClientState(
    first=lambda model, seed: collections.OrderedDict(
      {
        **client_state.first(model, seed),
        tiers.OTHER: collections.OrderedDict(
          (name, tf.constant(value)) for name, value in first.items()
        ),
      }
    ),
    recall=lambda model, remembered, received, seed: collections.OrderedDict(
      client_state.recall(
        model,
        collections.OrderedDict(
          (name, value)
          for name, value in remembered.items()
          if name != tiers.OTHER
        ),
        received,
        seed,
      ),
      **{tiers.OTHER: remembered[tiers.OTHER]},
    ),
    keep=lambda client: collections.OrderedDict(
      client_state.keep(client), **{tiers.OTHER: client.weights[tiers.OTHER]}
    ),
    is_frozen=client_state.is_frozen,
  )
