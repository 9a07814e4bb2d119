"""Computations in a form that can be sent to other processes."""

import dataclasses
import hashlib

import tensorflow_federated as tff


@dataclasses.dataclass(frozen=True)
class SerializedComputation:
  """Computation as bytes.

  Attributes:
    key: A hash that is the same for a computation in every process.
    serialized: The computation.
  """

  key: str
  serialized: bytes

  @classmethod
  def of(cls, computation: tff.Computation) -> 'SerializedComputation':
    """Serialize a computation."""
    proto = tff.framework.serialize_computation(computation)
    serialized = proto.SerializeToString(deterministic=True)
    return cls(hashlib.sha256(serialized).hexdigest(), serialized)

  def computation(self) -> tff.Computation:
    """Deserialize the computation."""
    proto = type(tff.framework.serialize_computation(_nothing))()
    proto.ParseFromString(self.serialized)
    return tff.framework.deserialize_computation(proto)


@tff.tensorflow.computation
def _nothing() -> int:
  return 0
