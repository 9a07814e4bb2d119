"""Exact minimization over a client's own weights, in place of optimizer steps."""

from tff_partial._environment import lazily as _lazily

__all__ = [
  'affine',
  'exact',
  'linear_systems',
  'newton',
]

__getattr__ = _lazily.importer(__name__, __all__)
