"""Composition of an algorithm's parts into a `PartialProcess`.

`compose` follows the order of a round: the broadcast, the client's work and
message (`messages.py`), the server's aggregation and step (`server_update.py`),
and the clients' new state (`rounds.py`).
"""

import collections
from collections.abc import Iterable, Sequence
import dataclasses
import functools
from typing import Any, TypeAlias

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial import aggregators
from tff_partial import client_state
from tff_partial import phases
from tff_partial.arguments import spelling
from tff_partial.client import client_work
from tff_partial.client_statistics import Join
from tff_partial.client_statistics import MEMBERS
from tff_partial.client_statistics import Statistic
from tff_partial.exchange import messages
from tff_partial.exchange import rounds
from tff_partial.exchange import server_update
from tff_partial.exchange.composition_checks import check_parts
from tff_partial.exchange.composition_checks import check_work
from tff_partial.exchange.composition_checks import mechanisms_of
from tff_partial.exchange.messages import ClientWeightFn
from tff_partial.exchange.messages import ClientWeighting
from tff_partial.exchange.messages import PostprocessUpdate
from tff_partial.model import models
from tff_partial.processes import PartialProcess
from tff_partial.processes import weight_accessors

AggregationFactory: TypeAlias = aggregators.Factory
ServerState: TypeAlias = client_work.ServerState


@dataclasses.dataclass(frozen=True)
class Aggregation:
  """How the server aggregates clients' updates.

  Attributes:
    aggregator: Aggregates updates, any factory of `tff.aggregators`; by default
      the mean weighted by `client_weighting`. With factories of
      `aggregators.py`, such as the default, clients send only the rows of a
      table that they trained.
    client_weighting: Weights clients by measured examples or uniformly; or a
      function from a client's result to its weight. Examples of weight 0 count
      like others, as in the mean loss of a batch. A client whose weight is
      negative or not finite does not count, like one that is not finite. None
      takes the algorithm's own, by examples if its paper says nothing else.
    postprocess_update: Transforms a client's update before it is sent, such as
      `local_noise.LocalNoise`. Clients then send whole tables.
    mean_of_members: How far a group's copy moves. If false, by its members'
      share of the mean over all clients, as in FedEmbed (Algorithm 1, line 25):
      a small group moves little. If true, by the mean over its members only,
      for which the server learns the total weight of each group's members; not
      possible with noise. None takes the algorithm's own, which is true for
      IFCA and false for all others.
  """

  aggregator: AggregationFactory | None = None
  client_weighting: ClientWeighting | ClientWeightFn | None = None
  postprocess_update: PostprocessUpdate | None = None
  mean_of_members: bool | None = None


def check_aggregation(aggregation: Aggregation) -> None:
  """Refuse what is no `Aggregation`, such as a factory alone."""
  spelling.check_kind(
    'aggregation',
    aggregation,
    Aggregation,
    '`Aggregation(aggregator)`',
    client_work.CompositionError,
  )


def with_defaults(aggregation: Aggregation, **own: Any) -> Aggregation:
  """Take an algorithm's own settings where the aggregation says nothing."""
  check_aggregation(aggregation)
  unset = {k: v for k, v in own.items() if getattr(aggregation, k) is None}
  return dataclasses.replace(aggregation, **unset)


def with_equal_weights(aggregation: Aggregation) -> Aggregation:
  """Give clients equal weights unless the aggregation says otherwise."""
  return with_defaults(aggregation, client_weighting=ClientWeighting.UNIFORM)


def compose(
  model: models.PartialModel,
  *,
  work: phases.Work,
  client_state: client_state.ClientState = client_state.stateless,
  aggregation: Aggregation = Aggregation(),
  server_optimizer: phases.Optimizer | None = None,
  statistics: Sequence[Statistic] = (),
  server_state: ServerState | None = None,
) -> PartialProcess:
  """Build a process in which clients do the work and the server aggregates.

  A client whose losses, weights or statistics are not all finite does not
  count: its update and its weight are zero and its measurements are left out,
  except for `num_not_finite`; it keeps its previous state. A client without
  measured examples has the weight zero. Where no client counts, weights and the
  server optimizer stay. If no phase trains a tier at the server, no update is
  sent.

  Args:
    model: The model to train.
    work: The phases of a client's round.
    client_state: What a client remembers; nothing by default.
    aggregation: How the server aggregates updates.
    server_optimizer: Steps along the update; SGD with rate 1 by default.
    statistics: What clients send besides their update.
    server_state: Makes the server's state besides weights, which statistics
      update. It is sent to clients, in `ClientContext.server`; also in an
      evaluation that is built with the same function.

  Raises:
    CompositionError, PhaseError, GroupError: If the parts do not fit together,
      or something would be sent beside a private aggregator without its noise.
  """
  check_aggregation(aggregation)
  aggregator = aggregation.aggregator or aggregators.MeanFactory()
  weighting = aggregation.client_weighting
  postprocess = aggregation.postprocess_update
  server_optimizer = server_optimizer or phases.sgd(1.0)
  if aggregation.mean_of_members:
    statistics = [MEMBERS, *statistics]
  check_parts(aggregator, server_optimizer, weighting, postprocess, statistics)
  client = client_work.ClientWork(model, client_state, work, 'round')
  check_work(client, aggregator, postprocess, statistics)
  sent_tiers = _sent_tiers(client)
  by_rows = postprocess is None and isinstance(
    aggregator, aggregators.RowAggregationFactory
  )
  first_round = _first_round(model, server_state)
  work_state = first_round.type_signature.result
  sent = _specs_of_sent(client, work_state)
  spec = messages.ClientUpdateSpec(
    sent_tiers, weighting, by_rows, postprocess, statistics
  )
  update = client.computation(
    functools.partial(messages.client_update, client, spec), sent
  )
  update_type = update.type_signature.result
  exchanges = [
    server_update.exchange(one, client, update_type, work_state, sent)
    for one in statistics
  ]
  updates = server_update.JoinUpdates(
    aggregator,
    server_optimizer,
    client.types[0],
    update.type_signature.result,
    [s for s in statistics if s.join is Join.WITH_UPDATE],
    model,
  )
  return _process(
    rounds.RoundParts(
      client, first_round, tuple(sent), update, updates, exchanges
    ),
    sent_tiers,
    aggregator,
    postprocess,
    client.tables.names if by_rows else (),
    server_state,
  )


def _process(
  parts: rounds.RoundParts,
  sent_tiers: Sequence[str],
  aggregator: AggregationFactory,
  postprocess_update: PostprocessUpdate | None,
  rows_of: Sequence[str],
  server_state: ServerState | None,
) -> PartialProcess:
  """Return the process of a round's parts."""
  client, exchanges = parts.client, parts.exchanges
  initialize = rounds.initialize(parts)
  get_weights, set_weights = weight_accessors(
    initialize.type_signature.result.member, client.types[0]
  )
  return PartialProcess(
    initialize,
    rounds.next_round(parts, initialize.type_signature.result),
    initialize_client=client.initialize_client,
    get_model_weights=get_weights,
    set_model_weights=set_weights,
    model=client.model,
    example_spec=client.example_spec,
    sent=sent_tiers,
    sent_beside={
      one.statistic.name: one.own_type
      for one in sorted(
        exchanges, key=lambda one: one.statistic.join is not Join.WITH_UPDATE
      )
    },
    loaded_beside=_loaded_beside(
      client, parts.work_state, parts.sent, exchanges
    ),
    mechanisms=mechanisms_of(aggregator, postprocess_update),
    work=client,
    server_state=server_state,
    rows_of=rows_of,
  )


def _sent_tiers(client: client_work.ClientWork) -> list[str]:
  """Return the tiers at the server that clients train."""
  trained = {t for p in phases.all_phases(client.work) for t in p.train}
  return [tier for tier in client.specs[0] if tier in trained]


def _specs_of_sent(
  client: client_work.ClientWork, work_state: tff.StructType
) -> dict[str, Any]:
  """Return the specs of what the server sends besides weights, by name."""
  names = ['round'] if client.follows_rounds else []
  names += [n for n in tff.structure.name_list(work_state) if n == 'server']
  return collections.OrderedDict(
    (name, tff.types.type_to_tf_tensor_specs(work_state[name]))
    for name in names
  )


def _loaded_beside(
  client: client_work.ClientWork,
  work_state: tff.StructType,
  sent: Iterable[str],
  exchanges: Sequence[server_update.Exchange],
) -> dict[str, tff.Type]:
  """Return the types of what clients receive besides weights, by name."""
  loaded = {name: work_state[name] for name in sent}
  if any(one.second_pass is not None for one in exchanges):
    loaded['weights after the update'] = client.types[0]
  loaded.update(
    (f'{one.statistic.name}, joined', one.joined_type)
    for one in exchanges
    if one.settle is not None
  )
  return loaded


def _first_round(
  model: models.PartialModel, server_state: ServerState | None
) -> tff.Computation:
  """Make `( -> (completed rounds[, server state]))`."""
  if server_state is not None:
    first_server_state = client_work.first_server_state(model, server_state)

  @tff.tensorflow.computation
  def first_round() -> Any:
    held = collections.OrderedDict(round=tf.constant(0))
    if server_state is not None:
      held['server'] = first_server_state()
    return held

  return first_round
