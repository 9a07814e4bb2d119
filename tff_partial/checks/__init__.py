"""Checks that an algorithm keeps what the papers promise."""

from tff_partial._environment import lazily as _lazily

__all__ = [
  'audit_bounds',
  'independent_aggregation',
  'independent_training',
  'leak_probe',
  'privacy_audit',
  'split_personalization',
]

__getattr__ = _lazily.importer(__name__, __all__)
