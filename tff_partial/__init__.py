"""Partially local federated learning on TensorFlow Federated.

Each module is imported when it is first used, and TensorFlow with it.
"""

from typing import TYPE_CHECKING

from tff_partial._environment import lazily as _lazily
from tff_partial._environment import quiet as _quiet

if TYPE_CHECKING:
  from tff_partial import aggregators
  from tff_partial import algorithms
  from tff_partial import analysis
  from tff_partial import assignments
  from tff_partial import checks
  from tff_partial import client_state
  from tff_partial import client_statistics
  from tff_partial import composition
  from tff_partial import contexts
  from tff_partial import data
  from tff_partial import dp
  from tff_partial import errors
  from tff_partial import evaluation
  from tff_partial import exporting
  from tff_partial import groups
  from tff_partial import layers
  from tff_partial import model
  from tff_partial import phases
  from tff_partial import processes
  from tff_partial import random_bits
  from tff_partial import runtimes
  from tff_partial import solvers
  from tff_partial import sparse
  from tff_partial import templates
  from tff_partial import terms
  from tff_partial import tiers
  from tff_partial import training
  from tff_partial.analysis.comparing import compare
  from tff_partial.analysis.comparisons import Comparison
  from tff_partial.checks.independent_aggregation import (
    check_independent_aggregation,
  )
  from tff_partial.checks.independent_training import check_independent_training
  from tff_partial.composition import Aggregation
  from tff_partial.composition import compose
  from tff_partial.data import partitions
  from tff_partial.data import splits
  from tff_partial.data.client_files import open_clients
  from tff_partial.data.client_files import write_clients
  from tff_partial.data.client_readers import Reader
  from tff_partial.data.frames import from_pandas
  from tff_partial.data.packing import from_arrays
  from tff_partial.data.packing import from_leaf
  from tff_partial.data.packing import from_tff
  from tff_partial.data.packing import pack
  from tff_partial.data.vocabularies import load as load_vocabularies
  from tff_partial.data.vocabularies import Vocabulary
  from tff_partial.exchange.messages import ClientWeighting
  from tff_partial.exporting.exports import export
  from tff_partial.learning_process import as_learning_process
  from tff_partial.model.adapters import add_lora
  from tff_partial.model.adapters import freeze
  from tff_partial.model.first_values import learn_first_values
  from tff_partial.model.keras_models import from_keras
  from tff_partial.model.models import PartialModel
  from tff_partial.phases import Interleaved
  from tff_partial.phases import Phase
  from tff_partial.phases import sgd
  from tff_partial.solvers.exact import Exact
  from tff_partial.solvers.exact import Prior
  from tff_partial.training import callbacks
  from tff_partial.training.client_store.client_store import ClientStore
  from tff_partial.training.evaluation_sets import measure_by_support
  from tff_partial.training.personal_models import personalise
  from tff_partial.training.personal_models import Predictor
  from tff_partial.training.programs import evaluate
  from tff_partial.training.programs import EvaluationSet
  from tff_partial.training.programs import load
  from tff_partial.training.programs import train
  from tff_partial.training.programs import TrainingResult
  from tff_partial.training.selection import Selection
  from tff_partial.training.top_candidates import top_n

__version__ = '0.2.0'

__all__ = [
  'Aggregation',
  'ClientStore',
  'ClientWeighting',
  'Comparison',
  'EvaluationSet',
  'Exact',
  'Interleaved',
  'PartialModel',
  'Phase',
  'Predictor',
  'Prior',
  'Reader',
  'Selection',
  'TrainingResult',
  'Vocabulary',
  'add_lora',
  'aggregators',
  'algorithms',
  'analysis',
  'as_learning_process',
  'assignments',
  'callbacks',
  'check_independent_aggregation',
  'check_independent_training',
  'checks',
  'client_state',
  'client_statistics',
  'compare',
  'compose',
  'composition',
  'contexts',
  'data',
  'dp',
  'errors',
  'evaluate',
  'evaluation',
  'export',
  'exporting',
  'freeze',
  'from_arrays',
  'from_keras',
  'from_leaf',
  'from_pandas',
  'from_tff',
  'groups',
  'layers',
  'learn_first_values',
  'load',
  'load_vocabularies',
  'measure_by_support',
  'model',
  'open_clients',
  'pack',
  'partitions',
  'personalise',
  'phases',
  'processes',
  'random_bits',
  'runtimes',
  'sgd',
  'solvers',
  'sparse',
  'splits',
  'templates',
  'terms',
  'tiers',
  'top_n',
  'train',
  'training',
  'write_clients',
]

# Where those that are no modules of this folder are defined.
_HOMES = {
  'analysis.comparing': ['compare'],
  'analysis.comparisons': ['Comparison'],
  'checks.independent_aggregation': ['check_independent_aggregation'],
  'checks.independent_training': ['check_independent_training'],
  'composition': ['Aggregation', 'compose'],
  'data': ['partitions', 'splits'],
  'data.client_files': ['open_clients', 'write_clients'],
  'data.client_readers': ['Reader'],
  'data.frames': ['from_pandas'],
  'data.packing': ['from_arrays', 'from_leaf', 'from_tff', 'pack'],
  'data.vocabularies': ['Vocabulary', 'load as load_vocabularies'],
  'exchange.messages': ['ClientWeighting'],
  'exporting.exports': ['export'],
  'learning_process': ['as_learning_process'],
  'model.adapters': ['add_lora', 'freeze'],
  'model.first_values': ['learn_first_values'],
  'model.keras_models': ['from_keras'],
  'model.models': ['PartialModel'],
  'phases': ['Interleaved', 'Phase', 'sgd'],
  'solvers.exact': ['Exact', 'Prior'],
  'training': ['callbacks'],
  'training.client_store.client_store': ['ClientStore'],
  'training.evaluation_sets': ['measure_by_support'],
  'training.personal_models': ['Predictor', 'personalise'],
  'training.programs': [
    *('EvaluationSet', 'TrainingResult', 'evaluate', 'load', 'train')
  ],
  'training.selection': ['Selection'],
  'training.top_candidates': ['top_n'],
}

_lazily.require_tff_when_needed()
__getattr__ = _lazily.importer(__name__, __all__, _HOMES)


def __dir__() -> list[str]:
  return sorted({*__all__, *globals()})
