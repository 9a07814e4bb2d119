"""Where computations run: every runtime gives the same numbers."""

import atexit

import tensorflow_federated as tff

from tff_partial.runtimes.cohort import cohort
from tff_partial.runtimes.cohort import cores_for_clients
from tff_partial.runtimes.native import native

# TFF's own, which it makes when it is imported, complains if it is still there
# when Python takes itself apart.
atexit.register(tff.test.set_no_default_context)
