"""Export of what devices need of a trained model.

A device has no TFF, and perhaps no TensorFlow: it reconstructs a user's local
weights by the same steps as a client of the simulation (Algorithm 1 of the
FedRecon paper), traced to a graph.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import json
import pathlib
import shutil
import tempfile
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tff_partial import phases
from tff_partial import processes
from tff_partial import random_bits
from tff_partial import tiers
from tff_partial.arguments import checked_numbers
from tff_partial.arguments import spelling
from tff_partial.client import work as work_lib
from tff_partial.data import splits
from tff_partial.data import vocabularies as vocabularies_lib
from tff_partial.data.vocabulary_checks import check_encoding
from tff_partial.exporting import lookups
from tff_partial.exporting import serving
from tff_partial.exporting import tflite
from tff_partial.exporting.errors import ExportError
from tff_partial.model import keras_filling
from tff_partial.model import models
from tff_partial.training import files
from tff_partial.training import results

SAVED_MODEL, TFLITE = 'saved_model', 'tflite'
FORMATS = (SAVED_MODEL, TFLITE)

# How to train local weights: phases, a process, or a result that has one.
Reconstruction: TypeAlias = (
  phases.Phase
  | phases.Work
  | processes.PartialProcess
  | results.TrainingResult
  | results.Saved
)

_FILES = {SAVED_MODEL: 'saved_model', TFLITE: 'model.tflite'}
_DESCRIPTION = 'signatures.json'


@dataclasses.dataclass(frozen=True)
class Exported:
  """Files that were exported.

  Attributes:
    folder: Their folder.
    paths: Format to its file, or its folder for SavedModel.
    signatures: Name of each signature to the names of its inputs and outputs,
      each with its dtype and shape; as in `signatures.json`.
    local: Name of an input or output to its local variable.
    num_support: Largest number of support examples.
    seed: int32 `[2]`: a client of the simulation with this seed starts from the
      same local weights and takes the same steps.
  """

  folder: pathlib.Path
  paths: dict[str, pathlib.Path]
  signatures: dict[str, Any]
  local: dict[str, str]
  num_support: int
  seed: np.ndarray

  def __repr__(self) -> str:
    """Name the files with their sizes, and the signatures."""
    written = (
      f'{name} ({size:,} bytes)' for name, size in self.sizes().items()
    )
    return (
      f'Exported to {self.folder}: {", ".join(written)}; signatures '
      f'{", ".join(self.signatures)}; up to {self.num_support} support examples'
    )

  def sizes(self) -> dict[str, int]:
    """Return the size of each format in bytes."""
    return {
      name: sum(
        file.stat().st_size
        for file in ([path] if path.is_file() else path.rglob('*'))
        if file.is_file()
      )
      for name, path in self.paths.items()
    }


def export(
  model: models.PartialModel,
  weights: Any,
  folder: str | pathlib.Path,
  formats: Sequence[str] = FORMATS,
  *,
  reconstruct: Reconstruction | None = None,
  num_support: int = 100,
  num_predicted: int | None = None,
  weighted: bool = False,
  seed: int = 0,
  vocabularies: Mapping[str, vocabularies_lib.Vocabulary] | None = None,
) -> Exported:
  """Write a trained model to files that serve a user on a device.

      exported = tff_partial.export(
        model, result.best_weights, 'on_device', reconstruct=result
      )

  docs/export.md describes their signatures: `predict`, `reconstruct`, `train`,
  `infer`, `reset` and `restore`. A model without local weights has `predict`.

  Args:
    model: The model.
    weights: The shared weights, `ModelWeights` such as `result.best_weights`,
      or a mapping from variable name to value. Values of local variables, if
      any, are those that devices start from.
    folder: A new or empty folder to write to.
    formats: Formats to write: `saved_model`, for TensorFlow, and `tflite`, with
      builtin operators only.
    reconstruct: How to train local weights on all support examples: the
      result of `train` or `load`, or a process, for the steps of `personalise`
      at a client that never took part; or one phase, or several in order, whose
      `train`, `on`, `slots` and `measured` are ignored. Not needed for a model
      without local weights.
    num_support: Largest number of support examples.
    num_predicted: Number of examples that `predict` and `infer` take; None for
      any number. TFLite needs a number for recurrent layers.
    weighted: True if `reconstruct` and `train` also read `weight`, else 1.
    seed: Seed of initial local weights, and of draws in `reconstruct`.
    vocabularies: Column to the vocabulary that encodes the model's inputs, such
      as `clients.vocabularies`, for `vocabularies.json` next to the files.

  Returns:
    The exported files.

  Raises:
    ExportError: If devices could not compute it, or an argument is impossible.
    ModelError: If weights do not fit the model.
    VocabularyError: If JSON cannot hold a vocabulary, or training had another.
  """
  target = pathlib.Path(folder)
  _check_target(target, formats)
  _check_model(model)
  _check_sizes(num_support=num_support, num_predicted=num_predicted)
  vocabularies_lib.describe(vocabularies or {})  # Before anything is written.
  check_encoding(getattr(reconstruct, 'vocabularies', {}), vocabularies or {})
  client_seed = random_bits.derive(seed, 'export')
  serve = functools.partial(
    serving.Serving,
    model,
    _values(model, weights, client_seed),
    _work(reconstruct, model),
    seed=client_seed,
    num_support=num_support,
    num_predicted=num_predicted,
    weighted=weighted,
  )
  lifted = model.example_spec.lifted
  tables = lookups.tables(lifted) if TFLITE in formats else {}
  # TFLite reads numbers in place of what its tables would look up.
  computed = {path: lifted[path] for path in lifted if path not in tables}
  served = serve(lifted if SAVED_MODEL in formats else computed)
  numbers = serve(computed) if SAVED_MODEL in formats and tables else served
  with _whole(target):
    made = _write(served, numbers, target, formats, num_support, client_seed)
    lookups.write(lifted, tables, target)
    if vocabularies:
      vocabularies_lib.save(vocabularies, target)
  return made


@contextlib.contextmanager
def _whole(target: pathlib.Path) -> Iterator[None]:
  """Leave nothing in the folder, which was empty, if something is missing."""
  try:
    with files.writing(f'{target}: nothing was exported', kind=ExportError):
      yield
  except BaseException:
    shutil.rmtree(target, ignore_errors=True)
    raise


def _write(
  served: serving.Serving,
  numbers: serving.Serving,
  target: pathlib.Path,
  formats: Sequence[str],
  num_support: int,
  seed: np.ndarray,
) -> Exported:
  """Write a model and the description of its signatures."""
  signatures = served.signatures()
  # A plain dict: TensorFlow wraps attributes of modules.
  variable_of = dict(served.variable_of)
  described = _described(signatures)
  target.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=target) as scratch:
    made = pathlib.Path(scratch)
    saved = made / _FILES[SAVED_MODEL]
    tf.saved_model.save(served, str(saved), signatures=signatures)
    if TFLITE in formats:
      if numbers is not served:
        saved = made / 'numbers'
        signatures = numbers.signatures()
        tf.saved_model.save(numbers, str(saved), signatures=signatures)
      (made / _FILES[TFLITE]).write_bytes(tflite.convert(saved, signatures))
    paths = {name: target / _FILES[name] for name in FORMATS if name in formats}
    for path in paths.values():
      (made / path.name).rename(path)
  text = {
    'signatures': described,
    'local': variable_of,
    'num_support': int(num_support),
    'seed': seed.tolist(),
  }
  (target / _DESCRIPTION).write_text(
    json.dumps(text, indent=2) + '\n', encoding='utf-8'
  )
  return Exported(target, paths, described, variable_of, num_support, seed)


def _check_sizes(**sizes: int | None) -> None:
  for name, size in sizes.items():
    if size is not None and checked_numbers.why_not_whole(size, 1):
      raise ExportError(
        f'{name}={size}: give room for 1 example or more, a whole number.'
      )


def _check_target(target: pathlib.Path, formats: Sequence[str]) -> None:
  """Check that the formats can be written to the folder."""
  if isinstance(formats, str) or not formats:
    raise ExportError(
      f'formats={formats!r}: give a sequence of some of {", ".join(FORMATS)}.'
    )
  if unknown := [name for name in formats if name not in FORMATS]:
    raise ExportError(
      f'formats: {unknown[0]!r} is none of {", ".join(FORMATS)}.'
    )
  if target.exists() and (not target.is_dir() or any(target.iterdir())):
    raise ExportError(
      f'folder={target}: there is something already. Name a new folder, or an '
      'empty one.'
    )


def _check_model(model: models.PartialModel) -> None:
  """Check that a device has one copy of each of the model's weights."""
  models.check(model)
  if tiers.GROUP in model.tiers:
    raise ExportError(
      'The model has variables for groups, of which a device would have to '
      'choose one. Export a model without `group`, or save the Keras model of '
      'one client, which `tff_partial.personalise` makes.'
    )
  if sized := list(model.client_tables.names):
    raise ExportError(
      f'The tables {sized} have the size that the data of a client need, but '
      'what is exported has one size for all. Save the Keras model of one '
      'client, which `tff_partial.personalise` makes.'
    )


def _of_process(
  process: processes.PartialProcess, rounds: int | None
) -> Sequence[phases.Part]:
  """Return the work of `personalise` at a client that never took part.

  Args:
    process: The process.
    rounds: Number of rounds done, or None if unknown.
  """
  work = process.work
  if work is None:
    raise ExportError(
      'reconstruct: what a client of the process does is not known. Give '
      'the phases.'
    )
  if rounds is None and work.follows_rounds:
    raise ExportError(
      'reconstruct: the epochs of the process follow the rounds, or its '
      'rates do. Give the result of `train`, which says how many were done.'
    )
  own = work_lib.personal_phases(work.work, process.model, rounds or 0)
  others = {tier for phase in phases.all_phases(own) for tier in phase.train}
  others -= {tiers.LOCAL}
  if others or not own:
    raise ExportError(
      'reconstruct: clients of the process train '
      f'{", ".join(sorted(others)) or "no local"} weights of their own, which '
      'a device could not. Save the Keras model of one client, which '
      '`tff_partial.personalise` makes, or give phases.'
    )
  return own


def _work(
  given: Reconstruction | None, model: models.PartialModel
) -> list[phases.Phase]:
  """Return the phases that reconstruct from all support examples."""
  if tiers.LOCAL not in model.tiers:
    return []
  if given is None:
    raise ExportError(
      'The model has local weights, which devices rebuild. Say by which steps: '
      '`reconstruct=result` of `train`, for those of its process, or one or '
      'several `tff_partial.Phase(...)`.'
    )
  if isinstance(given, processes.PartialProcess):
    work: Sequence[Any] = _of_process(given, None)
  elif isinstance(given, results.TrainingResult | results.Saved):
    work = _of_process(given.process, given.rounds)
  else:
    work = [given] if isinstance(given, phases.Phase) else list(given)
  found: list[phases.Phase] = []
  for phase in work:
    expected = 'phases, `tff_partial.Phase(...)`'
    spelling.check_kind(
      'reconstruct', phase, phases.Phase, expected, ExportError
    )
    for name, what in (('epochs', 'epochs'), ('rate_factor', 'rates')):
      if callable(getattr(phase, name)):
        raise ExportError(
          f'reconstruct: the {what} of a phase follow the rounds, but a '
          f'device is in no round. Give a number, {name}=...'
        )
    if phase.read is not tiers.server_and_local_weights:
      raise ExportError(
        'reconstruct: a phase reads a copy of the weights, of which a '
        'device has none. Leave `weights_fn` out.'
      )
    optimizer = phase.optimizer
    if isinstance(optimizer, Mapping) and tiers.LOCAL not in optimizer:
      raise ExportError(
        'reconstruct: a phase has no optimizer for local weights, but for '
        f'{list(optimizer)}.'
      )
    found.append(
      dataclasses.replace(
        phase,
        train=(tiers.LOCAL,),
        on=splits.everything(),
        slots=phases.RESET,
        measured=False,
      )
    )
  work_lib.check(found, model)
  return found


def _values(
  model: models.PartialModel, weights: Any, seed: np.ndarray
) -> dict[str, np.ndarray]:
  """Return the value of each variable, by name."""
  drawn = model.initial_weights(tiers.LOCAL, random_bits.fold_in(seed, 'local'))
  given: dict[str, Any] = {**drawn}
  for named in keras_filling.named_weights(weights):
    given.update(named)
  # Checks names and shapes.
  model.to_keras(given)
  frozen = model.frozen_weights()
  return {
    v.name: np.asarray(
      given.get(v.name, frozen.get(v.name)), v.dtype.as_numpy_dtype
    )
    for v in model.variables
  }


def _described(signatures: Mapping[str, Any]) -> dict[str, Any]:
  """Describe inputs and outputs of signatures, with dtypes and shapes."""

  def described(specs: Mapping[str, Any]) -> dict[str, Any]:
    return {
      name: {'dtype': spec.dtype.name, 'shape': spec.shape.as_list()}
      for name, spec in specs.items()
    }

  return {
    name: {
      'inputs': described(
        {spec.name: spec for spec in signature.structured_input_signature[0]}
      ),
      'outputs': described(signature.structured_outputs),
    }
    for name, signature in signatures.items()
  }
