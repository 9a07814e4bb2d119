"""Federated Reconstruction (Singhal et al., NeurIPS 2021), Algorithm 1.

Each client rebuilds its local weights from scratch on its support set while the
global weights are frozen, then trains the global weights on its query set while
the local ones are frozen. Only the update of the global weights leaves it.

Deviations: a client whose examples are too few for a query set has the weight
zero, and a client whose update is not finite counts for nothing. A client's
weight is `|D_q|` as in the paper, also where `update_steps` leaves some of the
query set unused; TFF's own `build_fed_recon` counts the examples of the steps
that it took. Otherwise the two give the same weights.
"""

import dataclasses
from typing import Unpack

from tff_partial import evaluation
from tff_partial.client_state import stateless
from tff_partial.composition import compose
from tff_partial.composition import Joining
from tff_partial.data import splits
from tff_partial.model import models
from tff_partial.phases import Epochs
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.processes import PartialProcess
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import LOCAL


def build_fed_recon(
  model: models.PartialModel,
  *,
  split: splits.Split | None = None,
  reconstruction_optimizer: Optimizer | None = None,
  reconstruction_epochs: int | Epochs = 1,
  reconstruction_steps: int | None = None,
  update_optimizer: Optimizer | None = None,
  update_epochs: int | Epochs = 1,
  update_steps: int | None = None,
  batch_size: int | None = 20,
  joint: bool = False,
  **joining: Unpack[Joining],
) -> PartialProcess:
  """Clients rebuild local weights, freeze them, and teach the global ones.

  Args:
    model: The model, with or without local variables.
    split: Support and query set; the two halves by default.
    reconstruction_optimizer: Rebuilds local weights; SGD with rate 0.1.
    reconstruction_epochs: Passes over the support set, at most.
    reconstruction_steps: Steps of reconstruction, at most; 0 for none.
    update_optimizer: Trains global weights; SGD with rate 0.1.
    update_epochs: Passes over the query set, at most.
    update_steps: Steps of the update, at most.
    batch_size: Examples a step; None for all.
    joint: Whether the update trains the local weights too, together with the
      global ones.
    **joining: How the server joins updates, as for `compose`; their mean,
      weighted by `|D_q|`.

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
  """
  support, query = split or splits.halves()
  return compose(
    model,
    client_state=stateless,
    work=[
      Phase(
        train=(LOCAL,),
        on=support,
        optimizer=reconstruction_optimizer or sgd(0.1),
        batch_size=batch_size,
        epochs=reconstruction_epochs,
        max_steps=reconstruction_steps,
      ),
      Phase(
        train=(GLOBAL, LOCAL) if joint else (GLOBAL,),
        on=query,
        optimizer=update_optimizer or sgd(0.1),
        batch_size=batch_size,
        epochs=update_epochs,
        max_steps=update_steps,
        measured=True,
      ),
    ],
    **joining,
  )


def build_fed_recon_eval(
  model: models.PartialModel,
  *,
  split: splits.Split | None = None,
  reconstruction_optimizer: Optimizer | None = None,
  reconstruction_epochs: int | Epochs = 1,
  reconstruction_steps: int | None = None,
  batch_size: int | None = 20,
  measure_batch_size: int = 100,
) -> evaluation.Evaluation:
  """Clients rebuild local weights, and are measured with them.

  ReconEval of section 4.1, which needs nothing from a client's past: it
  measures clients that were never seen in training as well as others.

  Args:
    model: The model.
    split: Support and query set; the two halves by default.
    reconstruction_optimizer: Rebuilds local weights; SGD with rate 0.1.
    reconstruction_epochs: Passes over the support set, at most.
    reconstruction_steps: Steps of reconstruction, at most; 0 for none.
    batch_size: Examples a step of reconstruction; None for all.
    measure_batch_size: Examples measured at a time; changes no result.
  """
  return evaluation.build_query_evaluation(
    model,
    client_state=stateless,
    train=(LOCAL,),
    personalise=Phase(
      optimizer=reconstruction_optimizer or sgd(0.1),
      batch_size=batch_size,
      epochs=reconstruction_epochs,
      max_steps=reconstruction_steps,
    ),
    split=split,
    measure_batch_size=measure_batch_size,
  )


def build_fed_recon_fine_tuning_eval(
  model: models.PartialModel,
  *,
  reconstruct: Phase,
  tune: Phase,
  split: splits.Split | None = None,
  measure_batch_size: int = 100,
) -> evaluation.Evaluation:
  """Clients rebuild local weights, tune the global ones, and are measured.

  Section 5.2, "FedRecon followed by fine-tuning": both on the support set, one
  after the other. What a client has tuned stays with it.

  Args:
    model: The model.
    reconstruct: How local weights are rebuilt.
    tune: How global weights are tuned, for all of them or those that it names.
    split: Support and query set; the two halves by default.
    measure_batch_size: Examples measured at a time; changes no result.

  Raises:
    PhaseError: If a phase names no variable that it could train.
  """
  support, query = split or splits.halves()
  return evaluation.build_evaluation(
    model,
    client_state=stateless,
    work=[
      dataclasses.replace(
        reconstruct, train=(LOCAL,), on=support, measured=False
      ),
      dataclasses.replace(tune, train=(GLOBAL,), on=support, measured=False),
      Phase(train=(), on=query, batch_size=measure_batch_size, measured=True),
    ],
  )
