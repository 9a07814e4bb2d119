"""Clients' examples: their form, packing, partitions, splits and sources."""

from tff_partial._environment import lazily as _lazily

__all__ = [
  'client_files',
  'client_readers',
  'cohorts',
  'examples',
  'frames',
  'id_ranges',
  'packing',
  'partitions',
  'populations',
  'splits',
  'vocabularies',
]

__getattr__ = _lazily.importer(__name__, __all__)
