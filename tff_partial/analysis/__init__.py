"""Analysis after training: curves, tables, maps of users, matrices.

The rest of the library never imports these modules: they need scikit-learn and
matplotlib, which TFF does not install. Figures are PNG files, drawn without a
display and without changing the caller's matplotlib settings.
"""

from tff_partial._environment import lazily as _lazily

__all__ = [
  'communication',
  'comparing',
  'comparisons',
  'confusion',
  'curves',
  'embeddings',
  'ranking',
  'run_folders',
  'similarity',
  'spreadsheets',
  'tables',
]

__getattr__ = _lazily.importer(__name__, __all__)
