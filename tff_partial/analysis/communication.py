"""Numbers of parameters and bytes sent between the server and a client."""

import math
from typing import Any

import numpy as np
import tensorflow_federated as tff

from tff_partial import processes
from tff_partial import tiers
from tff_partial.runtimes.values import typed_values

# Number of clients over which the rows they send are averaged.
_COUNTED = 100
# Bytes of a row's index, which is sent with the row.
_ID_BYTES = 4


def communication(
  process: processes.PartialProcess, clients: Any
) -> dict[str, Any]:
  """Count what a client downloads and uploads in a round.

  Args:
    process: The process; what is not sent is not counted.
    clients: The training clients. Where clients send rows instead of tables,
      the rows of some of these are counted.

  Returns:
    `download_` and `upload_` of `parameters` and `bytes`. The download is all
    trained weights and what else a client loads, such as control variates, but
    not frozen weights, which are the same in all rounds; the upload is the most
    that a client sends, without metrics.
    `upload_not_counted` names what differs in size between clients, such as
    drafts. Where clients send rows, `upload_bytes_by_rows` is the mean over
    clients, for the rows that their examples look up and the rows' indices.
  """
  weights_type = process.get_model_weights.type_signature.result.trainable
  loaded = [_size(weights_type), *map(_size, process.loaded_beside.values())]
  uploaded = uploads(process)
  counted: dict[str, Any] = {
    f'{way}_{what}': sum(size[place] for size in sizes)
    for way, sizes in (('download', loaded), ('upload', uploaded.values()))
    for place, what in enumerate(('parameters', 'bytes'))
  }
  others = sorted(process.sent_beside.keys() - uploaded.keys())
  if others:
    counted['upload_not_counted'] = others
  if process.rows_of and process.work and len(clients):
    shared = weights_type[tiers.GLOBAL]
    tables = {name: shared[name] for name in process.rows_of}
    whole = sum(_size(kind)[1] for kind in tables.values())
    frozen = process.model.frozen_weights()
    ids, rows = clients.client_ids, []
    for place in np.unique(np.linspace(0, len(ids) - 1, _COUNTED).astype(int)):
      (client,) = clients.cohort([ids[place]], np.zeros([1, 2], np.int32))
      number = process.work.tables.num_rows(
        frozen, client['examples']['x'], client['count']
      )
      rows.append(
        sum(
          number[name] * (_size(kind)[1] // kind.shape[0] + _ID_BYTES)
          for name, kind in tables.items()
        )
      )
    counted['upload_bytes_by_rows'] = round(
      float(counted['upload_bytes'] - whole + np.mean(rows)), 1
    )
  return counted


def uploads(process: processes.PartialProcess) -> dict[str, tuple[int, int]]:
  """Return parameters and bytes of each part that a client uploads, by name."""
  weights_type = process.get_model_weights.type_signature.result.trainable
  kinds = {tier: weights_type[tier] for tier in process.sent}
  return {
    name: _size(kind)
    for name, kind in {**kinds, **process.sent_beside}.items()
    if typed_values.num_bytes(kind) is not None
  }


def _size(kind: tff.Type) -> tuple[int, int]:
  """Return the numbers of parameters and bytes of a type."""
  if isinstance(kind, tff.TensorType):
    number = math.prod(kind.shape or ())
    return number, number * kind.dtype.type().itemsize
  sizes = [_size(part) for part in kind]
  return sum(size[0] for size in sizes), sum(size[1] for size in sizes)
