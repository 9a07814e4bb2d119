"""Adapters that run processes in TFF's own programs, over `tf.data`.

`tff.learning.programs` requires a `tff.learning.templates.LearningProcess`,
whose clients have sequences of batches

    x       inputs, in the structure that the model takes, `[batch, ...]`
    y       labels
    weight  weights of examples; ones if the sequence has no such field
    ...     further fields that a split requires; unused ones are ignored

Inside a client's computation the batches are concatenated to the value that
every other runtime uses (see `examples.py`), and the same work runs on it. So
the batch size does not matter: a phase makes its own batches.

A program that only has sequences does not know client ids, so a client's seed
cannot depend on its id. It depends on the run's seed, the round number in the
server's state and a fingerprint of the client's examples. Hence clients with
equal examples have equal random draws in a round, and a round that is run again
on the same clients, because a program discarded or resumed it, has the same
draws.
"""

import collections
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial import processes
from tff_partial import random_bits
from tff_partial.client import client_work
from tff_partial.data import examples
from tff_partial.data import id_ranges
from tff_partial.data import lengths
from tff_partial.exchange import server_update

templates = tff.learning.templates

# More examples than any client has, so that all its batches become one.
_ALL = 2**31 - 1


def _fingerprint(tensor: tf.Tensor) -> tf.Tensor:
  """Return a hash of a tensor's values and their order, int32 scalar.

  It uses only integer sums and products, modulo a power of two, so it does not
  depend on the order of summation or on the machine.
  """
  if tensor.dtype == tf.string:
    tensor = tf.strings.to_hash_bucket_fast(tensor, tf.int64.max)
  elif tensor.dtype == tf.bool:
    tensor = tf.cast(tensor, tf.uint8)
  elif tensor.dtype.is_complex:
    tensor = tf.stack([tf.math.real(tensor), tf.math.imag(tensor)])
  unsigned = {1: tf.uint8, 2: tf.uint16, 4: tf.uint32, 8: tf.uint64}
  words = tf.bitcast(tf.reshape(tensor, [-1]), unsigned[tensor.dtype.size])
  words = tf.cast(words, tf.uint64)
  half = tf.constant(32, tf.uint64)
  # Floats that are small whole numbers differ only in their upper bits, and a
  # product carries differences upwards, never downwards.
  words = tf.bitwise.bitwise_xor(words, tf.bitwise.right_shift(words, half))
  drawn = random_bits.bits(
    random_bits.derive('fingerprint'), [2, tf.size(words)]
  )
  drawn = tf.cast(drawn, tf.uint64)
  factors = tf.bitwise.left_shift(drawn[0], half) + drawn[1]
  total = tf.bitwise.right_shift(tf.reduce_sum(words * factors), half)
  return tf.bitcast(tf.cast(total, tf.uint32), tf.int32)


def client_seed(
  client_examples: Mapping[str, Any],
  count: int | tf.Tensor,
  round_number: int | tf.Tensor,
  *,
  seed: int = 0,
) -> tf.Tensor:
  """Return the seed, int32 `[2]`, of a client that has no id.

  With it, `process.next` on packed clients does the same as the adapter.

  Args:
    client_examples: The client's examples, `[capacity, ...]`.
    count: The number of real examples; the rest is ignored.
    round_number: The round number in the server's state before the round.
    seed: The run's seed.
  """
  result = tf.constant(random_bits.derive(seed, 'sequence'))
  result = random_bits.fold_in(result, round_number)
  result = random_bits.fold_in(result, count)
  for tensor in tf.nest.flatten(client_examples):
    real = tf.convert_to_tensor(tensor)[:count]
    result = random_bits.fold_in(result, _fingerprint(real))
  return result


def _ordered_like(spec: Any, values: Any) -> Any:
  """Return values in the spec's containers, with fields in its order."""
  return tf.nest.map_structure(
    lambda _, value: value, spec, values, check_types=False
  )


def _element_type(
  example_spec: examples.ExampleSpec, element_spec: Any
) -> tff.Type:
  """Return the type of a sequence's elements, or raise an error."""
  expected = examples.client_spec(example_spec)['examples']
  if element_spec is None:
    del expected['weight']
    return client_work.type_of(expected)
  if not isinstance(element_spec, Mapping):
    raise client_work.CompositionError(
      f'Expected batches that are mappings with the fields {list(expected)}, '
      f'of which `weight` may be missing; found {element_spec!r}. Make them '
      'with `Dataset.map`.'
    )
  missing = [n for n in expected if n not in element_spec and n != 'weight']
  if missing:
    raise client_work.CompositionError(
      f'Batches lack the fields {missing}; they have {list(element_spec)}.'
    )

  def paths(structure: Any) -> list[str]:
    return sorted(path for path, _ in examples.leaves(structure))

  def check(found: Any, wanted: tf.TensorSpec) -> tf.TensorSpec:
    if not found.is_subtype_of(wanted):
      raise ValueError(f'{found!r} is not {wanted!r}')
    return wanted  # Batches of other sizes are welcome too.

  fields = collections.OrderedDict(element_spec)
  for name in [n for n in expected if n in fields]:
    try:
      # Of a tuple, `tf.nest` would take inputs by their names' alphabet.
      if paths(fields[name]) != paths(expected[name]):
        raise ValueError(f'{paths(fields[name])} are other inputs')
      fields[name] = tf.nest.map_structure(
        check, fields[name], expected[name], check_types=False
      )
    except (TypeError, ValueError) as error:
      raise client_work.CompositionError(
        f'Batches should have the field {name!r} as {expected[name]!r}, found '
        f'{fields[name]!r}. Convert it with `Dataset.map`.'
      ) from error
  return client_work.type_of(fields)


def _pack(
  batches: tf.data.Dataset, example_spec: examples.ExampleSpec
) -> collections.OrderedDict[str, Any]:
  """Concatenate a client's batches to its examples, without padding."""
  specs = collections.OrderedDict(
    (name, spec)
    for name, spec in examples.client_spec(example_spec)['examples'].items()
    if name in batches.element_spec
  )
  none = tf.nest.map_structure(
    lambda spec: tf.zeros([size or 0 for size in spec.shape], spec.dtype), specs
  )

  def read(batch: Mapping[str, Any]) -> collections.OrderedDict[str, Any]:
    return collections.OrderedDict(
      (name, _ordered_like(spec, batch[name])) for name, spec in specs.items()
    )

  if set(batches.element_spec) != set(specs):
    # Unread fields may not be batched. Mapping is slow to start.
    batches = batches.map(read)
  # All at once: appending batch by batch would copy all of them each time.
  if lengths.are_open(example_spec):  # Batches may differ in length.
    rows = batches.unbatch()
    number = rows.reduce(np.int64(0), lambda count, _: count + 1)
    together = rows.padded_batch(tf.maximum(number, 1))
  else:
    together = batches.rebatch(_ALL)
  packed = together.reduce(none, lambda _, joined: read(joined))
  if 'weight' not in packed:
    given = tf.shape(tf.nest.flatten(packed['y'])[0])
    spec = example_spec['weight']
    shape = [given[1] if n is None else n for n in spec.shape]
    packed['weight'] = tf.ones([given[0], *shape], spec.dtype)
  return collections.OrderedDict((name, packed[name]) for name in example_spec)


def _packing(
  example_spec: examples.ExampleSpec, element_spec: Any, seed: int
) -> tff.Computation:
  """Make `(int32, E* -> D)`: from the round number and batches to data."""
  sized = [*id_ranges.client_sized(examples.ids_of(example_spec))]
  if sized:
    raise client_work.CompositionError(
      f'The tables {sized} have the size that the data of a client need, which '
      'batches do not say. Build the model without `client_sized`, or use '
      '`tff_partial.train`.'
    )

  @tff.tensorflow.computation(
    np.int32, tff.SequenceType(_element_type(example_spec, element_spec))
  )
  def pack(round_number: Any, batches: Any) -> Any:
    packed = _pack(batches, example_spec)
    count = tf.shape(packed['weight'])[0]
    return collections.OrderedDict(
      examples=packed,
      count=count,
      seed=client_seed(packed, count, round_number, seed=seed),
    )

  return pack


def as_learning_process(
  process: processes.PartialProcess, element_spec: Any = None, *, seed: int = 0
) -> tff.learning.templates.LearningProcess:
  """Convert a process to one whose clients have sequences of batches.

  Server state, model weights and metrics are those of `process`; the training
  metrics are at `client_work/train`, where TFF's programs expect them.

  Args:
    process: A process whose clients remember nothing, such as FedRecon.
    element_spec: The spec of a batch: `dataset.element_spec`. By default all
      that the process reads except weights, which are then one.
    seed: The run's seed, which determines clients' random draws.

  Raises:
    CompositionError: If clients would lose their state, noise what they send,
      or batches lack a field or have one of another type.
  """
  remembered = process.next.type_signature.parameter[1].member
  if not processes.is_nothing(remembered):
    raise client_work.CompositionError(
      f'The clients of this process remember {remembered} from round to round. '
      'A `LearningProcess` has no place for it, so that clients would begin '
      'anew each time. Run it with a program that keeps client states.'
    )
  if process.noises_at_clients:
    raise client_work.CompositionError(
      'Clients of this process noise what they send, by seeds that are to be '
      'secret. Here they would follow from examples: clients with equal ones '
      'would add the same noise, and `seed` would remove it. Use '
      '`tff_partial.train`.'
    )
  pack = _packing(process.example_spec, element_spec, seed)
  number_of = server_update.chosen(
    process.initialize.type_signature.result.member.client_work, 'round'
  )

  @tff.federated_computation(
    process.initialize.type_signature.result,
    tff.FederatedType(pack.type_signature.parameter[1], tff.CLIENTS),
  )
  def next_fn(state: Any, sequences: Any) -> Any:
    number = tff.federated_map(number_of, state.client_work)
    clients = tff.federated_map(
      pack, (tff.federated_broadcast(number), sequences)
    )
    nothing = tff.federated_value(collections.OrderedDict(), tff.CLIENTS)
    output = process.next(state, nothing, clients)
    return templates.LearningProcessOutput(output.state, output.metrics)

  return templates.LearningProcess(
    process.initialize,
    next_fn,
    process.get_model_weights,
    process.set_model_weights,
  )
