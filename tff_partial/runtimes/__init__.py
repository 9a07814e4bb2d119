"""Runtimes: where a federated computation runs. None knows an algorithm."""

from tff_partial.runtimes.native import native as native
