"""Training of local variables, which are kept, and global ones, which are sent.

They are trained simultaneously, as in FURL, FedPer, FedSim and LG-FedAvg, or in
turn, as in FedAlt and FedRep. The papers differ in the names of the two, in the
part of a model that is local, and in their treatment of new clients.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tff_partial import evaluation
from tff_partial import phases
from tff_partial.client_state import persist_local
from tff_partial.client_state import persist_personal
from tff_partial.client_statistics import Statistic
from tff_partial.composition import Aggregation
from tff_partial.composition import compose
from tff_partial.data import splits
from tff_partial.model import models
from tff_partial.phases import changed
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.phases import Term
from tff_partial.processes import PartialProcess
from tff_partial.solvers.exact import Exact
from tff_partial.terms import proximal
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import LOCAL
from tff_partial.tiers import PERSONAL

# Settings of a phase that only steps have, besides its batches.
_STEPS = ('steps_per_batch', 'rate_factor', 'slots', 'measured')


def trained(
  training: Phase, *terms: Term, train: tuple[str, ...] = (GLOBAL,)
) -> Phase:
  """Return a measured phase that trains some tiers, with more losses to add.

  Args:
    training: How it trains.
    *terms: The losses.
    train: The tiers.
  """
  terms = (*changed(training).terms, *terms)
  return changed(training, train=train, terms=terms, measured=True)


def together(
  one: Phase | None, other: Phase | None, *defaults: Phase
) -> tuple[Phase, ...]:
  """Return two phases, of which one that is not given has the other's examples.

  Else it would train on what the other holds out.

  Args:
    one: The first phase, or None.
    other: The second phase, or None.
    *defaults: What they are if they are not given, but for the examples.
  """
  given = changed(one or other or Phase())
  return tuple(
    changed(phase or changed(default, on=given.on))
    for phase, default in zip((one, other), defaults, strict=True)
  )


def build_global(
  model: models.PartialModel,
  *,
  training: Phase = Phase(),
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
) -> PartialProcess:
  """Build a process that trains global weights, and averages them: FedAvg.

  Args:
    model: The model, without local variables.
    training: How a client trains: optimizer, batches, epochs.
    aggregation: How the server aggregates updates.
    server_optimizer: Applies aggregated updates; SGD with rate 1 by default.

  Example:
    >>> process = algorithms.build_fed_avg(whole, training=Phase(epochs=2))

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
  """
  return compose(
    model,
    work=[trained(training)],
    aggregation=aggregation,
    server_optimizer=server_optimizer,
  )


def build_simultaneous(
  model: models.PartialModel,
  *,
  training: Phase = Phase(),
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
  statistics: Sequence[Statistic] = (),
) -> PartialProcess:
  """Build a process that trains all variables together, and keeps local ones.

  Args:
    model: The model; without local variables, this is FedAvg.
    training: How a client trains: optimizer, or one for each tier, batches,
      epochs. Local variables whose optimizer is `Exact` are solved for before
      the others are trained.
    aggregation: How the server aggregates updates.
    server_optimizer: Applies aggregated updates; SGD with rate 1 by default.
    statistics: What clients send besides updates, as for `compose`.

  Example:
    >>> process = algorithms.build_fed_per(model, training=Phase(epochs=2))

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
  """
  return compose(
    model,
    client_state=persist_local,
    work=exact_first(training, train=(GLOBAL, LOCAL), measured=True),
    aggregation=aggregation,
    server_optimizer=server_optimizer,
    statistics=statistics,
  )


def exact_first(training: Phase, **settings: Any) -> list[Phase]:
  """Return phases that solve for weights, then train the others by steps.

  Args:
    training: Training of several tiers, with an optimizer for each tier, of
      which some may be `Exact`; or with one optimizer for all.
    **settings: Replace those of `training`, such as `train`.

  Returns:
    A phase of what is solved for, if any, and one of the rest.
  """
  of_tiers = changed(training).optimizer
  train = settings.get('train', training.train)
  if not isinstance(of_tiers, Mapping):
    return [changed(training, **settings)]
  solved = tuple(t for t in train if isinstance(of_tiers.get(t), Exact))
  rest = tuple(t for t in train if t not in solved)
  by_steps = changed(training, **{**settings, 'train': rest})
  schedule = {
    name: getattr(Phase, name) for name in (*phases.SCHEDULE[1:], *_STEPS)
  }
  exact = [
    changed(by_steps, train=(tier,), optimizer=of_tiers[tier], **schedule)
    for tier in solved
  ]
  return [*exact, by_steps]


def build_alternating(
  model: models.PartialModel,
  *,
  personal: Phase | None = None,
  shared: Phase | None = None,
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
) -> PartialProcess:
  """Build a process that trains the local variables, then the global ones.

  Args:
    model: The model; without local variables, this is FedAvg.
    personal: How the local variables are trained while the others are fixed;
      `Phase()` by default, with the examples of `shared`.
    shared: How the global variables are trained while the others are fixed;
      `Phase()` by default, with the examples of `personal`.
    aggregation: How the server aggregates updates.
    server_optimizer: Applies aggregated updates; SGD with rate 1 by default.

  Example:
    >>> process = algorithms.build_fed_alt(
    ...   model, personal=Phase(epochs=5), shared=Phase()
    ... )

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
  """
  personal, shared = together(personal, shared, Phase(), Phase())
  return compose(
    model,
    client_state=persist_local,
    work=[
      changed(personal, train=(LOCAL,)),
      changed(shared, train=(GLOBAL,), measured=True),
    ],
    aggregation=aggregation,
    server_optimizer=server_optimizer,
  )


def build_evaluation(
  model: models.PartialModel,
  *,
  personalise: Phase | None = None,
  split: splits.Split | None = None,
) -> evaluation.Evaluation:
  """Build an evaluation with the local variables that clients remember.

  A model without local variables, which is the same for all clients, is
  measured as it is.

  Args:
    model: The model.
    personalise: How clients, such as new ones, train their local variables
      before, while the global ones stay fixed; not at all by default.
    split: Support and query set. By default the two halves if clients
      personalise, and otherwise everything for both.

  Example:
    >>> evaluation = algorithms.build_fed_per_eval(model)

  Raises:
    PhaseError: If the arguments do not fit together.
  """
  return evaluation.build_query_evaluation(
    model,
    client_state=persist_local,
    train=(LOCAL,),
    personalise=personalise,
    split=split,
  )


def build_personal_evaluation(
  model: models.PartialModel,
  *,
  personalise: Phase | None = None,
  split: splits.Split | None = None,
) -> evaluation.Evaluation:
  """Build an evaluation with the whole models that clients remember.

  Args:
    model: The model.
    personalise: How clients, such as new ones, train their models before; not
      at all by default.
    split: As for `build_evaluation`.

  Example:
    >>> evaluation = baselines.build_local_only_eval(whole)

  Raises:
    PhaseError: If the arguments do not fit together.
  """
  return evaluation.build_query_evaluation(
    model,
    client_state=persist_personal,
    train=(PERSONAL, LOCAL),
    personalise=personalise,
    split=split,
  )


def build_held_evaluation(
  model: models.PartialModel,
  *,
  penalty: float = 1.0,
  personalise: Phase | None = None,
  split: splits.Split | None = None,
) -> evaluation.Evaluation:
  """Build an evaluation with the personal models that clients remember.

  With `personalise`, these are trained before, kept near the global model, as
  new clients need it.

  Args:
    model: The model.
    penalty: lambda of Ditto and MR-MTL, as in training.
    personalise: How clients personalise before, as new ones need it; not at
      all by default.
    split: As for `evaluation.build_query_evaluation`.

  Example:
    >>> evaluation = algorithms.build_ditto_eval(whole, penalty=0.1)
  """
  return evaluation.build_query_evaluation(
    model,
    client_state=persist_personal,
    train=(PERSONAL,),
    terms=(proximal(penalty, PERSONAL),),
    personalise=personalise,
    split=split,
  )
