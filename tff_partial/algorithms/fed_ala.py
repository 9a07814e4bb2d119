"""FedALA (Zhang et al., AAAI 2023): adaptive local aggregation.

A client remembers the model v that it trained last. In a round it begins from a
mixture of v and the received w, `v + (w - v) W`, with a share W in [0, 1] for
each weight (Eq. 4), which it learns by gradient descent on its examples while v
and w stay (Eq. 5) and remembers; at first all W are 1. Then it trains the
mixture, which becomes v, and sends it. Where W is not learned, as in layers
below the top ones, it is 1: what is received replaces v.

Deviations: `adaptation` is the same in each round, where the paper's first one
goes on until the loss settles, and learns on the examples of `adaptation.on`,
where the paper draws 80 %. v starts from the first w that the client receives.
"""

import collections
import re

import tensorflow as tf

from tff_partial import client_state
from tff_partial import evaluation
from tff_partial import tiers
from tff_partial.arguments import spelling
from tff_partial.composition import Aggregation
from tff_partial.composition import compose
from tff_partial.contexts import OverwriteWeights
from tff_partial.data import splits
from tff_partial.model import models
from tff_partial.phases import changed
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training
from tff_partial.templates import server_optimizers
from tff_partial.tiers import CLIENT_VALUES
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import PERSONAL


def build_fed_ala(
  model: models.PartialModel,
  *,
  adapted: str = '.*',
  adaptation: Phase | None = None,
  training: Phase | None = None,
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
) -> PartialProcess:
  """Build FedALA: mix the received model with the client's own, and train that.

  Metrics of training are those of the mixture, before each step of its shares,
  and clients are weighted by the examples on which they learn these.

  Args:
    model: The model, without local variables.
    adapted: Regular expression over whole names of the variables with shares to
      learn, in the paper those of the top p layers.
    adaptation: How shares are learned; its optimizer has the rate eta. With
      `max_steps=0` they stay 1, as in FedAvg. By default
      `Phase(optimizer=sgd(1.0))`, with the examples of `training`.
    training: How the mixture is trained: optimizer, batches, epochs; `Phase()`
      by default, with the examples of `adaptation`.
    aggregation: How the server aggregates updates.
    server_optimizer: Applies aggregated updates; SGD with rate 1 by default.

  Example:
    >>> process = algorithms.build_fed_ala(whole, adapted='logits/.*')

  Raises:
    CompositionError, PhaseError, SettingError: If the arguments do not fit
      together.
  """
  adaptation, training = partial_training.together(
    adaptation, training, Phase(optimizer=sgd(1.0)), Phase()
  )
  return compose(
    model,
    client_state=_memory(adapted),
    work=[
      # Measured by the mixture, which is also the client's model elsewhere.
      changed(_of_shares(adaptation), measured=True),
      OverwriteWeights(
        lambda client: collections.OrderedDict(
          {GLOBAL: _mixed(client.weights)[GLOBAL]}
        )
      ),
      changed(
        training,
        train=(GLOBAL,),
        weights_fn=tiers.server_and_local_weights,
        measured=adaptation.max_steps == 0,  # Else shares learn, and measure.
      ),
    ],
    aggregation=aggregation,
    server_optimizer=server_optimizer,
  )


def build_fed_ala_eval(
  model: models.PartialModel,
  *,
  adapted: str = '.*',
  personalise: Phase | None = None,
  split: splits.Split | None = None,
) -> evaluation.Evaluation:
  """Build an evaluation with the mixture from which clients would train.

  Args:
    model: The model.
    adapted: As in training.
    personalise: How clients learn their shares before; not at all by default. A
      new client has the received model.
    split: As for `evaluation.build_query_evaluation`.

  Example:
    >>> evaluation = algorithms.build_fed_ala_eval(whole, adapted='logits/.*')
  """
  return evaluation.build_query_evaluation(
    model,
    client_state=_memory(adapted),
    train=(CLIENT_VALUES,),
    weights_fn=_mixed,
    personalise=_of_shares(personalise) if personalise else None,
    split=split,
  )


def _of_shares(how: Phase) -> Phase:
  """Return the phase that learns shares."""
  how = changed(how, train=(CLIENT_VALUES,), weights_fn=_mixed)
  rule = server_optimizers.WithinUnit(how.optimizer_of(CLIENT_VALUES))
  return changed(how, optimizer=rule)


def _memory(adapted: str) -> client_state.ClientState:
  def ones(model: models.PartialModel) -> tiers.NamedTensors:
    specs = model.specs(GLOBAL)
    spelling.check_patterns('adapted', [adapted], list(specs))
    return collections.OrderedDict(
      (name, tf.ones(spec.shape, spec.dtype))
      for name, spec in specs.items()
      if re.fullmatch(adapted, name)
    )

  return client_state.persist_numbers(client_state.persist_trained, ones)


def _mixed(weights: tiers.Weights) -> tiers.Weights:
  """Return the weights that a client begins from."""
  found = collections.OrderedDict(weights[GLOBAL])
  for name, share in weights[CLIENT_VALUES].items():
    own = weights[PERSONAL][name]
    found[name] = own + (found[name] - own) * share
  return collections.OrderedDict(
    tiers.server_and_local_weights(weights), **{GLOBAL: found}
  )
