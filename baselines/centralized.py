"""Centralized training: one client has all clients' examples.

A round is that client's pass over all of them in a new order, or a given number
of steps. Deviation: an optimizer with a state, such as Adam, is reset in every
round, like clients' optimizers; plain gradient descent has no state. Measured
like FedAvg, on separate clients.
"""

import operator

import numpy as np

from tff_partial.data import cohorts
from tff_partial.data import examples
from tff_partial.data import packing
from tff_partial.data import populations
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training

# The id of the only client of a pool.
ALL_CLIENTS = 'everybody'


def pool(source: cohorts.ClientSource) -> populations.Population:
  """Pool the examples of all clients into one client, `ALL_CLIENTS`."""
  parts = []
  for client in source.client_ids:
    (value,) = source.cohort([client], np.zeros([1, 2], np.int32))
    real = operator.itemgetter(slice(value['count']))
    parts.append(examples.map_fields(real, value['examples']))
  pooled = examples.map_fields(lambda *arrays: np.concatenate(arrays), *parts)
  return packing.pack({ALL_CLIENTS: pooled}, source.example_spec)


def build_centralized(
  model: models.PartialModel, *, training: Phase = Phase(shuffle=True)
) -> PartialProcess:
  """Build centralized training; run it only on the client of `pool`.

  Args:
    model: The model, without local variables; users may have rows of a table.
    training: A round's training: `epochs` passes, or `max_steps` steps on
      random batches of a pass.

  Example:
    >>> process = baselines.build_centralized(whole)

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
  """
  return partial_training.build_global(model, training=training)


build_centralized_eval = partial_training.build_evaluation
