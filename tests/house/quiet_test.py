"""What TensorFlow says of itself stays out of the output; all else is said."""

import logging

import pytest

from tests.support import commands

_TRAIN = """
import sys
import tff_partial
import tensorflow_federated as tff
from tests.support import small_runs
process = tff_partial.algorithms.build_fed_recon(
  small_runs.build_model(),
  aggregation=tff_partial.Aggregation(tff.learning.secure_aggregator()),
)
clients = small_runs.pack(process.example_spec, 'train', 12)
# As in a notebook, where TensorFlow says more.
import logging
logging.getLogger('tensorflow').setLevel(logging.INFO)
logging.getLogger('tensorflow').info('something else')
with tff_partial.runtimes.cohort(jit=False):
  tff_partial.train(
    process, clients, rounds=2, clients_per_round=4, output_dir=sys.argv[1]
  )
"""


@pytest.mark.slow
def test_a_program_of_a_user_prints_nothing_but_its_own(tmp_path):
  as_of_a_user = commands.environment(TF_CPP_MIN_LOG_LEVEL=None)
  done = commands.python(
    '-c', _TRAIN, str(tmp_path), env=as_of_a_user, check=True
  )
  assert done.stdout == ''
  # Once for each handler.
  assert set(done.stderr.splitlines()) == {'INFO:tensorflow:something else'}


@pytest.mark.parametrize(
  ('text', 'is_said'),
  [
    ('Assets written to: out/checkpoints/round_3_temp1/assets', False),
    ('Assets written to: /tmp/my_model/assets', True),
    ('==\nObject was never used\n<tf.Operation "a/Assert/b">', False),
    ('==\nObject was never used\n<tf.Operation "my_write">', True),
    ('Gradients do not exist for variables', True),
  ],
)
def test_what_is_said(text, is_said, caplog):
  with caplog.at_level(logging.INFO, 'tensorflow'):
    logging.getLogger('tensorflow').error(text)
  assert (text in caplog.text) == is_said
