"""The recipes of the document task, on invented comments and tiny models."""

from typing import Any

import pytest
import tensorflow as tf

from tasks.experiment.command_line.arguments import parse
from tasks.experiment.config import Config
from tasks.experiment.runs import running
from tasks.experiment.trainable import Trainable
from tests.support import commands
import tff_partial
from tff_partial.arguments import optimizers

# (algorithm, clients a round, whether clients remember, whose vector goes in).
_RECIPES = {
  'subreddit_furl': ('furl', 32, True),
  'subreddit_global_fl': ('fed_avg', 32, False),
  'subreddit_personalized_server': ('centralized', 1, False),
  'subreddit_global_server': ('centralized', 1, False),
}


def _built(recipe: str, **changes: Any) -> tuple[Config, Trainable]:
  """What a recipe's flags build."""
  config = parse([f'--recipe={recipe}', *commands.TINY_DOCUMENTS])
  config = config.with_flags(changes)
  return config, Trainable(config, running.load(config))


@pytest.mark.slow
@pytest.mark.parametrize('recipe', _RECIPES)
def test_recipes_build_what_they_are_named_after(recipe):
  algorithm, clients_per_round, remembers = _RECIPES[recipe]
  config, trainable = _built(recipe)
  assert config.algorithm == algorithm
  assert trainable.clients_per_round == clients_per_round
  assert trainable.process.is_stateless is not remembers
  # What is private is in no type of the server.
  state = trainable.process.initialize.type_signature.result.member
  is_at_server = recipe == 'subreddit_personalized_server'
  assert ('user_embedding' in str(state)) is is_at_server
  kept = trainable.process.initialize_client.type_signature.result
  assert ('user_embedding' in str(kept)) is remembers


@pytest.mark.slow
def test_users_train_their_vectors_again_before_they_are_measured():
  config, trainable = _built(
    'subreddit_furl',
    evaluation_reconstruction_epochs=4,
    evaluation_reconstruction_learning_rate=0.25,
    evaluation_reconstruction_steps=7,
  )
  task = trainable._task
  for who in [task.validation, task.tests['seen']]:
    # On their training comments, and from what they remember.
    assert 'is_query' in trainable.evaluation(who).example_spec
    assert trainable.remembers(who)
  phase = config.local.when_measured(config.local.local_phase())
  assert (phase.epochs, phase.max_steps) == (4, 7)
  state = phase.optimizer.initialize(tf.TensorSpec([2]))
  assert state['learning_rate'] == 0.25
  phase = config.local.when_measured(config.local.joint_phase())
  rates = {t: optimizers.rate_of(o) for t, o in phase.optimizer.items()}
  assert rates[tff_partial.tiers.LOCAL] == 0.25
  assert rates[tff_partial.tiers.GLOBAL] == config.local.update.learning_rate
