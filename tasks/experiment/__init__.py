"""An experiment: its configuration, and how to run it."""

from typing import TYPE_CHECKING

from tasks.experiment.command_line.arguments import from_recipe as from_recipe
from tasks.experiment.config import Config as Config
from tasks.experiment.options.loop import Output as Output
from tff_partial._environment import lazily as _lazily

if TYPE_CHECKING:
  from tasks.experiment.runs.result import Result as Result
  from tasks.experiment.runs.running import run as run

__all__ = ['Config', 'Output', 'Result', 'from_recipe', 'run']

# These import TensorFlow.
__getattr__ = _lazily.importer(
  __name__, [], {'runs.result': ['Result'], 'runs.running': ['run']}
)
