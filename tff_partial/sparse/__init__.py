"""Training of tables by the rows that a client looks up."""

from tff_partial._environment import lazily as _lazily

__all__ = ['lookups', 'rows']

__getattr__ = _lazily.importer(__name__, __all__)
