"""The best candidates by a model, such as the items to recommend to a user."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import logging
import numpy as np
import tensorflow as tf

from tff_partial.arguments import spelling
from tff_partial.data import vocabularies
from tff_partial.model import tracing
from tff_partial.training.errors import ProgramError


class Choice(NamedTuple):
  """A candidate with its score.

  Attributes:
    candidate: The candidate.
    score: The model's prediction for it.
  """

  candidate: Any
  score: float


def top_n(
  keras_model: tf.keras.Model,
  candidates: vocabularies.Vocabulary | np.ndarray | Iterable[Any],
  n: int,
  *,
  exclude: Iterable[Any] = (),
  context: Mapping[str, Any] | None = None,
  output: str | int | None = None,
) -> list[Choice]:
  """Score candidates by a model, and return the best ones, best first.

  Candidates with equal scores keep their order, which is by id for a
  vocabulary.

      items = clients.vocabularies['item']
      tff_partial.top_n(keras_model, items, 10, exclude=['Heat', 'Alien'])

  Args:
    keras_model: A model with one number for a prediction, such as a client's.
    candidates: A vocabulary, whose values are ranked, or inputs
      `[candidates, ...]`.
    n: Number of candidates to return.
    exclude: Candidates to leave out, such as those that the client has had.
      Numbers match texts that read alike, and vice versa. If the vocabulary has
      an id for unseen values, unknown ones only cause a warning.
    context: For a model with several inputs, those that are the same for all
      candidates, by name; the candidates are the only other one.
    output: For a model with several outputs, the one to rank by: its name, or
      its place in a list.

  Raises:
    ProgramError: If there are fewer than `n` candidates, one to exclude or the
      output is unknown, the model cannot read the candidates, or predictions
      are not one finite number each.
  """
  if isinstance(candidates, vocabularies.Vocabulary):
    # Id 0 of all unseen values is not a value to return.
    ids = np.arange(int(candidates.unseen), len(candidates))
    names: Any = candidates.values
  else:
    ids = names = np.asarray(
      candidates if hasattr(candidates, '__len__') else list(candidates)
    )
  if not len(ids):
    raise ProgramError('top_n: there are no candidates. Give one or more.')
  out = [exclude] if isinstance(exclude, str) else list(exclude)
  if out and ids.ndim != 1:
    raise ProgramError(
      f'exclude: candidates are arrays {list(ids.shape[1:])} each, which are '
      'not looked for. Leave unwanted ones out.'
    )
  may_lack = isinstance(candidates, vocabularies.Vocabulary) and (
    candidates.unseen
  )
  left = np.flatnonzero(_is_wanted(names, out, may_lack))
  if not 1 <= n <= len(left):
    raise ProgramError(
      f'top_n: cannot name {n} of the {len(left)} candidates that are left.'
    )
  inputs = _inputs(keras_model, ids[left], context or {})
  try:
    predicted = keras_model.predict(inputs, verbose=0)
  except (TypeError, ValueError, tf.errors.OpError) as error:
    raise ProgramError(
      f'top_n: the model cannot read candidates of the shape '
      f'{list(ids.shape[1:])}: {tracing.reason(error)} Candidates are inputs, '
      'each of which the model scores. For the classes of a classifier, sort '
      'what its `predict` returns.'
    ) from error
  # Unsigned numbers have no negative ones to sort by.
  scores = np.asarray(_output(predicted, output), np.float64)
  if scores.size != len(left) or not np.isfinite(scores).all():
    raise ProgramError(
      f'top_n: the model predicts {list(scores.shape)} for {len(left)} '
      'candidates, but each needs one finite number as its score. Pass a model '
      'whose only output is the score.'
    )
  scores = scores.reshape([-1])
  best = np.argsort(-scores, kind='stable')[:n]
  return [Choice(names[left[place]], float(scores[place])) for place in best]


def _is_wanted(
  names: Sequence[Any], exclude: Sequence[Any], may_lack: bool
) -> np.ndarray:
  """Return which candidates are left, bool `[candidates]`.

  A value to exclude that is no candidate is refused, unless they `may_lack` it.
  """
  texts = [vocabularies.as_text(name) for name in names]
  unwanted = {vocabularies.as_text(value): value for value in exclude}
  known = set(texts)
  wrong = spelling.unknown(
    'candidate', [v for t, v in unwanted.items() if t not in known], texts
  )
  if wrong and not may_lack:
    raise ProgramError(
      f'exclude: {wrong} Exclude some of the candidates, such as {names[0]!r}.'
    )
  if wrong:
    logging.warning('top_n: exclude names what nothing excludes: %s', wrong)
  return np.array([text not in unwanted for text in texts], bool)


def _output(found: Any, output: str | int | None) -> Any:
  """Return the output to rank by."""
  outputs: dict[Any, Any] = {None: found}
  if not isinstance(found, np.ndarray):
    outputs = dict(found if isinstance(found, Mapping) else enumerate(found))
  if output not in outputs:
    has = 'one output' if None in outputs else f'outputs {list(outputs)}'
    raise ProgramError(
      f'top_n: output={output!r}: the model has {has}. Name one of several.'
    )
  return outputs[output]


def _inputs(
  keras_model: tf.keras.Model,
  candidates: np.ndarray,
  context: Mapping[str, Any],
) -> Any:
  """Return the model's inputs for some candidates."""
  if not context:
    return _as_input(candidates)
  names = list(keras_model.input_names)
  free = [name for name in names if name not in context]
  if len(free) != 1 or set(context) - set(names):
    raise ProgramError(
      f'context={list(context)}: the model has the inputs {names}, of which '
      'all but that of the candidates are to be given.'
    )
  repeated = {
    name: _as_input(
      np.repeat(np.asarray(value)[np.newaxis], len(candidates), 0)
    )
    for name, value in context.items()
  }
  return {free[0]: _as_input(candidates), **repeated}


def _as_input(array: np.ndarray) -> Any:
  """Return an array as either Keras takes it: Keras 3, strings as tensors."""
  return tf.constant(array) if array.dtype.kind in 'OSU' else array
