"""PPSGD (Bietti et al., ICML 2022): a shared model plus the client's own.

A client's model reads the sum of the shared weights w and its own weights v;
each step moves both by the same gradient, each at its own rate (Algorithm 1).
Only updates of w leave the client, so that only these need noise; the larger
the rate of v is relative to that of w, the less the model depends on them.

Deviations: clients may take several steps a round, where the paper's take one,
and remember v, which is zero at first.
"""

import collections

from tff_partial import client_state
from tff_partial import evaluation
from tff_partial import tiers
from tff_partial.composition import Aggregation
from tff_partial.composition import compose
from tff_partial.data import splits
from tff_partial.model import models
from tff_partial.phases import changed
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import PERSONAL

# States of layers, such as moving averages, are in w alone.
_CLIENT_STATE = client_state.ClientState(
  first=lambda model, seed: collections.OrderedDict(
    (name, zeros)
    for name, zeros in client_state.zeros_of_global(model).items()
    if name not in model.state
  ),
  recall=lambda model, remembered, received, seed: collections.OrderedDict(
    {PERSONAL: remembered}
  ),
  keep=lambda client: client.weights[PERSONAL],
)


def build_pp_sgd(
  model: models.PartialModel,
  *,
  training: Phase = Phase(),
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
) -> PartialProcess:
  """Build PPSGD: train the shared weights and what each client adds to them.

  Args:
    model: The model, without local variables.
    training: How a client trains: batches, epochs, and an optimizer, or one for
      each of 'global' (w) and 'personal' (v).
    aggregation: How the server aggregates updates.
    server_optimizer: Applies aggregated updates; SGD with rate 1 by default.

  Example:
    >>> process = algorithms.build_pp_sgd(
    ...   whole,
    ...   training=Phase(optimizer={'global': sgd(0.1), 'personal': sgd(0.2)}),
    ... )

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
  """
  return compose(
    model,
    client_state=_CLIENT_STATE,
    work=[
      changed(
        training, train=(GLOBAL, PERSONAL), weights_fn=_added, measured=True
      )
    ],
    aggregation=aggregation,
    server_optimizer=server_optimizer,
  )


def build_pp_sgd_eval(
  model: models.PartialModel,
  *,
  personalise: Phase | None = None,
  split: splits.Split | None = None,
) -> evaluation.Evaluation:
  """Build an evaluation with the sum of w and the v that clients remember.

  Args:
    model: The model.
    personalise: How clients, such as new ones, train v before; not at all by
      default.
    split: As for `evaluation.build_query_evaluation`.

  Example:
    >>> evaluation = algorithms.build_pp_sgd_eval(whole)
  """
  return evaluation.build_query_evaluation(
    model,
    client_state=_CLIENT_STATE,
    train=(PERSONAL,),
    weights_fn=_added,
    personalise=personalise,
    split=split,
  )


def _added(weights: tiers.Weights) -> tiers.Weights:
  """Return the weights that the model reads."""
  own = weights[PERSONAL]
  total = collections.OrderedDict(
    (name, tensor + own[name] if name in own else tensor)
    for name, tensor in weights[GLOBAL].items()
  )
  return collections.OrderedDict(
    tiers.server_and_local_weights(weights), **{GLOBAL: total}
  )
