"""Where computations run: every runtime gives the same numbers."""

from tff_partial.runtimes.cohort import cohort
from tff_partial.runtimes.cohort import cores_for_clients
from tff_partial.runtimes.native import native
