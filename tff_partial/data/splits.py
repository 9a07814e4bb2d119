"""Selection of a phase's examples: all, halves, support and query, by time.

A part selects some of a client's examples and their order. A split is a pair of
parts: the support set reconstructs local weights, the query set trains global
ones or evaluates (section 4 of the FedRecon paper). Padding is never selected.
"""

import collections
from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any, NamedTuple

import tensorflow as tf

from tff_partial import random_bits
from tff_partial.arguments import checked_numbers
from tff_partial.arguments import spelling
from tff_partial.data.examples import ClientDataError

# The field that marks query examples; see `by_mark`.
MARK = 'is_query'


class Chosen(NamedTuple):
  """Some of a client's examples.

  Attributes:
    order: int32 `[capacity]`: positions of the chosen examples, then arbitrary
      ones.
    count: int32 scalar: number of chosen examples.
  """

  order: tf.Tensor
  count: tf.Tensor


# (examples, count, seed) -> Chosen.
ChooseFn = Callable[[Mapping[str, Any], tf.Tensor, tf.Tensor], Chosen]


@dataclasses.dataclass(frozen=True)
class Part:
  """A rule that selects some of a client's examples.

  Attributes:
    name: Its name in error messages.
    choose: `(examples, count, seed) -> Chosen`, in TensorFlow.
    fields: Fields of an example that the rule reads in addition to the model's.
  """

  name: str
  choose: ChooseFn
  fields: Mapping[str, tf.TensorSpec] = dataclasses.field(default_factory=dict)


class Split(NamedTuple):
  """The two parts of a client's data in the FedRecon paper."""

  support: Part
  query: Part


def given_or(split: Any, default: Split) -> Split:
  """Return a split, or the default if it is None.

  Raises:
    ClientDataError: If it is anything else, such as a share.
  """
  if split is None:
    return default
  expected = 'a `Split`, such as `splits.fraction(0.5)`'
  spelling.check_kind('split', split, tuple, expected, ClientDataError)
  return split


def example_fields(*parts: Part) -> collections.OrderedDict[str, tf.TensorSpec]:
  """Return the further fields that any of the parts reads.

  Raises:
    ClientDataError: If two parts read a field as different types.
  """
  fields: collections.OrderedDict[str, tf.TensorSpec] = (
    collections.OrderedDict()
  )
  for part in parts:
    for name, spec in part.fields.items():
      if fields.setdefault(name, spec) != spec:
        raise ClientDataError(
          f'Two parts read the field {name!r}: as {fields[name]} and as '
          f'{spec}. Let them read fields of different names.'
        )
  return fields


def _positions(examples: Mapping[str, Any]) -> tf.Tensor:
  return tf.range(tf.shape(examples['weight'])[0])


def order_by(keys: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
  """Return the order of the first examples by keys, int64; padding is last."""
  is_real = tf.range(tf.size(keys)) < count
  last = tf.constant(tf.int64.max)
  return tf.argsort(tf.where(is_real, keys, last), stable=True)


def chosen_by(mask: tf.Tensor) -> Chosen:
  """Choose the examples of a mask, bool `[capacity]`, in their order."""
  order = tf.argsort(tf.cast(~mask, tf.int32), stable=True)
  return Chosen(order, tf.reduce_sum(tf.cast(mask, tf.int32)))


@functools.cache  # Phases on everything then have the same part.
def everything() -> Part:
  """Select all examples, in their order."""
  return Part(
    'everything',
    lambda examples, count, seed: Chosen(_positions(examples), count),
  )


def same() -> Split:
  """Use all examples as support and query set (appendix D of the paper)."""
  return Split(everything(), everything())


def _cut(
  names: tuple[str, str],
  order: Callable[[Mapping[str, Any], tf.Tensor], tf.Tensor],
  size: Callable[[tf.Tensor], tf.Tensor],
  start: Callable[[tf.Tensor], tf.Tensor],
  fields: Mapping[str, tf.TensorSpec],
) -> Split:
  """Use the first examples in an order as support set, later ones as query.

  Args:
    names: Names of the two parts.
    order: From the examples and their number to all positions in order.
    size: From that number to the size of the support set.
    start: From that number to the place of the first query example.
    fields: Fields that `order` reads.
  """

  def query(
    examples: Mapping[str, Any], count: tf.Tensor, seed: tf.Tensor
  ) -> Chosen:
    del seed
    begin, ordered = start(count), order(examples, count)
    shifted = tf.minimum(_positions(examples) + begin, tf.size(ordered) - 1)
    return Chosen(tf.gather(ordered, shifted), tf.maximum(count - begin, 0))

  support = Part(
    names[0],
    lambda examples, count, seed: Chosen(order(examples, count), size(count)),
    fields,
  )
  return Split(support, Part(names[1], query, fields))


def _by_share(
  name: str,
  order: Callable[[Mapping[str, Any], tf.Tensor], tf.Tensor],
  share: float,
  fields: Mapping[str, tf.TensorSpec],
) -> Split:
  """Use the first share of the examples as support set, the rest as query."""
  if checked_numbers.why_not_finite(share) or not 0.0 < share < 1.0:
    raise ClientDataError(
      f'The share of the support set must lie between 0 and 1, found {share!r}.'
    )

  def size(count: tf.Tensor) -> tf.Tensor:
    # Neither part is empty if possible.
    size = tf.cast(tf.round(tf.cast(count, tf.float32) * share), tf.int32)
    return tf.clip_by_value(
      size, tf.minimum(count, 1), tf.maximum(count - 1, 0)
    )

  names = f'{name}.support', f'{name}.query'
  return _cut(names, order, size, size, fields)


def fraction(share: float) -> Split:
  """Use the first `share` of the examples as support set, the rest as query.

  Sizes are rounded, and 2.5 to the even 2; with at least two examples, neither
  part is empty.

  Raises:
    ClientDataError: If the share is not between 0 and 1.
  """
  return _by_share(f'fraction({share})', lambda e, _: _positions(e), share, {})


def halves() -> Split:
  """Use the first half of the examples as support set, the second as query.

  They are halves in the order in which a client's examples were packed; with
  `from_pandas(..., time=...)`, in order of time. Of 5 examples 2 are support,
  and 4 of 7, as `round` has it.
  """
  return fraction(0.5)


def first(size: int, query_from: int | None = None) -> Split:
  """Use the first examples as support set, later ones as query.

  Args:
    size: Maximum number of examples in the support set.
    query_from: Index of the first query example, so that support sets of
      several sizes have the same query set; by default `size`. A client with
      no more examples has an empty query set.

  Raises:
    ClientDataError: If the size is negative or no whole number, or the parts
      would overlap.
  """
  start = size if query_from is None else query_from
  checked_numbers.check_whole(ClientDataError, size=size, query_from=start)
  size, start = int(size), int(start)  # NumPy's have a type of their own.
  if not 0 <= size <= start:
    raise ClientDataError(
      f'first({size}, query_from={start}): the support set must have no '
      'negative size, and must end before the query set begins.'
    )

  return _cut(
    (f'first({size}).support', f'first({size}, {start}).query'),
    lambda examples, count: _positions(examples),
    lambda count: tf.minimum(count, size),
    lambda count: tf.constant(start),
    {},
  )


def by_time(field: str = 'time', share: float = 0.5) -> Split:
  """Use the oldest `share` of the examples as support set, the rest as query.

  Args:
    field: A field of the examples, int64, that grows with time; equal times
      keep the order of the examples.
    share: The support set's share.

  Raises:
    ClientDataError: If the share is not between 0 and 1.
  """

  def order(examples: Mapping[str, Any], count: tf.Tensor) -> tf.Tensor:
    return order_by(examples[field], count)

  fields = {field: tf.TensorSpec([], tf.int64)}
  return _by_share(f'by_time({field!r}, {share})', order, share, fields)


def alternating(batch_size: int) -> Split:
  """Alternate batches: even ones are the support set, odd ones the query set.

  This is the split of the FedRecon authors' code. A client without a second
  batch has an empty query set.

  Args:
    batch_size: The phases' batch size, so that batches stay together.

  Raises:
    ClientDataError: If the batch size is not positive, or no whole number.
  """
  checked_numbers.check_whole(ClientDataError, 1, batch_size=batch_size)

  def part(parity: int) -> Part:
    def choose(
      examples: Mapping[str, Any], count: tf.Tensor, seed: tf.Tensor
    ) -> Chosen:
      del seed
      place = _positions(examples)
      last = tf.size(place) - 1
      order = (2 * (place // batch_size) + parity) * batch_size
      order = tf.minimum(order + place % batch_size, last)
      pair = 2 * batch_size
      rest = count % pair - parity * batch_size
      size = count // pair * batch_size + tf.clip_by_value(rest, 0, batch_size)
      return Chosen(order, size)

    return Part(f'alternating({batch_size})[{parity}]', choose)

  return Split(part(0), part(1))


def by_mark(field: str = MARK) -> Split:
  """Use examples marked 0 as support set, all others as query.

  For splits made beforehand, such as a user's earlier and later ratings;
  `pack(train, spec, query=test)` marks separate data.

  Args:
    field: A field of the examples, int32.
  """

  def part(is_query: bool) -> Part:
    def choose(
      examples: Mapping[str, Any], count: tf.Tensor, seed: tf.Tensor
    ) -> Chosen:
      del seed
      real = _positions(examples) < count
      marked = tf.not_equal(examples[field], 0)
      return chosen_by(real & tf.equal(marked, is_query))

    name = 'query' if is_query else 'support'
    return Part(
      f'by_mark({field!r}).{name}', choose, {field: tf.TensorSpec([], tf.int32)}
    )

  return Split(part(False), part(True))


def shuffled(split: Split) -> Split:
  """Split a client's examples in a random order, new in every round."""

  def shuffle(part: Part) -> Part:
    def choose(
      examples: Mapping[str, Any], count: tf.Tensor, seed: tf.Tensor
    ) -> Chosen:
      # A wider type, in which padding always comes last.
      drawn = random_bits.bits(seed, tf.shape(_positions(examples)))
      order = order_by(tf.cast(drawn, tf.int64), count)
      reordered = collections.OrderedDict(
        (name, tf.nest.map_structure(lambda t: tf.gather(t, order), field))
        for name, field in examples.items()
        if name == 'weight' or name in part.fields
      )
      chosen = part.choose(reordered, count, seed)
      return Chosen(tf.gather(order, chosen.order), chosen.count)

    return Part(f'shuffled({part.name})', choose, part.fields)

  return Split(shuffle(split.support), shuffle(split.query))
