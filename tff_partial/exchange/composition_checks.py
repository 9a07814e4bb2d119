"""Checks that the parts of a composition fit together."""

from collections.abc import Sequence
from typing import Any

from absl import logging

from tff_partial import aggregators
from tff_partial import groups
from tff_partial import phases
from tff_partial import tiers
from tff_partial.arguments import optimizers
from tff_partial.arguments import spelling
from tff_partial.client import client_work
from tff_partial.client import work as work_lib
from tff_partial.client.client_work import CompositionError
from tff_partial.client_statistics import Join
from tff_partial.client_statistics import MEMBERS
from tff_partial.client_statistics import SCALED_BY_SHARE
from tff_partial.client_statistics import Statistic
from tff_partial.dp import mechanisms
from tff_partial.exchange.messages import ClientWeightFn
from tff_partial.exchange.messages import ClientWeighting
from tff_partial.exchange.messages import PostprocessUpdate
from tff_partial.joins.robust import RobustFactory


def check_parts(
  aggregator: Any,
  server_optimizer: Any,
  client_weighting: ClientWeighting | ClientWeightFn | None,
  postprocess_update: PostprocessUpdate | None,
  statistics: Sequence[Statistic],
) -> None:
  """Check what does not depend on the clients' work; see `compose`."""
  _check_joining(aggregator, server_optimizer)
  _check_statistics(statistics, postprocess_update)
  _check_privacy(aggregator, postprocess_update, client_weighting, statistics)
  _check_weighting(aggregator, client_weighting, statistics)


def _check_joining(aggregator: Any, server_optimizer: Any) -> None:
  """Check that the aggregator is a factory and the optimizer one of TFF's."""
  spelling.check_kind(
    *('aggregator', aggregator, aggregators.Factory),
    'a factory such as `tff.aggregators.MeanFactory()`',
    CompositionError,
  )
  if not isinstance(server_optimizer, phases.Optimizer):
    raise CompositionError(
      f'The server optimizer must be {optimizers.instead_of(server_optimizer)}'
    )


def _check_weighting(
  aggregator: aggregators.Factory, given: Any, statistics: Sequence[Statistic]
) -> None:
  """Refuse weights, and shares of them, where an aggregator takes none."""
  if given is ClientWeighting.UNIFORM or _weighs(aggregator):
    return
  if SCALED_BY_SHARE in statistics:
    raise CompositionError(
      "SCALED_BY_SHARE: in FURL's Eq. 6 clients keep their share of the "
      f'examples, but {type(aggregator).__name__} takes no weights of clients. '
      'Pass client_weighting=ClientWeighting.UNIFORM for equal shares, or take '
      'another aggregator.'
    )
  # A function may still say which clients count in a robust join.
  if callable(given) and isinstance(aggregator, RobustFactory):
    return
  if given is not None:
    raise CompositionError(
      f'client_weighting: {type(aggregator).__name__} takes no weights of '
      'clients. Leave it out, or take another aggregator.'
    )


def _weighs(aggregator: aggregators.Factory) -> bool:
  """Return True if an aggregator weighs clients by their weights."""
  is_weighted = isinstance(aggregator, aggregators.WeightedFactory)
  return is_weighted and not isinstance(aggregator, RobustFactory)


def _check_statistics(
  statistics: Sequence[Statistic], postprocess_update: PostprocessUpdate | None
) -> None:
  """Check names of statistics, and how they are joined and settled."""
  names = [statistic.name for statistic in statistics]
  taken = set(tiers.TIERS)
  for statistic in statistics:
    if statistic.name in taken:
      raise CompositionError(
        f'statistics: the name {statistic.name!r} is taken, of {names} and the '
        f'tiers {list(tiers.TIERS)}.'
      )
    taken.add(statistic.name)
    if statistic.join is not Join.WITH_UPDATE:
      continue
    if statistic.after_update:
      raise CompositionError(
        f'The statistic {statistic.name!r} is computed after the update, and '
        'cannot be joined with it.'
      )
    if (
      statistic.update_client_state is not None
      and postprocess_update is not None
    ):
      raise CompositionError(
        f'The statistic {statistic.name!r} settles what clients remember by '
        'what they send themselves, which `postprocess_update` changes.'
      )


def _check_privacy(
  aggregator: aggregators.Factory,
  postprocess_update: PostprocessUpdate | None,
  client_weighting: ClientWeighting | ClientWeightFn | None,
  statistics: Sequence[Statistic],
) -> None:
  """Check that clients send nothing without noise if updates get noise."""
  found = mechanisms_of(aggregator, postprocess_update)
  if not any(each.noise_multiplier for each in found):
    return
  local = getattr(postprocess_update, 'mechanism', None)
  # Clients may clip alone, beside noise at the server.
  is_local = local is not None and local.noise_multiplier > 0.0
  noised = 'clients noise' if is_local else 'the private aggregator noises'
  unpaid = (
    f'exactly, beside the updates that {noised}, and no one would account for '
    'it.'
  )
  for statistic in statistics:
    if statistic.join is not Join.WITH_UPDATE:
      remedy = 'Leave it out, join it WITH_UPDATE'
      if statistic is MEMBERS:
        remedy = 'Pass Aggregation(mean_of_members=False)'
      raise CompositionError(
        f'The statistic {statistic.name!r}: clients would send it {unpaid} '
        f'{remedy}, or do without noise.'
      )
  # A private aggregator takes no weights.
  if local and client_weighting is not ClientWeighting.UNIFORM:
    raise CompositionError(
      f'client_weighting: clients would send how much they weigh, {unpaid} '
      'Pass ClientWeighting.UNIFORM, or do without noise.'
    )


def mechanisms_of(
  aggregator: aggregators.Factory, postprocess_update: PostprocessUpdate | None
) -> list[mechanisms.Mechanism]:
  """Return all mechanisms that clip and noise what clients send."""
  found = (
    getattr(part, 'mechanism', None)
    for part in (aggregator, postprocess_update)
  )
  return [one for one in found if one is not None]


def check_work(
  client: client_work.ClientWork,
  aggregator: aggregators.Factory,
  postprocess_update: PostprocessUpdate | None,
  statistics: Sequence[Statistic],
) -> None:
  """Check that the clients' work fits the other parts; see `compose`."""
  if MEMBERS in statistics:
    _check_members(aggregator, client)
  _check_tiers(client)
  found = mechanisms_of(aggregator, postprocess_update)
  _check_states(client, found)
  if any(one.noise_multiplier for one in found):
    _warn_of_untrained(client)
  _check_settling(client, statistics)


def _check_states(
  client: client_work.ClientWork, found: Sequence[mechanisms.Mechanism]
) -> None:
  """Check that states of layers are trained, and not noised."""
  trained = phases.all_phases(client.work)
  for tier in client.model.tiers:
    names = [v.name for v in client.model.trainable(tier) if v.is_state]
    if not names:
      continue
    if tier != tiers.LOCAL and any(one.noise_multiplier for one in found):
      raise CompositionError(
        f"state='averaged': {names} would be clipped and noised like an "
        'update, which moving averages do not stand: a variance could become '
        "negative. Take state='local' or 'frozen', or do without noise."
      )
    if tier == tiers.LOCAL or any(tier in phase.train for phase in trained):
      if not any(_trains_states(phase, tier, names) for phase in trained):
        raise CompositionError(
          f'state: {names} would keep their first values, since no phase of '
          f'this algorithm takes steps of {tier!r} weights on examples. Take '
          "another treatment, such as 'frozen', or another algorithm."
        )


def _warn_of_untrained(client: client_work.ClientWork) -> None:
  """Warn of variables that are noised with their tier and never trained."""
  for tier in (tiers.GLOBAL, tiers.GROUP):
    trained = [p for p in phases.all_phases(client.work) if tier in p.train]
    names = client.model.specs(tier)
    idle = [n for n in names if not any(p.trains(n) for p in trained)]
    if trained and idle:
      logging.warning(
        'No phase trains %s, but noise moves them, as it moves all weights of '
        'a tier that is sent. Use `tff_partial.freeze(model, but=...)` to keep '
        'them.',
        idle,
      )


def _trains_states(
  phase: phases.Phase, tier: str, names: Sequence[str]
) -> bool:
  """Return True if a phase changes states of layers, as training does."""
  return (
    tier in phase.train
    and phase.use_model_loss
    and phase.exact is None
    and phase.max_steps != 0
    and all(map(phase.trains, names))
  )


def _check_settling(
  client: client_work.ClientWork, statistics: Sequence[Statistic]
) -> None:
  """Check that statistics can settle clients' state."""
  for statistic in statistics:
    if statistic.update_client_state is not None and client.keeping:
      raise CompositionError(
        f'The statistic {statistic.name!r} settles what clients remember, to '
        "which slots='kept' adds what optimizers keep, such as step counts, "
        'which it cannot settle. Leave `slots` out, or do without it.'
      )
    if statistic.update_client_state is not None and client.remembers_tables:
      raise CompositionError(
        f'The statistic {statistic.name!r} settles what clients remember, but '
        f'their tables {list(client.model.client_tables.names)} have a size of '
        'their own, which changes with their data. Give the tables a fixed '
        'size, or do without.'
      )


def _check_members(
  aggregator: aggregators.Factory, client: client_work.ClientWork
) -> None:
  """Check that means over the members of groups are possible."""
  names = list(client.model.specs(tiers.GROUP))
  trained = [
    p for p in phases.all_phases(client.work) if tiers.GROUP in p.train
  ]
  if not (names and trained):
    raise groups.GroupError(
      'mean_of_members: no phase trains weights of groups. Leave it out, or '
      'train the tier GROUP of a model that has groups.'
    )
  if work_lib.holds_all_copies(client.work):
    raise groups.GroupError(
      'mean_of_members: clients hold the copies of all groups, of which they '
      'are all members. Leave it out.'
    )
  if not _weighs(aggregator):
    raise CompositionError(
      f'mean_of_members: {type(aggregator).__name__}, which joins '
      f'{names[0]!r}, does not weigh clients by their weights, so that a mean '
      'over some of them does not follow from it. Take a weighted mean, or do '
      'without.'
    )


def _check_tiers(client: client_work.ClientWork) -> None:
  """Check that the work fits the model's tiers."""
  held = {tiers.GLOBAL, tiers.GROUP} & set(client.model.tiers)
  if not held:
    raise CompositionError(
      'The model has no variable at the server to train: all are local.'
    )
  trained = {t for phase in phases.all_phases(client.work) for t in phase.train}
  if trained & {tiers.GLOBAL, tiers.GROUP} and not trained & held:
    raise CompositionError(
      f'The work trains {sorted(trained)} variables, but at the server the '
      f'model has {sorted(held)} ones alone.'
    )
  names = list(client.model.specs(tiers.LOCAL))
  if not names and any(
    tiers.LOCAL in phase.train and tiers.PERSONAL not in phase.train
    for phase in phases.all_phases(client.work)
  ):
    logging.warning(
      'No variable of the model is local, so that this algorithm trains the '
      'global ones alone. Name local ones: `from_keras(local=...)`.'
    )
  if names and not (tiers.LOCAL in trained or client.client_state.is_frozen):
    raise CompositionError(
      f'The model has local variables, {names}, which no phase trains. Build '
      'it without `local`, or take an algorithm that trains them.'
    )
