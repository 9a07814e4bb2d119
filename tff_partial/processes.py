"""A federated algorithm as TFF computations.

The type of every process is

    initialize: ( -> S@SERVER)
    next: (S@SERVER, C@CLIENTS, D@CLIENTS)
          -> (state=S@SERVER, client_states=C@CLIENTS, metrics=M@SERVER)

where C is what a client remembers and D its data (see `examples.py`). A local
weight's type occurs in C alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow_federated as tff

from tff_partial import client_work
from tff_partial.data import examples
from tff_partial.dp import mechanisms
from tff_partial.model import models


class ClientStateTypeError(client_work.CompositionError):
  """Raised when a round would change what type of state clients keep."""


class PartialProcessOutput(NamedTuple):
  """What a round returns.

  Attributes:
    state: The server's new state.
    client_states: What each client of the cohort remembers, in its order.
    metrics: Measurements of the round, at the server.
  """

  state: Any
  client_states: Any
  metrics: Any


class PartialProcess(tff.templates.IterativeProcess):
  """A federated algorithm in which a part of the model stays with clients.

  Attributes:
    model: The model that is trained.
    example_spec: What an example of a client consists of; pack data with it.
    sent: The tiers whose updates leave a client.
    mechanism: What makes these updates private, or None.
    is_noised: Whether they are clipped and noised, if only in parts, of which
      no mechanism is known.
    work: What a client does in a round; None if it is not known.
    server_state: What makes the server's state beside weights, for evaluations
      whose clients read it; None if there is none.
    rows_of: The GLOBAL tables of which clients send the rows that their
      examples look up in place of the whole.
    sent_beside: The types of what else clients send, such as prototypes, by
      name; measurements and weights of updates are not among it.
    loaded_beside: The types of what clients load beside weights, by name.
  """

  def __init__(
    self,
    initialize_fn: tff.Computation,
    next_fn: tff.Computation,
    *,
    initialize_client: tff.Computation,
    get_model_weights: tff.Computation,
    set_model_weights: tff.Computation,
    model: models.PartialModel,
    example_spec: examples.ExampleSpec,
    sent: Sequence[str],
    mechanism: mechanisms.Mechanism | None = None,
    is_noised: bool = False,
    work: client_work.ClientWork | None = None,
    server_state: client_work.ServerState | None = None,
    rows_of: Sequence[str] = (),
    sent_beside: Mapping[str, tff.Type] | None = None,
    loaded_beside: Mapping[str, tff.Type] | None = None,
  ):
    """Check the types and keeps the computations.

    Args:
      initialize_fn: `( -> S@SERVER)`.
      next_fn: `(S@SERVER, C@CLIENTS, D@CLIENTS) -> (state=S@SERVER,
        client_states=C@CLIENTS, metrics=M@SERVER)`.
      initialize_client: `(int32[2] -> C)`: what a client remembers that never
        took part, from its seed.
      get_model_weights: `(S -> ModelWeights)`.
      set_model_weights: `(S, ModelWeights -> S)`.
      model: The model that is trained.
      example_spec: What an example consists of.
      sent: The tiers whose updates leave a client.
      mechanism: What makes these updates private, or None.
      is_noised: Whether some of them are clipped and noised; all are with a
        mechanism.
      work: What a client does in a round.
      server_state: What makes the server's state beside weights, or None.
      rows_of: The GLOBAL tables of which clients send rows.
      sent_beside: What else a client sends, by name.
      loaded_beside: What it loads beside weights, by name.

    Raises:
      ClientStateTypeError: If the client states that come out are not what
        goes in.
    """
    super().__init__(initialize_fn, next_fn, next_is_multi_arg=True)
    taken = next_fn.type_signature.parameter[1]
    kept = next_fn.type_signature.result.client_states
    if (
      not isinstance(kept, tff.FederatedType)
      or kept.placement is not tff.CLIENTS
    ):
      raise ClientStateTypeError(
        f'Client states must stay at clients, found {kept}.'
      )
    if not taken.is_assignable_from(kept):
      raise ClientStateTypeError(
        f'A round takes client states of type {taken} and returns {kept}.'
      )
    first = initialize_client.type_signature.result
    if not taken.member.is_assignable_from(first):
      raise ClientStateTypeError(
        f'`initialize_client` makes {first}, a round takes {taken.member}.'
      )
    self.initialize_client = initialize_client
    self.get_model_weights = get_model_weights
    self.set_model_weights = set_model_weights
    self.model = model
    self.example_spec = example_spec
    self.sent = tuple(sent)
    self.mechanism = mechanism
    self.is_noised = is_noised or mechanism is not None
    self.work = work
    self.server_state = server_state
    self.rows_of = tuple(rows_of)
    self.sent_beside = dict(sent_beside or {})
    self.loaded_beside = dict(loaded_beside or {})

  def get_server_state(self, state: Any) -> Any:
    """Return what the server holds beside weights; None if that is nothing.

    Args:
      state: The process's state at the server.
    """
    if self.server_state is None:
      return None
    return state.client_work['server']

  @property
  def client_type(self) -> tff.Type:
    """The type D of a client's data."""
    return self.next.type_signature.parameter[2].member

  def __repr__(self) -> str:
    """What leaves a client, what stays with it, and the model."""
    kept = self.next.type_signature.parameter[1].member
    sent = ', '.join([*self.sent, *self.sent_beside])
    lines = [
      f'{type(self).__name__}: clients send {sent or "nothing"}'
      f' and remember {"nothing" if self.is_stateless else kept}',
      *(f'  {line}' for line in repr(self.model).splitlines()),
    ]
    if self.mechanism is not None:
      lines.append(f'  private by {self.mechanism}')
    return '\n'.join(lines)

  @property
  def is_stateless(self) -> bool:
    """Whether clients remember nothing."""
    kept = self.next.type_signature.parameter[1].member
    return isinstance(kept, tff.StructType) and not len(kept)
