"""Tasks with their data, and the binaries that train and measure them."""

# Before all others, because it says what to do where TFF is missing.
import tff_partial as tff_partial
