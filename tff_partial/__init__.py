"""Partially local federated learning on TensorFlow Federated."""

# isort: off
from tff_partial import _require_tff as _require_tff
# isort: on

from tff_partial import algorithms as algorithms
from tff_partial import runtimes as runtimes
from tff_partial import splits as splits
from tff_partial.models import from_keras as from_keras
from tff_partial.programs import evaluate as evaluate
from tff_partial.programs import Exam as Exam
from tff_partial.programs import train as train
