"""FedBN (Li et al., ICLR 2021), and SiloBN (Andreux et al., DART 2020).

Clients whose inputs are scaled or shifted in their own way keep their batch
normalization, and share the rest. In FedBN all of it is local: scale, shift and
moving averages, `from_keras(local='name of the layers')`. In SiloBN only the
moving averages are, `from_keras(state='local')`. Without such layers both are
FedAvg.

Deviations: FedBN gives a new client the mean of the others' scales and shifts,
while moving averages of others cannot serve it. Here a new client estimates
moving averages from its own support set, and trains scale and shift if it
personalises. Clients are weighted by their examples unless `client_weighting`
says otherwise.
"""

import collections

import tensorflow as tf

from tff_partial import evaluation
from tff_partial import tiers
from tff_partial.client_state import persist_local
from tff_partial.contexts import ClientContext
from tff_partial.contexts import first_of
from tff_partial.contexts import OverwriteWeights
from tff_partial.data import splits
from tff_partial.errors import SettingError
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.templates import partial_training
from tff_partial.tiers import LOCAL

# So large that rounding of momenta close to 1 is small.
_FAR = 1e6

build_fed_bn = partial_training.build_simultaneous


def build_fed_bn_eval(
  model: models.PartialModel,
  *,
  estimate: bool = False,
  personalise: Phase | None = None,
  split: splits.Split | None = None,
) -> evaluation.Evaluation:
  """Build an evaluation with the layers that clients remember.

  Args:
    model: The model.
    estimate: True if clients, such as new ones, replace moving averages, local
      or averaged, by the moments of their support set, in one pass and with the
      weights that they have.
    personalise: How clients train their local variables after that; not at all
      by default.
    split: Support and query set; by default the two halves if clients estimate
      or personalise, and otherwise everything for both.

  Example:
    >>> evaluation = algorithms.build_fed_bn_eval(model)

  Raises:
    PhaseError: If the arguments do not fit together.
    SettingError: If clients are to estimate, and the model has no averages.
  """
  if estimate and not model.state:
    raise SettingError(
      'estimate=True: the model has no moving averages to estimate. Leave it '
      "out, or keep those of batch normalization by `from_keras(state='local')`"
      " or 'averaged'; frozen ones stay as they are."
    )
  return evaluation.build_query_evaluation(
    model,
    client_state=persist_local,
    train=(LOCAL,),
    before=[OverwriteWeights(_estimated)] if estimate else (),
    personalise=personalise,
    split=split,
  )


def _estimated(client: ClientContext) -> tiers.Weights:
  """Return moving averages that are the moments of the client's examples.

  A training step replaces an average `a` by `m a + (1 - m) b`, where `b` is the
  batch's moment, which does not depend on it. Steps from zero and from another
  number give `b`.
  """
  inputs = first_of(client.examples, client.count)['x']
  read = tiers.server_and_local_weights(client.weights)
  states = {
    name: (tier, tensor)
    for tier, named in read.items()
    for name, tensor in named.items()
    if name in client.model.state
  }

  def stepped(start: float) -> dict[str, tf.Tensor]:
    weights = tf.nest.map_structure(tf.identity, read)
    for name, (tier, tensor) in states.items():
      weights[tier][name] = tf.fill(tf.shape(tensor), start)
    return client.model.call(
      weights, client.frozen, inputs, training=True, seed=client.seed
    )[2]

  zero, far = stepped(0.0), stepped(_FAR)
  found: tiers.Weights = collections.OrderedDict()
  for name, (tier, tensor) in states.items():
    momentum = (far[name] - zero[name]) / _FAR
    moment = zero[name] / (1.0 - momentum)
    estimated = tf.where(client.count > 0, moment, tensor)
    found.setdefault(tier, collections.OrderedDict())[name] = estimated
  return found
