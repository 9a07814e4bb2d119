"""Training programs: the loop, evaluation, checkpoints, client states."""

from tff_partial._environment import lazily as _lazily

__all__ = [
  'calibration',
  'callbacks',
  'checkpoints',
  'client_selection',
  'client_store',
  'evaluation_sets',
  'files',
  'metrics_log',
  'personal_models',
  'programs',
  'run_privacy',
  'sampling',
  'selection',
  'top_candidates',
]

__getattr__ = _lazily.importer(__name__, __all__)
