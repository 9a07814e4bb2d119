"""Client states between rounds, in SQLite files that survive kills."""

from tff_partial._environment import lazily as _lazily

__all__ = ['client_store']

__getattr__ = _lazily.importer(__name__, __all__)
