"""Runtimes that run computations, all with the same results."""

from tff_partial.runtimes.cohort_runtime.cohort import cohort
from tff_partial.runtimes.cohort_runtime.cohort import cores_for_clients
from tff_partial.runtimes.cohort_runtime.cohort import ours
from tff_partial.runtimes.native_runtime.native import native
from tff_partial.runtimes.ray_runtime.ray_workers import ray

__all__ = ['cohort', 'cores_for_clients', 'errors', 'native', 'ours', 'ray']
