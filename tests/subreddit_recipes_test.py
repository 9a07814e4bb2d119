"""The recipes of the document task, on invented comments and tiny models."""

from collections.abc import Iterator
import contextlib
import os

from absl import flags
from absl.testing import flagsaver
import pytest
import tensorflow as tf

from tasks import algorithms
from tasks import runs
from tests import commands

# (algorithm, clients a round, whether clients remember, whose vector goes in).
_RECIPES = {
  'subreddit_furl': ('furl', 32, True),
  'subreddit_global_fl': ('fed_avg', 32, False),
  'subreddit_personalized_server': ('centralized', 1, False),
  'subreddit_global_server': ('centralized', 1, False),
}


@contextlib.contextmanager
def _built(recipe: str) -> Iterator[algorithms.Trainable]:
  """What a recipe's flags build."""
  run = runs.run_flags()
  path = commands.ROOT / 'tasks' / 'recipes' / f'{recipe}.flags'
  before = os.getcwd()
  os.chdir(commands.ROOT)  # Recipes name each other from there.
  with flagsaver.flagsaver():
    try:
      flags.FLAGS(['train', f'--flagfile={path}', *commands.TINY_DOCUMENTS])
      yield run.trainable(run.task())
    finally:
      os.chdir(before)


@pytest.mark.parametrize('recipe', _RECIPES)
def test_recipes_build_what_they_are_named_after(recipe):
  algorithm, clients_per_round, remembers = _RECIPES[recipe]
  with _built(recipe) as trainable:
    assert flags.FLAGS.algorithm == algorithm
    assert trainable.clients_per_round == clients_per_round
    assert trainable.process.is_stateless is not remembers
    # What is private is in no type of the server.
    state = trainable.process.initialize.type_signature.result.member
    assert ('user_embedding' in str(state)) is (
      recipe == 'subreddit_personalized_server'
    )
    kept = trainable.process.initialize_client.type_signature.result
    assert ('user_embedding' in str(kept)) is remembers


def test_users_train_their_vectors_again_before_they_are_measured():
  with _built('subreddit_furl') as trainable:
    task = trainable._task
    for who in [task.validation, task.tests['seen']]:
      # On their training comments, and from what they remember.
      assert 'is_query' in trainable.evaluation(who).example_spec
      assert trainable.remembers(who)
    with flagsaver.flagsaver(
      evaluation_reconstruction_epochs=4,
      evaluation_reconstruction_learning_rate=0.25,
      evaluation_reconstruction_steps=7,
    ):
      training = trainable._training
      phase = training.personalising(training.own())
  assert (phase.epochs, phase.max_steps) == (4, 7)
  state = phase.optimizer.initialize(tf.TensorSpec([2]))
  assert state['learning_rate'] == 0.25
