"""What a client remembers from one round to the next.

The state enters and leaves a round as a value placed at clients. No type at the
server contains it.
"""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tff_partial import models
from tff_partial import phases
from tff_partial import tiers


class Memory(NamedTuple):
  """A rule for what a client remembers.

  Attributes:
    first: (model, seed) -> what a client remembers that never took part.
    recall: (model, remembered, seed) -> its local weights as a round begins.
    keep: (what the phases made) -> what it remembers after the round.
  """

  first: Callable[[models.PartialModel, tf.Tensor], Any]
  recall: Callable[[models.PartialModel, Any, tf.Tensor], tiers.NamedTensors]
  keep: Callable[[phases.Worked], Any]


# Nothing is remembered: local weights begin anew, as in FedRecon.
forget = Memory(
  first=lambda model, seed: collections.OrderedDict(),
  recall=lambda model, remembered, seed: model.initial_weights(
    tiers.LOCAL, seed
  ),
  keep=lambda worked: collections.OrderedDict(),
)

# Local weights are remembered, as in FURL.
keep_local = Memory(
  first=lambda model, seed: model.initial_weights(tiers.LOCAL, seed),
  recall=lambda model, remembered, seed: remembered,
  keep=lambda worked: worked.weights.get(
    tiers.LOCAL, collections.OrderedDict()
  ),
)
