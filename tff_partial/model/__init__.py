"""Keras models, split into tiers, as pure functions."""

from tff_partial._environment import lazily as _lazily

__all__ = [
  'adapters',
  'first_values',
  'keras_metrics',
  'keras_models',
  'models',
  'ranking_metrics',
]

__getattr__ = _lazily.importer(__name__, __all__)
