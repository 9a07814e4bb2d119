"""Partially local federated learning on TensorFlow Federated."""

# isort: off
from tff_partial._environment import quiet as _quiet
from tff_partial._environment import require_tff as _require_tff
# isort: on

from tff_partial import aggregators as aggregators
from tff_partial import algorithms as algorithms
from tff_partial import assignments as assignments
from tff_partial import client_state as client_state
from tff_partial import contexts as contexts
from tff_partial import groups as groups
from tff_partial import layers as layers
from tff_partial import runtimes as runtimes
from tff_partial import statistics as statistics
from tff_partial import terms as terms
from tff_partial import tiers as tiers
from tff_partial.checks.independent_aggregation import (
  check_independent_aggregation as check_independent_aggregation,
)
from tff_partial.checks.independent_training import (
  check_independent_training as check_independent_training,
)
from tff_partial.composition import compose as compose
from tff_partial.data import partitions as partitions
from tff_partial.data import splits as splits
from tff_partial.data.client_files import open_clients as open_clients
from tff_partial.data.client_files import write_clients as write_clients
from tff_partial.data.client_readers import Reader as Reader
from tff_partial.data.packing import from_arrays as from_arrays
from tff_partial.data.packing import from_leaf as from_leaf
from tff_partial.data.packing import from_pandas as from_pandas
from tff_partial.data.packing import from_tff as from_tff
from tff_partial.data.packing import pack as pack
from tff_partial.data.vocabularies import load as load_vocabularies
from tff_partial.data.vocabularies import Vocabulary as Vocabulary
from tff_partial.exchange.messages import ClientWeighting as ClientWeighting
from tff_partial.exporting.exports import export as export
from tff_partial.learning_process import (
  as_evaluation_process as as_evaluation_process,
)
from tff_partial.learning_process import (
  as_learning_process as as_learning_process,
)
from tff_partial.model.first_values import (
  learn_first_values as learn_first_values,
)
from tff_partial.model.keras_models import from_keras as from_keras
from tff_partial.model.models import PartialModel as PartialModel
from tff_partial.phases import Interleaved as Interleaved
from tff_partial.phases import Phase as Phase
from tff_partial.phases import sgd as sgd
from tff_partial.training import callbacks as callbacks
from tff_partial.training.client_store.client_store import (
  ClientStore as ClientStore,
)
from tff_partial.training.cold_start import (
  measure_by_support as measure_by_support,
)
from tff_partial.training.personal_models import personalise as personalise
from tff_partial.training.personal_models import Predictor as Predictor
from tff_partial.training.personal_models import top_n as top_n
from tff_partial.training.programs import evaluate as evaluate
from tff_partial.training.programs import EvaluationSet as EvaluationSet
from tff_partial.training.programs import load as load
from tff_partial.training.programs import train as train
from tff_partial.training.programs import TrainingResult as TrainingResult
from tff_partial.training.selection import Selection as Selection
