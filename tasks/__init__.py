"""Tasks with their data, and the programs that train and evaluate them."""

# Before TensorFlow, because it says what to do if TFF is missing.
import tff_partial as tff_partial
