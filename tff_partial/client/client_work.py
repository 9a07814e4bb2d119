"""A client's work in a round, with TFF's types: recall, work, measure.

Training and evaluation run the same work; only the use of its result differs.
"""

import collections
from collections.abc import Callable, Iterator, Mapping
import contextlib
import re
from typing import Any, TypeAlias

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial import client_state
from tff_partial import contexts
from tff_partial import errors
from tff_partial import phases
from tff_partial import random_bits
from tff_partial import tiers
from tff_partial.arguments import spelling
from tff_partial.client import optimizer_slots
from tff_partial.client import work as work_lib
from tff_partial.data import examples
from tff_partial.data import splits
from tff_partial.model import client_tables
from tff_partial.model import models
from tff_partial.model import tracing
from tff_partial.sparse import lookups

ModelWeights: TypeAlias = tff.learning.models.ModelWeights
# A model -> the server's state besides weights, a structure of tensors.
ServerState: TypeAlias = Callable[[models.PartialModel], Any]

# For client-sized tables: a client's state, and the number of valid rows of
# each table.
_HELD, _NUM_ROWS = 'held', 'num_rows'


class CompositionError(errors.UserError, TypeError):
  """Raised when the parts of an algorithm do not fit together."""


def type_of(specs: Any) -> tff.Type:
  """Return the TFF type of a structure of tensor specs."""
  return tff.types.tensorflow_to_type(specs)


def without_slots(remembered: tff.Type) -> tff.Type:
  """Return the type of clients' state without optimizer slots."""
  is_kept = isinstance(remembered, tff.StructType) and (
    tff.structure.name_list(remembered)
    == [optimizer_slots.HELD, optimizer_slots.SLOTS]
  )
  return remembered[optimizer_slots.HELD] if is_kept else remembered


def serves(remembered: tff.Type, taken: tff.Type) -> bool:
  """Return True if an evaluation accepts clients' state.

  Args:
    remembered: The type of the state.
    taken: The type that the evaluation takes: the same, or the same without
      optimizer slots.
  """
  found = (remembered, without_slots(remembered))
  return any(taken.is_equivalent_to(one) for one in found)


def weights_specs(model: models.PartialModel) -> tuple[Any, Any]:
  """Return specs of the server's trainable weights by tier, and frozen ones."""
  shared = collections.OrderedDict(
    (tier, model.specs_at_server(tier))
    for tier in model.tiers
    if tier != tiers.LOCAL
  )
  frozen = collections.OrderedDict(
    (v.name, tf.TensorSpec(v.shape, v.dtype))
    for v in model.variables
    if not v.trainable
  )
  return shared, frozen


def weights_type(model: models.PartialModel) -> tff.Type:
  """Return the type of the weights at the server."""
  shared, frozen = map(type_of, weights_specs(model))
  return tff.StructWithPythonType(
    [('trainable', shared), ('non_trainable', frozen)], ModelWeights
  )


def initial_weights(model: models.PartialModel) -> tff.Computation:
  """Make `( -> ModelWeights)`: the first weights at the server."""

  def draw() -> ModelWeights:
    seed = random_bits.derive(model.seed, 'server')
    shared = collections.OrderedDict(
      (tier, model.initial_weights_at_server(tier, seed))
      for tier in model.tiers
      if tier != tiers.LOCAL
    )
    return ModelWeights(shared, model.frozen_weights())

  drawn = tracing.traced(draw)
  return tff.tensorflow.computation(lambda: drawn())


def first_server_state(
  model: models.PartialModel, server_state: ServerState
) -> tff.Computation:
  """Make `( -> server state)`: the server's first state besides weights."""
  return tff.tensorflow.computation(
    lambda: tf.nest.map_structure(tf.convert_to_tensor, server_state(model))
  )


def example_spec_of(
  model: models.PartialModel, work: phases.Work
) -> examples.ExampleSpec:
  """Return the spec of an example, for a model and the phases that read it."""
  spec = examples.ExampleSpec(model.example_spec)
  parts = [phase.on for phase in phases.all_phases(work)]
  parts += [p.on for p in work if not isinstance(p, phases.Interleaved)]
  spec.update(splits.example_fields(*parts))
  paths = [re.sub(r'\[\d+\]', '', path) for path, _ in examples.leaves(spec)]
  spelling.check_names('The field of examples', paths, CompositionError)
  return spec


class ClientWork:
  """The work of every client in a round.

  Attributes:
    model: The model.
    client_state: Functions that define a client's state.
    work: The phases of a round.
    example_spec: The spec of a client's example.
    initialize_client: `(int32[2] -> C)`: the state of a client that never took
      part, from its seed.
    specs: Specs of a client's inputs: shared weights by tier, frozen weights,
      its state, its data.
    types: The same as TFF types: weights at the server, C, D.
    tables: The tables that a client can train by rows.
    keeping: The phases whose optimizers keep slots with the client, by name.
  """

  def __init__(
    self,
    model: models.PartialModel,
    client_state: client_state.ClientState,
    work: phases.Work,
    what: str,
  ):
    """Check the parts and trace the client state.

    Args:
      model: The model.
      client_state: Functions that define a client's state.
      work: The phases of a round.
      what: The purpose of the work, for error messages.

    Raises:
      CompositionError: If no phase is measured.
      ModelError: If the model is not made by `from_keras`.
      PhaseError, GroupError: If phases do not fit each other or the model.
    """
    models.check(model)
    self.model = model
    self.client_state = client_state
    if not isinstance(work, (list, tuple)) or hasattr(work, '_fields'):
      raise CompositionError(
        f'work: expected a list of phases, found a {type(work).__name__}. Put '
        'it into brackets.'
      )
    self.work = list(work)
    self._outside = tf.__internal__.autograph.control_status_ctx()
    work_lib.check(self.work, model)
    if not any(phase.measured for phase in phases.all_phases(self.work)):
      raise CompositionError(
        f'No phase of the {what} is measured, so that no client would have a '
        'weight or metrics.'
      )
    self.example_spec = example_spec_of(model, self.work)
    self.tables = lookups.Tables(model, self.work)
    self.keeping = optimizer_slots.keeping(self.work)

    def remember(seed: tf.Tensor) -> Any:
      slots = optimizer_slots.first(self.keeping, model)
      return self._state(client_state.first(model, seed), {}, slots)

    first = tracing.traced(remember, random_bits.SEED_SPEC)
    self.initialize_client = tff.tensorflow.computation(
      lambda seed: first(seed), type_of(random_bits.SEED_SPEC)
    )
    client_specs = examples.client_spec(self.example_spec)
    self.specs = (
      *weights_specs(model),
      tf.nest.map_structure(
        lambda t: tf.TensorSpec(t.shape, t.dtype), first.structured_outputs
      ),
      client_specs,
    )
    if self.keeping:
      held = self.specs[2][optimizer_slots.HELD]
      optimizer_slots.check(
        self.keeping, model, client_state.recall, held, self.specs[0]
      )
    self.types = (
      weights_type(model),
      self.initialize_client.type_signature.result,
      type_of(client_specs),
    )

  @property
  def follows_rounds(self) -> bool:
    """True if the work depends on the number of completed rounds."""
    return work_lib.follow_rounds(self.work)

  def computation(
    self, function: Callable[..., Any], sent: Mapping[str, Any]
  ) -> tff.Computation:
    """Make `(ModelWeights, C, D[, sent] -> ...)`, for one client.

    Args:
      function: What the client computes: (shared weights by tier, frozen ones,
        its state, its data, what else is sent, by name) -> a structure. It
        does everything within `begin`.
      sent: Specs of what the server sends besides weights; nothing if empty.
    """
    spec = collections.OrderedDict(sent)
    # The function enters Keras's scope itself, in `begin`.
    traced = tf.function(function, autograph=False).get_concrete_function(
      *self.specs, spec
    )

    def told(weights: Any, kept: Any, client: Any, beside: Any) -> Any:
      return traced(
        weights.trainable, weights.non_trainable, kept, client, beside
      )

    if sent:
      return tff.tensorflow.computation(told, *self.types, type_of(spec))
    return tff.tensorflow.computation(
      lambda weights, kept, client: told(weights, kept, client, spec),
      *self.types,
    )

  @contextlib.contextmanager
  def begin(
    self,
    shared: Any,
    frozen: Any,
    kept: Any,
    client: Any,
    sent: Mapping[str, Any],
  ) -> Iterator[contexts.ClientContext]:
    """Let a client recall its weights and work, in a `with` statement.

    Args:
      shared: The weights received, by tier.
      frozen: Weights that are never trained.
      kept: The client's state.
      client: Its data.
      sent: What the server sends besides weights: `round`, the number of
        completed rounds, if the work depends on it, and `server`, the server's
        state, if there is one.

    Yields:
      The client's context at the start of the round.
    """
    with tracing.keras_scope(self._outside):
      yield self._recalled(shared, frozen, kept, client, sent.get('server'))

  def _recalled(
    self, shared: Any, frozen: Any, kept: Any, client: Any, server: Any
  ) -> contexts.ClientContext:
    """Return a client's context as it begins."""
    seed = random_bits.fold_in(client['seed'], 'local')
    rows = client.get('rows', {})
    tables = self.model.client_tables
    slots: Mapping[str, Any] = {}
    if self.keeping:
      kept, slots = kept[optimizer_slots.HELD], kept[optimizer_slots.SLOTS]
    num_rows: Mapping[str, Any] = {}
    if isinstance(kept, Mapping) and _NUM_ROWS in kept:
      kept, num_rows = kept[_HELD], kept[_NUM_ROWS]
    kept = tables.fit(kept, num_rows, rows, seed)
    held = collections.OrderedDict(
      self.client_state.recall(self.model, kept, shared, seed)
    )
    if tiers.LOCAL in held:
      # Tables that were not remembered have no rows yet.
      new = {n: tf.constant(0) for n in tables.names if n not in num_rows}
      held[tiers.LOCAL] = tables.fit(held[tiers.LOCAL], new, rows, seed)
    weights = tiers.join(shared, held)
    if (
      work_lib.needs_personal_copy(self.work) and tiers.PERSONAL not in weights
    ):
      weights[tiers.PERSONAL] = collections.OrderedDict(
        shared.get(tiers.GLOBAL, {})
      )
    return contexts.ClientContext(
      self.model,
      weights,
      weights,
      frozen,
      client['examples'],
      client['count'],
      client['seed'],
      kept,
      server,
      rows=rows,
      slots=contexts.Slots(slots, slots),
    )

  def keep(self, client: contexts.ClientContext) -> Any:
    """Return a client's state after its work.

    Args:
      client: Its context then.
    """
    kept = self.client_state.keep(client)
    return self._state(kept, client.rows, client.slots.now)

  def keep_as_before(self, client: contexts.ClientContext) -> Any:
    """Return the state of a client whose work failed.

    Args:
      client: Its context.
    """
    return self._state(client.remembered, client.rows, client.slots.before)

  @property
  def remembers_tables(self) -> bool:
    """True if clients remember client-sized tables."""
    return tff.types.contains(
      self.initialize_client.type_signature.result,
      lambda kind: (
        isinstance(kind, tff.TensorType)
        and (kind.shape is None or None in kind.shape)
      ),
    )

  @property
  def remembered_names(self) -> list[str]:
    """Top-level names of clients' state."""
    kept = self.initialize_client.type_signature.result
    kept = without_slots(kept)
    if self.remembers_tables:
      kept = kept[_HELD]
    return tff.structure.name_list(kept)

  def _state(
    self, kept: Any, rows: Mapping[str, tf.Tensor], slots: Mapping[str, Any]
  ) -> Any:
    """Return a state with its tables' numbers of valid rows, and kept slots."""
    tables = client_tables.names_in(kept, self.model.client_tables.names)
    if tables:
      numbers = collections.OrderedDict(
        (name, tf.reduce_sum(tf.cast(rows.get(name, []), tf.int32)))
        for name in sorted(tables)
      )
      kept = collections.OrderedDict([(_HELD, kept), (_NUM_ROWS, numbers)])
    if self.keeping:
      kept = collections.OrderedDict(
        [(optimizer_slots.HELD, kept), (optimizer_slots.SLOTS, slots)]
      )
    return kept
