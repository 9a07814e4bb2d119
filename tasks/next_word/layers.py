"""Layers of next-word models."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tasks import recurrent
from tasks.next_word.tokens import Tokens


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class TokenRows(tf.keras.layers.Layer):
  """Layer that maps tokens to rows of two embedding tables.

  Words, padding, beginning and end of a sentence have rows in the first table,
  in this order: padding, words, beginning, end. Buckets have rows in the
  second.

  Maps ids, int32 `[batch, time]`, to three tensors of this shape: rows of the
  first table, rows of the second, and a bool that is True where the second
  counts. The row of the table that does not count is 0.
  """

  def __init__(self, words: int, buckets: int, **kwargs: Any):
    super().__init__(**kwargs)
    self.tokens = Tokens(words, buckets)

  def call(self, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    first, begin = self.tokens.first_bucket, self.tokens.begin
    is_bucket = tf.logical_and(ids >= first, ids < begin)
    behind_words = tf.where(ids < first, ids, ids - self.tokens.buckets)
    return (
      tf.where(is_bucket, 0, behind_words),
      tf.where(is_bucket, ids - first, 0),
      is_bucket,
    )


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class OneOfTwo(tf.keras.layers.Layer):
  """Layer that selects the second vectors where they count, else the first.

  Maps float `[batch, time, size]` twice and bool `[batch, time]` to float
  `[batch, time, size]`.
  """

  def call(self, inputs: tuple[tf.Tensor, tf.Tensor, tf.Tensor]) -> tf.Tensor:
    first, second, is_second = inputs
    return tf.where(is_second[..., tf.newaxis], second, first)


# ---- recurrence --------------------------------------------------------------


def _open_forget_gate(shape: Any, dtype: Any = None) -> tf.Tensor:
  """Initialize the bias: ones for the forget gate, the second of four."""
  units = shape[0] // 4
  return tf.repeat(tf.constant([0.0, 1.0, 0.0, 0.0], dtype), units)


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class LoopedLSTM(recurrent.LSTMLayer):
  """LSTM with an explicit gradient, for short loops and XLA.

  Maps `[batch, time, features]` to `[batch, time, units]`, and computes the
  same as `tf.keras.layers.LSTM(units, return_sequences=True)`, with the same
  weights in the same order. TensorFlow's gradient of the loop would accumulate
  the gradient of the recurrent kernel in each step. Here the backward loop
  computes only the gradients of the gates; the kernel's is one matrix product
  after it, as are those of input and bias. It has no second derivative.
  """

  first_bias = staticmethod(_open_forget_gate)

  def call(self, inputs: tf.Tensor) -> tf.Tensor:
    gates = tf.tensordot(inputs, self.kernel, 1) + self.bias
    by_time = tf.transpose(gates, [1, 0, 2])
    hidden = _recur(by_time, tf.convert_to_tensor(self.recurrent_kernel))
    hidden = tf.transpose(hidden, [1, 0, 2])
    return tf.ensure_shape(hidden, [None, inputs.shape[1], self.units])


@tf.custom_gradient
def _recur(
  gates: tf.Tensor, kernel: tf.Tensor
) -> tuple[tf.Tensor, Callable[..., tuple[tf.Tensor, tf.Tensor]]]:
  """Run the loop over time.

  Args:
    gates: Contributions of the input to input, forget, cell and output gate,
      float `[time, batch, 4 * units]`.
    kernel: Kernel from the output of a step to the gates of the next one, float
      `[units, 4 * units]`.

  Returns:
    The outputs, float `[time, batch, units]`, and the gradient function.
  """
  time, units = gates.shape[0], kernel.shape[0]
  zeros = tf.zeros([tf.shape(gates)[1], units])

  def step(
    place: tf.Tensor, hidden: tf.Tensor, cell: tf.Tensor, *kept: tf.TensorArray
  ) -> tuple[Any, ...]:
    said = gates[place] + tf.matmul(hidden, kernel)
    enter, stay, new, leave = tf.split(said, 4, -1)
    enter, stay, leave = map(tf.sigmoid, (enter, stay, leave))
    new = tf.tanh(new)
    cell = stay * cell + enter * new
    hidden = leave * tf.tanh(cell)
    opened = tf.concat([enter, stay, new, leave], -1)
    values = (opened, cell, hidden)
    return (
      place + 1,
      hidden,
      cell,
      *(array.write(place, v) for array, v in zip(kept, values, strict=True)),
    )

  _, _, _, *kept = tf.while_loop(
    lambda place, *_: place < time,
    step,
    (tf.constant(0), zeros, zeros, *_arrays(time, 4 * units, units, units)),
    maximum_iterations=time,
    parallel_iterations=1,
  )
  opened, cells, hiddens = (array.stack() for array in kept)

  def gradient(of_outputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    of_gates = _recur_backwards(opened, cells, kernel, of_outputs)
    before = tf.concat([zeros[tf.newaxis], hiddens[:-1]], 0)
    of_kernel = tf.matmul(
      tf.reshape(before, [-1, units]),
      tf.reshape(of_gates, [-1, 4 * units]),
      transpose_a=True,
    )
    return of_gates, of_kernel

  return hiddens, gradient


def _recur_backwards(
  opened: tf.Tensor, cells: tf.Tensor, kernel: tf.Tensor, of_outputs: tf.Tensor
) -> tf.Tensor:
  """Backpropagate from the outputs of an LSTM to its gates.

  Args:
    opened: Gate activations, float `[time, batch, 4 * units]`.
    cells: Cell states after each step, float `[time, batch, units]`.
    kernel: As for `_recur`.
    of_outputs: Gradients of the outputs, float `[time, batch, units]`.

  Returns:
    Gradients of the inputs of the gates, float `[time, batch, 4 * units]`.
  """
  time, units = opened.shape[0], kernel.shape[0]
  zeros = tf.zeros_like(cells[0])
  cells_before = tf.concat([zeros[tf.newaxis], cells[:-1]], 0)

  def step(
    place: tf.Tensor, of_hidden: tf.Tensor, of_cell: tf.Tensor, found: Any
  ) -> tuple[Any, ...]:
    enter, stay, new, leave = tf.split(opened[place], 4, -1)
    shown = tf.tanh(cells[place])
    of_hidden += of_outputs[place]
    of_cell += of_hidden * leave * (1.0 - shown * shown)
    of_gates = tf.concat(
      [
        of_cell * new * enter * (1.0 - enter),
        of_cell * cells_before[place] * stay * (1.0 - stay),
        of_cell * enter * (1.0 - new * new),
        of_hidden * shown * leave * (1.0 - leave),
      ],
      -1,
    )
    return (
      place - 1,
      tf.matmul(of_gates, kernel, transpose_b=True),
      of_cell * stay,
      found.write(place, of_gates),
    )

  *_, found = tf.while_loop(
    lambda place, *_: place >= 0,
    step,
    (tf.constant(time - 1), zeros, zeros, *_arrays(time, 4 * units)),
    maximum_iterations=time,
    parallel_iterations=1,
  )
  return found.stack()


def _arrays(time: int, *lengths: int) -> list[tf.TensorArray]:
  """Make arrays of one tensor `[batch, length]` for each step."""
  return [
    tf.TensorArray(tf.float32, time, element_shape=[None, length])
    for length in lengths
  ]
