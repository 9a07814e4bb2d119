"""Which clients take part in a round: sampling, availability, latency."""

from tff_partial._environment import lazily as _lazily

__all__ = [
  'availability',
  'latency',
  'sampling',
]

__getattr__ = _lazily.importer(__name__, __all__)
