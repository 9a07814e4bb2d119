"""Inputs of a loop over a shard, and the shapes it is compiled for."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import tensorflow as tf

from tff_partial.runtimes.cohort_runtime import client_loop
from tff_partial.runtimes.program import flat_program
from tff_partial.runtimes.values import client_feeds
from tff_partial.runtimes.values import typed_values


@dataclasses.dataclass(frozen=True)
class Inputs:
  """Inputs of a loop over a shard.

  Attributes:
    values: All values at the server, as tensors.
    kept: The values that earlier loops kept for each client, leaf by leaf.
    feeds: The shard's share of each argument.
    totals: The leaves of the first accumulators, as tensors.
  """

  values: flat_program.Values
  kept: Mapping[flat_program.Key, Sequence[Any]]
  feeds: Sequence[client_feeds.Feed]
  totals: Sequence[tf.Tensor]

  def flat(
    self, loop: client_loop.ClientLoop, num_clients: int
  ) -> list[tf.Tensor]:
    """Flatten the inputs of a compiled loop over the first clients."""
    fed = [leaf for feed in self.feeds for leaf in (*feed.tensors, feed.rows)]
    return [
      tf.constant(num_clients),
      *typed_values.leaves([self.values[key] for key in loop.shared]),
      *(leaf for key in loop.kept for leaf in self.kept[key]),
      *map(tf.convert_to_tensor, fed),
      *self.totals,
    ]


@dataclasses.dataclass(frozen=True)
class Signature:
  """Dtypes and shapes for which a loop is compiled.

  Attributes:
    feeds: For each argument, its tensors' dtypes and shapes, and their kinds.
    bucket: The leading dimension of everything that is fed client by client.
  """

  feeds: tuple[
    tuple[tuple[tuple[str, Any], ...], tuple[client_feeds.LeadingAxis, ...]],
    ...,
  ]
  bucket: int

  def __str__(self) -> str:
    """Return the shapes of one client, without cohort and population sizes."""
    return ','.join(
      f'{dtype}{list(shape[1:])}'
      for tensors, _ in self.feeds
      for dtype, shape in tensors
    )


def signature_of(feeds: Sequence[client_feeds.Feed], bucket: int) -> Signature:
  """Return the signature of a loop over some feeds."""
  signed = []
  for feed in feeds:
    tensors = tuple(
      (tf.as_dtype(tensor.dtype).name, _shape(tensor, kind))
      for tensor, kind in zip(feed.tensors, feed.kinds, strict=True)
    )
    signed.append((tensors, feed.kinds))
  return Signature(tuple(signed), bucket)


def _shape(
  tensor: Any, kind: client_feeds.LeadingAxis
) -> tuple[int | None, ...]:
  """Return the shape; the rows of sequences vary from round to round."""
  if kind is client_feeds.LeadingAxis.LAID:
    return (None, *tensor.shape[1:])
  return tuple(tensor.shape)
