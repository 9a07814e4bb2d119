"""Tasks with their data, and the binaries that train and measure them."""

# isort: off
import sys

# Neither help nor the first word of a run waits until TensorFlow is imported.
import tff_partial_programs

tff_partial_programs.answer_early(sys.orig_argv)

# Before all others, because it says what to do where TFF is missing.
import tff_partial as tff_partial  # noqa: E402
# isort: on
