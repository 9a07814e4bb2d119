"""Centralized training: one client has all clients' examples.

A round is that client's pass over all of them in a new order, or a given number
of steps. Deviation: an optimizer with a state, such as Adam, is reset in every
round, like clients' optimizers; plain gradient descent has no state. Measured
like FedAvg, on separate clients.
"""

from collections.abc import Callable, Iterator, Mapping
import operator
from typing import Any, TypeAlias

import numpy as np

from tff_partial.data import cohorts
from tff_partial.data import examples
from tff_partial.data import packing
from tff_partial.data import populations
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training

# Adds the client to its fields, `[examples, ...]`: (fields, index of the
# client) -> fields.
ToFields: TypeAlias = Callable[[Mapping[str, Any], int], Mapping[str, Any]]

# The id of the only client of a pool.
ALL_CLIENTS = 'everybody'


def _fields(
  source: cohorts.ClientSource, to_fields: ToFields | None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
  """Yield each client's id and its examples without padding."""
  for number, client in enumerate(source.client_ids):
    (value,) = source.cohort([client], np.zeros([1, 2], np.int32))
    fields = examples.map_fields(
      operator.itemgetter(slice(value['count'])), value['examples']
    )
    yield client, to_fields(fields, number) if to_fields else fields


def number_clients(
  source: cohorts.ClientSource,
  to_fields: ToFields,
  example_spec: examples.ExampleSpec,
) -> populations.Population:
  """Add client indices to examples, for a model with a table of all users.

  Args:
    source: The clients.
    to_fields: (a client's fields, its index) -> fields that the model reads,
      for example with the index as one more input.
    example_spec: `process.example_spec` of the model with the table.

  Raises:
    ClientDataError: If the fields of `to_fields` do not fit.
  """
  return packing.pack(dict(_fields(source, to_fields)), example_spec)


def pool(
  source: cohorts.ClientSource,
  example_spec: examples.ExampleSpec | None = None,
  to_fields: ToFields | None = None,
) -> populations.Population:
  """Pool the examples of all clients into one client, `ALL_CLIENTS`.

  Args:
    source: The clients.
    example_spec: `process.example_spec`; that of the clients by default.
    to_fields: As for `number_clients`, if the model has a table of all users.

  Raises:
    ClientDataError: If the fields of `to_fields` do not fit.
  """
  parts = [fields for _, fields in _fields(source, to_fields)]
  pooled = examples.map_fields(lambda *arrays: np.concatenate(arrays), *parts)
  return packing.pack(
    {ALL_CLIENTS: pooled}, example_spec or source.example_spec
  )


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
