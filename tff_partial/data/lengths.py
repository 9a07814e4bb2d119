"""Sequences of open length: padded with zeros, to one of a few lengths.

The first axis of a field of examples may be open, `[None, ...]`. All such
fields of a client are padded to one length. The steps that this adds count for
nothing, if the model's layers leave them out, which `open_lengths` checks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf


class Lengths(NamedTuple):
  """Lengths to which clients' sequences are padded.

  Attributes:
    steps: Steps of each client's longest sequence, `[clients]`.
    sizes: The lengths, ascending.
    are_open: True for each field of open length, in the structure of examples.
  """

  steps: np.ndarray
  sizes: Sequence[int]
  are_open: Any


def is_open(spec: tf.TensorSpec) -> bool:
  """Return True if examples of this spec differ in shape."""
  return not spec.shape.is_fully_defined()


def are_open(specs: Any) -> bool:
  """Return True if any of nested specs is open."""
  return any(map(is_open, tf.nest.flatten(specs)))


def padded(sequences: Any, spec: tf.TensorSpec) -> np.ndarray:
  """Return sequences as one array, with zeros at the end of short ones.

  Args:
    sequences: Sequences of different lengths, or an array of padded ones.
    spec: Spec of one sequence.

  Raises:
    ValueError: If they differ in more than their length.
  """
  if isinstance(sequences, tf.RaggedTensor):
    sequences = sequences.to_tensor().numpy()
  if isinstance(sequences, np.ndarray) and sequences.dtype != object:
    return sequences
  rows = [np.asarray(row) for row in sequences]
  if any(row.ndim == 0 for row in rows):
    return np.asarray(sequences)  # To be refused for its shape.
  full = [row for row in rows if row.size]
  inner = {row.shape[1:] for row in full} or {tuple(spec.shape[1:])}
  if len(inner) > 1:
    raise ValueError(f'They have steps of the shapes {sorted(inner)}.')
  dtypes = {row.dtype for row in full} or {spec.dtype.as_numpy_dtype}
  result = np.zeros(
    [len(rows), max([1, *map(len, full)]), *inner.pop()],
    np.result_type(*dtypes),
  )
  for place, row in enumerate(rows):
    if row.size:
      result[place, : len(row)] = row
  return result


def cut_or_padded(array: np.ndarray, length: int) -> np.ndarray:
  """Return sequences `[examples, steps, ...]` with as many steps as wanted."""
  missing = max(length - array.shape[1], 0)
  widths = [(0, 0), (0, missing), *[(0, 0)] * (array.ndim - 2)]
  return np.pad(array, widths) if missing else array[:, :length]


def joined(spec: tf.TensorSpec, arrays: Sequence[np.ndarray]) -> np.ndarray:
  """Concatenate clients' arrays `[examples, ...]`, padded to one length."""
  if is_open(spec):
    longest = max(array.shape[1] for array in arrays)
    arrays = [cut_or_padded(array, longest) for array in arrays]
  return np.concatenate(arrays)


def longest(arrays: Any, specs: Any) -> int:
  """Return the most steps that any of nested arrays of open specs has."""
  pairs = zip(tf.nest.flatten(arrays), tf.nest.flatten(specs), strict=True)
  return max((a.shape[1] for a, spec in pairs if is_open(spec)), default=0)


def num_steps(inputs: Any, specs: Any, offsets: np.ndarray) -> np.ndarray:
  """Count the steps of each client's longest input, without zeros at the end.

  Args:
    inputs: Nested arrays `[all examples, ...]`.
    specs: Specs of one example's inputs.
    offsets: `[clients + 1]`: client i has examples offsets[i] to offsets[i+1].

  Returns:
    Counts of at least 1, `[clients]`.
  """
  found = np.ones([len(offsets) - 1], np.int64)
  client = np.repeat(np.arange(len(found)), np.diff(offsets))
  np.maximum.at(found, client, of_examples(inputs, specs, np.maximum))
  return found


def of_examples(
  inputs: Any, specs: Any, join: np.ufunc = np.minimum
) -> np.ndarray:
  """Count the steps of each example's shortest input, likewise; or `join`."""
  pairs = zip(tf.nest.flatten(inputs), tf.nest.flatten(specs), strict=True)
  filled = [
    array.astype(bool).any(axis=tuple(range(2, array.ndim)))
    for array, spec in pairs
    if is_open(spec)
  ]
  steps = [(f * np.arange(1, f.shape[1] + 1)).max(1, initial=0) for f in filled]
  return np.asarray(join.reduce(steps))


def why_unlike(
  given: Any, array: np.ndarray, longest: int, wanted: np.ndarray
) -> str:
  """Return why some sequences lack an element for a step, or ''.

  Args:
    given: A sequence for each example, also ragged.
    array: The same, padded: `[examples, steps, ...]`.
    longest: The steps of the longest input.
    wanted: The steps of each example's shortest input, `[examples]`.
  """
  if array.shape[1] > longest:
    return f'{array.shape[1]} steps, but no input has more than {longest}'
  if hasattr(given, 'row_lengths'):
    found = given.row_lengths().numpy()
  else:
    found = np.array([len(sequence) for sequence in given], np.int64)
  places = np.flatnonzero(found < wanted)
  if not places.size:
    return ''
  place = places[0]
  return (
    f'{found[place]} steps in example {place}, whose input has {wanted[place]}'
  )
