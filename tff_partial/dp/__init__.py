"""Differential privacy: clipping, noise, and accounting of privacy costs."""

from tff_partial._environment import lazily as _lazily

__all__ = [
  'accounting',
  'clipping',
  'dp_queries',
  'local_noise',
  'mechanisms',
  'privacy',
  'privacy_plans',
  'private_rows',
  'samplings',
]

__getattr__ = _lazily.importer(__name__, __all__)
