"""Check that clients have examples to train on and be measured by."""

from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial import phases
from tff_partial import processes
from tff_partial.data import cohorts
from tff_partial.data import splits
from tff_partial.training.errors import ProgramError


def check(
  process: processes.PartialProcess, clients: cohorts.ClientSource
) -> None:
  """Refuse to train if no client has an example in a measured phase.

  Clients are read one after another up to the first that has one.

  Args:
    process: The algorithm.
    clients: The clients to train with.

  Raises:
    ProgramError: If none has.
  """
  if process.work is None:
    return
  parts = [
    phase.on for phase in phases.all_phases(process.work.work) if phase.measured
  ]
  known: dict[Any, bool] = {}
  seeds = np.zeros([1, 2], np.int32)
  for client_id in clients.client_ids:
    (client,) = clients.cohort([client_id], seeds)
    examples, count = client['examples'], int(client['count'])
    # Clients whose fields are alike are split alike.
    fields = [
      np.asarray(examples[name]) for name in splits.example_fields(*parts)
    ]
    key = (len(examples['weight']), count, *(f.tobytes() for f in fields))
    if key not in known:
      tensors = tf.nest.map_structure(tf.constant, dict(examples))
      known[key] = any(
        part.choose(tensors, tf.constant(count), tf.constant(seeds[0])).count
        > 0
        for part in parts
      )
    if known[key]:
      return
  names = ', '.join(sorted({part.name for part in parts}))
  raise ProgramError(
    f'None of the {len(clients.client_ids):,} clients has query examples, '
    f'those of {names}, by which clients train what they share and are '
    'measured: nothing would be trained. Give clients more examples, or '
    'choose another split, such as `split=tff_partial.splits.same()`.'
  )
