"""Export of trained models to devices, as SavedModel and TFLite."""

from tff_partial._environment import lazily as _lazily

__all__ = ['exports', 'running', 'serving']

__getattr__ = _lazily.importer(__name__, __all__)
