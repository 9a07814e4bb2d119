"""Runtimes that run computations, all with the same results."""

import atexit

import tensorflow_federated as tff

from tff_partial.runtimes.cohort_runtime.cohort import cohort
from tff_partial.runtimes.cohort_runtime.cohort import cores_for_clients
from tff_partial.runtimes.cohort_runtime.cohort import ours
from tff_partial.runtimes.native_runtime.native import native
from tff_partial.runtimes.ray_runtime.ray_workers import ray

# A default context complains if it still exists at interpreter shutdown.
atexit.register(tff.test.set_no_default_context)

__all__ = ['cohort', 'cores_for_clients', 'errors', 'native', 'ours', 'ray']
