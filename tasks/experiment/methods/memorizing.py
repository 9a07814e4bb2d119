"""Algorithms whose clients are evaluated with a memory of their examples.

They train like other algorithms, so `tff-partial evaluate --algorithm=...` also
evaluates models that those have trained.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING

from tasks import task as tasks_lib
from tasks.errors import OptionError
from tasks.experiment.methods import building
from tasks.experiment.methods.building import Measuring
from tasks.experiment.methods.setting import Setting

if TYPE_CHECKING:
  from tff_partial import phases
  from tff_partial.evaluation import Evaluation
  from tff_partial.model import models

# Flags of fine-tuning before clients are evaluated.
TUNING = ('tuned', 'tuning_learning_rate')


def _measuring(run: Setting, measuring: Measuring, user: str) -> dict[str, Any]:
  """Return the split, and the phases before clients fill their memory."""
  personalise: phases.Phase | None = None
  tune: phases.Phase | None = None
  if user == tasks_lib.OWN:
    personalise = run.local.when_measured(run.local.local_phase())
  if run.local.tuning_learning_rate is not None:
    tune = run.local.global_tuning_phase()
  else:
    run.local.refuse_set(
      ('tuned',), 'nothing is tuned. Give --tuning_learning_rate, too.'
    )
  return {
    'personalise': personalise,
    'tune': tune,
    'split': measuring.get('split') or run.local.split_when_measured(),
  }


def knn_per(trained: building.Algorithm) -> building.Algorithm:
  """Build kNN-Per with the model of another algorithm."""

  def measure(
    model: models.PartialModel, run: Setting, measuring: Measuring
  ) -> Evaluation:
    del model  # Its features are not an output.
    memory = run.hyperparameters.memory
    return building.builder('build_knn_per_eval')(
      run.hyperparameters.first_weights.begin(
        run.task.model_with_features(trained.user)
      ),
      features=tasks_lib.FEATURES,
      logits=tasks_lib.LOGITS,
      targets=run.task.targets,
      mixing=memory.mixing,
      num_neighbors=memory.neighbors,
      scale=memory.scale,
      **_measuring(run, measuring, trained.user),
    )

  return _remembering(trained, measure, ('knn_neighbors', 'knn_scale'))


def ngram_cache(trained: building.Algorithm) -> building.Algorithm:
  """Build an n-gram cache with the model of another algorithm."""

  def measure(
    model: models.PartialModel, run: Setting, measuring: Measuring
  ) -> Evaluation:
    if not run.task.predicts_tokens:
      raise OptionError(
        f'--task={run.task.name}: a cache of n-grams is for tasks that predict '
        'the next token. Use --task=next_word, or --algorithm=knn_per.'
      )
    return building.builder('build_ngram_cache_eval')(
      model,
      targets=run.task.targets,
      mixing=run.hyperparameters.memory.mixing,
      **_measuring(run, measuring, trained.user),
    )

  return _remembering(trained, measure)


def _remembering(
  trained: building.Algorithm,
  measure: building.Measure,
  reads: tuple[str, ...] = (),
) -> building.Algorithm:
  return dataclasses.replace(
    trained,
    measure=measure,
    always_personalises=True,
    has_memory=True,
    reads=(*trained.reads, 'memory_mixing', *TUNING, *reads),
  )
