"""An experiment: its configuration, and how to run it."""

from tasks.experiment.command_line.flags import from_recipe as from_recipe
from tasks.experiment.config import Config as Config
from tasks.experiment.options.loop import Output as Output
from tasks.experiment.run.running import Result as Result
from tasks.experiment.run.running import run as run
