"""Tasks with their data, and the programs that train and evaluate them."""

# isort: off
import sys

# Answers help, and prints a run's first line, before importing TensorFlow.
import tff_partial_programs

tff_partial_programs.answer_early(sys.orig_argv)

# First of all imports, because it says what to do if TFF is missing.
import tff_partial as tff_partial  # noqa: E402
# isort: on
