"""How many of the library's calls lie between a builder and the gradient."""

import pathlib
import traceback

import tensorflow as tf

from tests.support import planted
import tff_partial
from tff_partial import algorithms

_LIBRARY = pathlib.Path(tff_partial.__file__).parent
# The path that `docs/architecture.md` describes, in this order.
_STEPS = (
  ('algorithms/fed_recon.py', 'build_fed_recon'),
  ('composition.py', 'compose'),
  ('client/client_work.py', 'computation'),
  ('exchange/messages.py', 'client_update'),
  ('client/local_training.py', 'run'),
  ('client/client_steps.py', 'step'),
)


def _own_frames() -> list[tuple[str, str]]:
  """The library's part of the current stack: files and functions."""
  return [
    (str(pathlib.Path(frame.filename).relative_to(_LIBRARY)), frame.name)
    for frame in traceback.extract_stack()
    if pathlib.Path(frame.filename).is_relative_to(_LIBRARY)
  ]


def test_six_calls_lead_from_the_builder_to_the_gradient():
  """Counts frames of files of the library on a real stack.

  The loss has a gradient of its own, which TensorFlow calls from
  `tape.gradient` while the round is traced. On the stack at that moment, from
  the test's call of the builder on, are all calls that lead there; those of
  TensorFlow and TFF are left out, and none of ours is.
  """
  stacks = []

  @tf.custom_gradient
  def spy(errors):
    def gradient(upstream):
      stacks.append(_own_frames())
      return upstream

    return tf.identity(errors), gradient

  def loss(labels, predictions):
    return spy(tf.square(labels - predictions))

  model = planted.factorization(loss=loss)
  stacks.clear()  # Of the model's own checks.
  algorithms.build_fed_recon(model)
  assert stacks
  for stack in stacks:
    assert tuple(stack) == _STEPS
