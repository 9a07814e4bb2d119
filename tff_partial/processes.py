"""A federated algorithm as TFF computations.

The type of every process is

    initialize: ( -> S@SERVER)
    next: (S@SERVER, C@CLIENTS, D@CLIENTS)
          -> (state=S@SERVER, client_states=C@CLIENTS, metrics=M@SERVER)

where C is a client's state and D its data (see `examples.py`). A local weight's
type occurs only in C.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow_federated as tff

from tff_partial.client import client_work
from tff_partial.data import examples
from tff_partial.dp import mechanisms as mechanisms_lib
from tff_partial.model import models


class PartialProcessOutput(NamedTuple):
  """Output of a round.

  Attributes:
    state: The server's new state.
    client_states: The new state of each client, in the cohort's order.
    metrics: Measurements of the round, at the server.
  """

  state: Any
  client_states: Any
  metrics: Any


class PartialProcess(tff.templates.IterativeProcess):
  """A federated algorithm in which a part of the model stays with clients.

  Attributes:
    model: The model that is trained.
    example_spec: The spec of a client's example; pack data with it.
    sent: The tiers whose updates leave a client.
    mechanism: The mechanism that makes these updates private, or None. Of
      several, it is the first that adds noise, or the first if all only clip.
    is_noised: True if there is a mechanism.
    noises_at_clients: True if clients clip and noise what they send themselves,
      also if `mechanism` is one at the server.
    work: A client's work in a round; None if it is not known.
    server_state: Makes the server's state besides weights, for evaluations
      whose clients read it; None if there is none.
    rows_of: The GLOBAL tables of which clients send only the rows that their
      examples look up.
    sent_beside: The types of what else clients send, such as prototypes, by
      name, without measurements and weights of updates.
    loaded_beside: The types of what clients receive besides weights, by name.
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
    mechanisms: Sequence[mechanisms_lib.Mechanism] = (),
    work: client_work.ClientWork | None = None,
    server_state: client_work.ServerState | None = None,
    rows_of: Sequence[str] = (),
    sent_beside: Mapping[str, tff.Type] | None = None,
    loaded_beside: Mapping[str, tff.Type] | None = None,
  ):
    """Check the types and store the computations.

    Args:
      initialize_fn: `( -> S@SERVER)`.
      next_fn: `(S@SERVER, C@CLIENTS, D@CLIENTS) -> (state=S@SERVER,
        client_states=C@CLIENTS, metrics=M@SERVER)`.
      initialize_client: `(int32[2] -> C)`: the state of a client that never
        took part, from its seed.
      get_model_weights: `(S -> ModelWeights)`.
      set_model_weights: `(S, ModelWeights -> S)`.
      model: The model that is trained.
      example_spec: The spec of an example.
      sent: The tiers whose updates leave a client.
      mechanisms: All that clip and noise what clients send.
      work: A client's work in a round.
      server_state: Makes the server's state besides weights, or None.
      rows_of: The GLOBAL tables of which clients send only rows.
      sent_beside: The types of what else a client sends, by name.
      loaded_beside: The types of what it receives besides weights, by name.

    Raises:
      client_work.CompositionError: If client states come out of another type.
    """
    super().__init__(initialize_fn, next_fn, next_is_multi_arg=True)
    taken = next_fn.type_signature.parameter[1]
    kept = next_fn.type_signature.result.client_states
    if (
      not isinstance(kept, tff.FederatedType)
      or kept.placement is not tff.CLIENTS
    ):
      raise client_work.CompositionError(
        f'Client states must stay at clients, found {kept}.'
      )
    if not taken.is_assignable_from(kept):
      raise client_work.CompositionError(
        f'A round takes client states of type {taken} and returns {kept}.'
      )
    first = initialize_client.type_signature.result
    if not taken.member.is_assignable_from(first):
      raise client_work.CompositionError(
        f'`initialize_client` makes {first}, a round takes {taken.member}.'
      )
    self.initialize_client = initialize_client
    self.get_model_weights = get_model_weights
    self.set_model_weights = set_model_weights
    self.model = model
    self.example_spec = example_spec
    self.sent = tuple(sent)
    noised = [one for one in mechanisms if one.noise_multiplier]
    self.mechanism = next(iter([*noised, *mechanisms]), None)
    self.is_noised = bool(mechanisms)
    self.noises_at_clients = any(
      one.where == mechanisms_lib.LOCAL for one in mechanisms
    )
    self.work = work
    self.server_state = server_state
    self.rows_of = tuple(rows_of)
    self.sent_beside = dict(sent_beside or {})
    self.loaded_beside = dict(loaded_beside or {})

  def get_server_state(self, state: Any) -> Any:
    """Return the server's state besides weights, or None if there is none.

    Args:
      state: The process's state at the server.
    """
    if self.server_state is None:
      return None
    return state.client_work['server']

  def __repr__(self) -> str:
    """Describe what leaves a client, what stays with it, and the model."""
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
    """True if clients remember nothing."""
    return is_nothing(self.next.type_signature.parameter[1].member)


def is_nothing(remembered: tff.Type) -> bool:
  """Return True if a type of clients' state holds no value."""
  return isinstance(remembered, tff.StructType) and not len(remembered)


def weight_accessors(
  state_type: tff.Type, weights_type: tff.Type
) -> tuple[tff.Computation, tff.Computation]:
  """Make `(S -> ModelWeights)` and `(S, ModelWeights -> S)`."""
  return (
    tff.tensorflow.computation(
      lambda state: state.global_model_weights, state_type
    ),
    tff.tensorflow.computation(
      lambda state, weights: state._replace(global_model_weights=weights),
      *(state_type, weights_type),
    ),
  )
