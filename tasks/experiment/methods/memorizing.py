"""Algorithms whose clients are evaluated with a memory of their examples.

They train like other algorithms, so `tff-partial evaluate --algorithm=...` also
evaluates models that those have trained.
"""

import dataclasses
from typing import Protocol, runtime_checkable

import tensorflow as tf

from baselines import memories
from baselines.knn_per import build_knn_per_eval
from baselines.ngram_cache import build_ngram_cache_eval
from tasks import task as tasks_lib
from tasks.errors import OptionError
from tasks.experiment.methods import building
from tasks.experiment.methods.setting import Setting
from tff_partial import phases
from tff_partial.evaluation import Evaluation
from tff_partial.evaluation import Measuring
from tff_partial.model import models

# Flags of fine-tuning before clients are evaluated.
TUNING = ('tuned', 'tuning_learning_rate')


@runtime_checkable
class PredictsTokens(Protocol):
  """A task that reads tokens and predicts the next of each."""

  def targets(self, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the target classes.

    Args:
      labels: Ids of the next tokens, int32 `[batch, time]`.

    Returns:
      The classes, int32, and a mask that is True where there is one, bool, both
      `[batch, time]`.
    """

  def model_with_features(self, user: str) -> models.PartialModel:
    """Build the model in one of its forms, with its features as an output.

    Its outputs are a mapping of FEATURES and LOGITS; its variables are those
    of the same form without features.

    Args:
      user: OWN or NOBODY.
    """


def _with_features(task: tasks_lib.Task, user: str) -> models.PartialModel:
  """Build the model that was trained, with its features as an output."""
  if isinstance(task, PredictsTokens):
    return task.model_with_features(user)
  if user == tasks_lib.NOBODY:
    return task.model_with(tasks_lib.FEATURES)
  raise OptionError(
    f'--task={task.name}: its model has either features for an output or a '
    'part that is its own. Use --algorithm=knn_per, or --task=next_word.'
  )


def _targets(task: tasks_lib.Task) -> memories.TargetsFn:
  if isinstance(task, PredictsTokens):
    return task.targets
  return memories.classes_from_zero


def _measuring(
  run: Setting, measuring: Measuring, user: str
) -> memories.Measuring:
  """Return the split, and the phases before clients fill their memory."""
  personalise: phases.Phase | None = None
  tune: phases.Phase | None = None
  if user == tasks_lib.OWN:
    personalise = run.local.when_measured(run.local.of_personal())
  if run.local.tuning_learning_rate is not None:
    tune = run.local.of_tuning_global()
  return {
    'personalise': personalise,
    'tune': tune,
    'split': measuring.get('split') or run.local.build_split(),
  }


def knn_per(trained: building.Algorithm) -> building.Algorithm:
  """Build kNN-Per with the model of another algorithm.

  Args:
    trained: The algorithm that trains.
  """

  def measure(
    model: models.PartialModel, run: Setting, measuring: Measuring
  ) -> Evaluation:
    del model  # Its features are not an output.
    return build_knn_per_eval(
      run.hyperparameters.begin_local(_with_features(run.task, trained.user)),
      features=tasks_lib.FEATURES,
      logits=tasks_lib.LOGITS,
      targets=_targets(run.task),
      **run.hyperparameters.memory.knn_arguments,
      **_measuring(run, measuring, trained.user),
    )

  return _remembering(trained, measure, ('knn_neighbors', 'knn_scale'))


def ngram_cache(trained: building.Algorithm) -> building.Algorithm:
  """Build an n-gram cache with the model of another algorithm.

  Args:
    trained: The algorithm that trains.
  """

  def measure(
    model: models.PartialModel, run: Setting, measuring: Measuring
  ) -> Evaluation:
    if not isinstance(run.task, PredictsTokens):
      raise OptionError(
        f'--task={run.task.name}: a cache of n-grams is for tasks that predict '
        'the next token. Use --task=next_word, or --algorithm=knn_per.'
      )
    return build_ngram_cache_eval(
      model,
      targets=run.task.targets,
      **run.hyperparameters.memory.cache_arguments,
      **_measuring(run, measuring, trained.user),
    )

  return _remembering(trained, measure, ('cache_tokens', 'cache_smoothing'))


def _remembering(
  trained: building.Algorithm,
  measure: building.Measure,
  reads: tuple[str, ...],
) -> building.Algorithm:
  return dataclasses.replace(
    trained,
    measure=measure,
    always_personalises=True,
    has_memory=True,
    reads=(*trained.reads, 'memory_mixing', *TUNING, *reads),
  )
