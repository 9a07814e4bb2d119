"""FedRAP: additive personalization of items (Li et al., ICLR 2024).

For user i, item j has the vector `C_j + D_j`: C is shared by all users, and D
is the user's own table, which is kept and never sent, as is its vector u. The
score is `<u, C_j + D_j>`. Clients minimize, in u, D and C together,

  loss - lambda ||D - C||^2 + mu ||C||_1,

which makes the two tables differ and the shared one sparse. Both weights grow
with the number of completed rounds a, as `tanh(a / 10)`: first tables fit the
interactions, and then they separate.

Deviations: as in decoupled weight decay, the two regularizers have a step of
their own of rate 1 after the steps on each batch, so that lambda and mu mean
the same with any optimizer. The loss is that of the model: use
`templates.ranking.loss_with_negatives('binary')`, of negatives drawn again in
each step, for the paper's. C shrinks by gradients, not by a threshold, so that
its numbers come near zero without reaching it. No noise is added to updates,
unless by `aggregation`. Clients are weighted by their examples unless
`client_weighting` says otherwise. `-lambda ||D - C||^2` has no minimum: a large
lambda lets tables grow without bound.
"""

import tensorflow as tf

from tff_partial.arguments import checked_numbers
from tff_partial.client_state import persist_local
from tff_partial.composition import Aggregation
from tff_partial.composition import compose
from tff_partial.contexts import ClientContext
from tff_partial.errors import SettingError
from tff_partial.model import models
from tff_partial.phases import changed
from tff_partial.phases import Interleaved
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import LOCAL

# Rounds after which the regularizers have tanh(1) of their weight.
_ROUNDS = 10.0


def build_fed_rap(
  model: models.PartialModel,
  *,
  shared: str,
  own: str,
  difference: float = 1e-4,
  sparsity: float = 1e-4,
  training: Phase = Phase(),
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
) -> PartialProcess:
  """Build FedRAP: train both tables and the user's vector together.

  Args:
    model: The model, whose item vectors are the sum of a row of each table.
    shared: The name of the global table C, `[items, size]`.
    own: The name of the local table D, of the same shape.
    difference: lambda of the last round, at least 0.
    sparsity: mu of the last round, at least 0.
    training: How a client trains: optimizer, or one for each tier, batches,
      epochs.
    aggregation: How the server aggregates updates.
    server_optimizer: Applies aggregated updates; SGD with rate 1 by default.

  Example:
    >>> process = algorithms.build_fed_rap(
    ...   additive, shared='item/embeddings', own='user_item/embeddings'
    ... )

  Raises:
    CompositionError, PhaseError, SettingError: If the arguments do not fit
      together.
  """
  training = partial_training.trained(training, train=(GLOBAL, LOCAL))
  for name, weight in (('difference', difference), ('sparsity', sparsity)):
    if checked_numbers.why_negative(weight):
      raise SettingError(
        f'build_fed_rap: {name}={weight}: give a finite number of 0 or more.'
      )
  _check_tables(model, shared, own)

  def regularizers(client: ClientContext) -> tf.Tensor:
    c, d = client.weight(GLOBAL, shared), client.weight(LOCAL, own)
    apart = tf.reduce_sum(tf.square(d - c))
    return sparsity * tf.reduce_sum(tf.abs(c)) - difference * apart

  return compose(
    model,
    client_state=persist_local,
    work=[
      Interleaved(
        (
          training,
          changed(
            training,
            optimizer=sgd(1.0),
            rate_factor=_growth,
            terms=(regularizers,),
            use_model_loss=False,
            steps_per_batch=1,
            slots=None,
            measured=False,
          ),
        )
      )
    ],
    aggregation=aggregation,
    server_optimizer=server_optimizer,
  )


def _growth(done: tf.Tensor) -> tf.Tensor:
  """Return the share of the regularizers' weight after completed rounds."""
  return tf.tanh(tf.cast(done, tf.float32) / _ROUNDS)


def _check_tables(model: models.PartialModel, shared: str, own: str) -> None:
  """Check that the model has both tables, of one shape."""
  shapes = []
  for argument, tier, name in (('shared', GLOBAL, shared), ('own', LOCAL, own)):
    specs = model.specs(tier)
    if name not in specs:
      raise SettingError(
        f'build_fed_rap: {argument}={name!r}: the model has no {tier} weights '
        f'of this name, but {list(specs)}.'
      )
    shapes.append(specs[name].shape)
  if shapes[0] != shapes[1]:
    raise SettingError(
      f'build_fed_rap: {shared!r} has the shape {shapes[0]} and {own!r} '
      f'{shapes[1]}; their rows are added, so give tables of one shape.'
    )


build_fed_rap_eval = partial_training.build_evaluation
