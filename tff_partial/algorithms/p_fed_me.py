"""pFedMe (Dinh et al., NeurIPS 2020), Algorithm 1.

On each of R batches a client approximates the minimizer theta of the loss plus
lambda / 2 * ||theta - w||^2 in K steps, and then moves its copy of w along the
gradient of the Moreau envelope, eta * lambda * (w - theta). The server moves by
the fraction beta from w to the mean of the clients' copies.

Deviations: the K steps start from the theta of the previous batch and do not
run until a given accuracy, as in the authors' code; only sampled clients train;
clients are weighted by their examples unless `client_weighting` says otherwise.
"""

from absl import logging

from tff_partial import evaluation
from tff_partial.composition import Aggregation
from tff_partial.composition import compose
from tff_partial.data import splits
from tff_partial.model import models
from tff_partial.phases import changed
from tff_partial.phases import Interleaved
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training
from tff_partial.terms import moreau
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import PERSONAL

# lambda of the paper, by default.
PENALTY = 15.0


def build_p_fed_me(
  model: models.PartialModel,
  *,
  penalty: float = PENALTY,
  personal: Phase = Phase(optimizer=sgd(0.05), steps_per_batch=5, max_steps=20),
  client_learning_rate: float = 0.005,
  mixing: float = 1.0,
  aggregation: Aggregation = Aggregation(),
) -> PartialProcess:
  """Build pFedMe: solve for a personal model on each batch, pull w to it.

  Metrics of training are those of the personal model before each batch.

  Args:
    model: The model, without local variables.
    penalty: lambda of the paper.
    personal: How theta is trained: `steps_per_batch` is K, and `max_steps` with
      `epochs` gives R. The loss gains the curvature lambda, so the learning
      rate has to stay below 2 / lambda even where the loss is flat.
    client_learning_rate: eta of the paper, which `personal.rate_factor` scales,
      too; w moves by the fraction eta * lambda to theta on each batch, and
      beyond it, with a warning, if that is more than 1.
    mixing: beta of the paper.
    aggregation: How the server aggregates updates.

  Example:
    >>> process = algorithms.build_p_fed_me(whole, penalty=15.0)

  Raises:
    CompositionError, PhaseError, SettingError: If the arguments do not fit
      together.
  """
  solve = partial_training.trained(personal, moreau(penalty), train=(PERSONAL,))
  factor = 1.0 if callable(solve.rate_factor) else solve.rate_factor
  if factor * client_learning_rate * penalty > 1.0:
    logging.warning(
      'pFedMe: client_learning_rate=%g times rate_factor=%g and penalty=%g is '
      'more than 1: w moves beyond theta on each batch, and may diverge.',
      client_learning_rate,
      factor,
      penalty,
    )
  return compose(
    model,
    work=[
      Interleaved(
        (
          solve,
          changed(
            solve,
            train=(GLOBAL,),
            optimizer=sgd(client_learning_rate),
            steps_per_batch=1,
            terms=(moreau(penalty),),
            use_model_loss=False,
            measured=False,
          ),
        )
      )
    ],
    server_optimizer=sgd(mixing),
    aggregation=aggregation,
  )


def build_p_fed_me_eval(
  model: models.PartialModel,
  *,
  penalty: float = PENALTY,
  personalise: Phase = Phase(optimizer=sgd(0.05), steps_per_batch=5),
  split: splits.Split | None = None,
) -> evaluation.Evaluation:
  """Build an evaluation with theta trained at the received w.

  It does not need client state, so it also measures new clients.

  Args:
    model: The model.
    penalty: lambda of the paper, as in training.
    personalise: How theta is trained; w does not move.
    split: As for `evaluation.build_query_evaluation`.

  Example:
    >>> evaluation = algorithms.build_p_fed_me_eval(whole, penalty=15.0)
  """
  return evaluation.build_query_evaluation(
    model,
    train=(PERSONAL,),
    terms=(moreau(penalty),),
    personalise=personalise,
    split=split,
  )
