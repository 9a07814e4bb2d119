"""From the name of an algorithm to its process and evaluations."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from absl import flags

from tasks import flags as flag_groups
from tff_partial import algorithms
from tff_partial import processes
from tff_partial import splits
from tff_partial.evaluation import Evaluation

FLAGS = flags.FLAGS


@dataclasses.dataclass(frozen=True)
class Trainable:
  """An algorithm on a task's model.

  Attributes:
    process: Trains it.
    evaluation: Measures clients as the task's protocol demands.
    personal: Builds what personalises on all of a client's examples, for
      recommendations; few need it.
  """

  process: processes.PartialProcess
  evaluation: Evaluation
  personal: Callable[[], Evaluation]


class FedReconFlags:
  """Federated reconstruction."""

  def __init__(self) -> None:
    """Defines the flags."""
    self._split = flag_groups.SplitFlags()
    self._aggregator = flag_groups.AggregatorFlags()
    self._reconstruction = flag_groups.OptimizerFlags(
      'reconstruction', 'local weights', 0.1
    )
    self._update = flag_groups.OptimizerFlags('update', 'global weights', 0.5)
    self._server = flag_groups.OptimizerFlags(
      'server', 'the joined update', 1.0
    )
    flags.DEFINE_integer('batch_size', 5, 'Examples of a step.', lower_bound=1)
    for phase, epochs in (('reconstruction', 5), ('update', 1)):
      flags.DEFINE_integer(
        f'{phase}_epochs',
        epochs,
        f'Passes of the {phase} over its examples, at most.',
        lower_bound=1,
      )
      flags.DEFINE_integer(
        f'{phase}_steps',
        50,
        f'Steps of the {phase}, at most; -1 for no limit.',
        lower_bound=-1,
      )
    flags.DEFINE_integer(
      'evaluation_reconstruction_steps',
      None,
      'Steps of reconstruction when measuring, if not as in training.',
      lower_bound=-1,
    )
    flags.DEFINE_bool(
      'joint', False, 'Train local weights in the update phase, too.'
    )

  def get(self, task: Any) -> Trainable:
    """Builds the algorithm on the task's model."""
    split = self._split.get(FLAGS.batch_size)
    reconstruction: dict[str, Any] = {
      'reconstruction_optimizer': self._reconstruction.get(),
      'reconstruction_epochs': FLAGS.reconstruction_epochs,
      'batch_size': FLAGS.batch_size,
    }
    train_steps = _limit(FLAGS.reconstruction_steps)
    process = algorithms.build_fed_recon(
      task.model,
      split=split,
      reconstruction_steps=train_steps,
      update_optimizer=self._update.get(),
      update_epochs=FLAGS.update_epochs,
      update_steps=_limit(FLAGS.update_steps),
      joint=FLAGS.joint,
      aggregator=self._aggregator.get(),
      server_optimizer=self._server.get(),
      client_weighting=self._aggregator.weighting(),
      **reconstruction,
    )
    measure_steps = FLAGS.evaluation_reconstruction_steps
    reconstruction['reconstruction_steps'] = (
      train_steps if measure_steps is None else _limit(measure_steps)
    )

    def evaluate(split: splits.Split) -> Evaluation:
      return algorithms.build_fed_recon_eval(
        task.model, split=split, **reconstruction
      )

    return Trainable(
      process,
      evaluate(task.evaluation_split or split),
      lambda: evaluate(splits.same()),
    )


def _limit(steps: int) -> int | None:
  return None if steps < 0 else steps


ALGORITHMS: dict[str, Callable[[], FedReconFlags]] = {
  'fed_recon': FedReconFlags
}


def names() -> Sequence[str]:
  """The names that `--algorithm` takes."""
  return sorted(ALGORITHMS)
