"""Client state, kept from one round to the next.

The state enters and leaves a round as a value placed at clients. No type at the
server contains it.
"""

import collections
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tff_partial import random_bits
from tff_partial import tiers
from tff_partial.contexts import ClientContext
from tff_partial.model import models


class ClientState(NamedTuple):
  """Functions that define a client's state.

  Attributes:
    first: (model, seed) -> the state of a client that never took part.
    recall: (model, state, received weights by tier, seed) -> the weights that
      the client holds when a round begins, by tier: LOCAL, and PERSONAL if it
      has a personal copy.
    keep: (the client's context after its work) -> its new state.
    is_frozen: True if local weights may remain untrained.
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
  """Return first local weights as a tier, or no tier if the model has none."""
  if tiers.LOCAL not in model.tiers:
    return collections.OrderedDict()
  return collections.OrderedDict(
    [(tiers.LOCAL, model.initial_weights(tiers.LOCAL, seed))]
  )


# Nothing is remembered: local weights are initialized again, as in FedRecon.
stateless = ClientState(
  first=lambda model, seed: collections.OrderedDict(),
  recall=lambda model, remembered, received, seed: _local(model, seed),
  keep=lambda client: collections.OrderedDict(),
)


# Nothing is remembered, and all clients start from the same local weights in
# every round, as with the fixed head of FedBABU.
frozen_init = stateless._replace(
  recall=lambda model, remembered, received, seed: _local(
    model, tf.constant(random_bits.derive(model.seed, 'alike'))
  ),
  is_frozen=True,
)

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


# Key of the chosen group in a client's state.
GROUP = 'group'


def remember_group(client_state: ClientState) -> ClientState:
  """Return a state with also the client's group; -1 if it never took part.

  No computation reads it: it is for analysis (Figure 3 of FedEmbed).

  Args:
    client_state: The rest of the state.
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
  kept[tiers.PERSONAL] = zeros_of_global(model)
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


# A client remembers a personal copy of the whole model, as in Ditto. It starts
# from the global weights that the client first receives.
persist_personal = ClientState(
  _first_personal, _recall_personal, _keep_personal
)


def _keep_trained(client: ClientContext) -> Any:
  own = {tiers.PERSONAL: client.weights[tiers.GLOBAL]}
  weights = collections.OrderedDict(client.weights, **own)
  return _keep_personal(client._replace(weights=weights))


# The personal copy becomes the global weights as the client has trained them,
# which it also sends, as in MOON and FedALA.
persist_trained = persist_personal._replace(keep=_keep_trained)


def zeros_of_global(model: models.PartialModel) -> tiers.NamedTensors:
  """Return zeros for each GLOBAL variable, by name."""
  return collections.OrderedDict(
    (name, tf.zeros(spec.shape, spec.dtype))
    for name, spec in model.specs(tiers.GLOBAL).items()
  )


def persist_slopes(
  renewed: Callable[[ClientContext], tiers.NamedTensors],
) -> ClientState:
  """Return a state of one number for each GLOBAL weight, zero at first.

  Such as SCAFFOLD's control variates and FedDyn's gradients. Clients hold no
  weights of their own.

  Args:
    renewed: (the client's context after its work) -> the new numbers, by name.
  """
  return ClientState(
    first=lambda model, seed: zeros_of_global(model),
    recall=lambda model, remembered, received, seed: collections.OrderedDict(),
    keep=renewed,
  )


def persist_numbers(
  client_state: ClientState,
  first_numbers: Callable[[models.PartialModel], Mapping[str, Any]],
) -> ClientState:
  """Return a state with also numbers that are not variables of the model.

  Phases find them in the tier CLIENT_VALUES.

  Args:
    client_state: The rest of the state.
    first_numbers: (model) -> name to first value of each number, or tensor of
      numbers.
  """
  return ClientState(
    first=lambda model, seed: collections.OrderedDict(
      {
        **client_state.first(model, seed),
        tiers.CLIENT_VALUES: collections.OrderedDict(
          (name, tf.convert_to_tensor(value))
          for name, value in first_numbers(model).items()
        ),
      }
    ),
    recall=lambda model, remembered, received, seed: collections.OrderedDict(
      client_state.recall(
        model, _without(remembered, tiers.CLIENT_VALUES), received, seed
      ),
      **{tiers.CLIENT_VALUES: remembered[tiers.CLIENT_VALUES]},
    ),
    keep=lambda client: collections.OrderedDict(
      client_state.keep(client),
      **{tiers.CLIENT_VALUES: client.weights[tiers.CLIENT_VALUES]},
    ),
    is_frozen=client_state.is_frozen,
  )


def persist_computed(
  client_state: ClientState, name: str, first: Callable[[], Any]
) -> ClientState:
  """Return a state with also what clients computed in their last round.

  Args:
    client_state: The rest of the state, a mapping.
    name: Name of the `Compute`, whose result is a mapping.
    first: Makes the mapping of a client that never took part. Of the results,
      those of its names are kept.
  """
  return ClientState(
    first=lambda model, seed: collections.OrderedDict(
      client_state.first(model, seed), **{name: first()}
    ),
    recall=lambda model, remembered, received, seed: client_state.recall(
      model, _without(remembered, name), received, seed
    ),
    keep=lambda client: collections.OrderedDict(
      client_state.keep(client),
      **{
        name: collections.OrderedDict(
          (key, client.computed[name][key]) for key in client.remembered[name]
        )
      },
    ),
    is_frozen=client_state.is_frozen,
  )


def _without(remembered: Any, name: str) -> Any:
  return collections.OrderedDict(
    (key, value) for key, value in remembered.items() if key != name
  )
