"""An experiment: its configuration, and how to run it."""

from tasks.experiment.config import Config as Config
from tasks.experiment.flags import from_recipe as from_recipe
from tasks.experiment.loop import Output as Output
from tasks.experiment.running import Result as Result
from tasks.experiment.running import run as run
