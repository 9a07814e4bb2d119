"""Shared bodies of algorithms that differ in a few arguments."""

from tff_partial._environment import lazily as _lazily

__all__ = [
  'assigned_training',
  'implicit_factors',
  'partial_training',
  'private_items',
  'private_ratings',
  'ranking',
  'rating_intervals',
  'rating_posteriors',
  'server_optimizers',
]

__getattr__ = _lazily.importer(__name__, __all__)
