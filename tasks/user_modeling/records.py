"""Records of users and items at clients with many users each.

A client is a school or a region (HPFL, section 3.1). Its users and its
numbering of users and items are local; attributes, such as concepts or genres,
are public. `build` makes records from raw ids and leaves out small clients, as
in section 5.1 of the paper.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple

from absl import logging
import numpy as np

from tasks.errors import DataError

# The fields of `Records` with one entry a record.
_BY_RECORD = ('client', 'user', 'item', 'public_item', 'answer', 'place')


class Tags(NamedTuple):
  """Attributes of items, one entry a pair; pairs may repeat.

  Attributes:
    item: Ids of items, `[pairs]`.
    attribute: Ids of attributes, `[pairs]`.
    names: The name of each attribute, by its id.
  """

  item: np.ndarray
  attribute: np.ndarray
  names: Mapping[Any, str]


@dataclasses.dataclass(frozen=True, eq=False)
class Records:
  """Answers of users to items, by client.

  The arrays `client` to `place` have one entry a record, `[records]`. `build`
  returns them sorted by client, then user; records of one user keep the order
  of the files. A selection of them by `take` keeps all names and numbers.

  Attributes:
    name: The data set.
    clients: The clients' names.
    user_names: Names of the users of each client.
    own_items: For each client its items, int32 `[own items]`, ascending: the
      number among all clients of each item in its own numbering.
    item_names: The names of the items of all clients.
    item_attributes: int32 `[items, width]`: the attributes of each item,
      ascending; -1 pads. Every item has at least one.
    attribute_names: The attributes' names.
    scale: The lowest and the highest possible answer.
    client: int32, the position in `clients`.
    user: int32, the number of the user within the client, from 0.
    item: int32, the number of the item within the client, from 0.
    public_item: int32, the number of the item among all clients, from 0.
    answer: float32, such as 0 or 1, or 1 to 5.
    place: int64, the position of the record in the arguments of `build`.
    left_out: Counts of the filters' omissions, by reason.
  """

  name: str
  clients: tuple[str, ...]
  user_names: tuple[tuple[str, ...], ...]
  own_items: tuple[np.ndarray, ...]
  item_names: tuple[str, ...]
  item_attributes: np.ndarray
  attribute_names: tuple[str, ...]
  scale: tuple[float, float]
  client: np.ndarray
  user: np.ndarray
  item: np.ndarray
  public_item: np.ndarray
  answer: np.ndarray
  place: np.ndarray
  left_out: dict[str, int]

  def __len__(self) -> int:
    return len(self.client)

  @property
  def num_items(self) -> int:
    return len(self.item_names)

  @property
  def num_attributes(self) -> int:
    return len(self.attribute_names)

  @property
  def attributes(self) -> np.ndarray:
    """Attributes of each record's item, int32 `[records, width]`."""
    return self.item_attributes[self.public_item]

  def of_client(self, client: int) -> 'Records':
    return self.take(self.client == client)

  def take(self, rows: np.ndarray) -> 'Records':
    """Return some of the records, with the names and numbers of all."""
    taken = {name: getattr(self, name)[rows] for name in _BY_RECORD}
    return dataclasses.replace(self, **taken)

  def describe(self) -> dict[str, Any]:
    """Count the data, as in Table 1 of the paper, and the omissions.

    Only clients, users, items and attributes with a record count.
    """
    items = np.unique(self.public_item)
    has = self.item_attributes >= 0
    width = has.sum(axis=1)
    size = max(map(len, self.user_names))
    users = np.unique(self.client.astype(np.int64) * size + self.user)
    return {
      'clients': len(np.unique(self.client)),
      'users': len(users),
      'items': len(items),
      'records': len(self),
      'attributes': len(np.unique(self.item_attributes[items][has[items]])),
      'attributes_per_item': _mean(width[items]),
      'attributes_per_record': _mean(width[self.public_item]),
      'left_out': dict(self.left_out),
    }


def build(
  name: str,
  *,
  client: np.ndarray,
  user: np.ndarray,
  item: np.ndarray,
  answer: np.ndarray,
  tags: Tags,
  scale: tuple[float, float],
  min_users: int = 1,
  min_records_per_user: float = 0.0,
  left_out: Mapping[str, int] | None = None,
) -> Records:
  """Make records of raw ids, leave out small clients and number the rest.

  Clients, users, items and attributes are numbered by ascending id. Users of
  two clients are different even if their ids are the same; items with the same
  id are the same.

  Args:
    name: The data set, for messages.
    client: Ids of clients, integers or texts, `[records]`.
    user: Ids of users, `[records]`.
    item: Ids of items, `[records]`.
    answer: The answers, `[records]`.
    tags: The attributes of items; those of other items are ignored.
    scale: The lowest and the highest possible answer.
    min_users: Clients with fewer users are left out.
    min_records_per_user: Clients whose users have fewer records on average are
      left out, too.
    left_out: Counts of earlier omissions, by reason.

  Raises:
    DataError: If nothing is left, or an item has no attribute.
  """
  if not len(client):
    raise DataError(f'{name}: there are no records. Give more data.')
  client_ids, clients = np.unique(client, return_inverse=True)
  user_ids, users = np.unique(user, return_inverse=True)
  numbers, users_of = _number_within(clients, users, len(client_ids))
  num_users = np.array([len(own) for own in users_of])
  is_kept, omitted = _filter(
    clients, num_users, min_users, min_records_per_user
  )
  reasons = {k: n for k, n in {**(left_out or {}), **omitted}.items() if n}
  for reason, number in reasons.items():
    logging.info('%s: left out: %s: %d.', name, reason, number)
  kept = np.flatnonzero(is_kept)
  if not len(kept):
    raise DataError(
      f'{name}: none of {len(client_ids)} clients has at least {min_users} '
      f'users with {min_records_per_user:g} records each on average. Lower the '
      'limits, or give more data.'
    )
  chosen = np.flatnonzero(is_kept[clients])
  order = chosen[np.lexsort((numbers[chosen], clients[chosen]))]  # Stable.
  codes = (np.cumsum(is_kept) - 1)[clients[order]]
  item_ids, public = np.unique(item[order], return_inverse=True)
  own, items_of = _number_within(codes, public, len(kept))
  attributes, attribute_names = _attributes(name, item_ids, tags)
  records = Records(
    name=name,
    clients=_texts(client_ids[kept]),
    user_names=tuple(_texts(user_ids[users_of[index]]) for index in kept),
    own_items=tuple(items.astype(np.int32) for items in items_of),
    item_names=_texts(item_ids),
    item_attributes=attributes,
    attribute_names=attribute_names,
    scale=scale,
    client=codes.astype(np.int32),
    user=numbers[order].astype(np.int32),
    item=own.astype(np.int32),
    public_item=public.astype(np.int32),
    answer=answer[order].astype(np.float32),
    place=order,
    left_out=reasons,
  )
  logging.info('%s: %s.', name, records.describe())
  return records


def _number_within(
  group: np.ndarray, member: np.ndarray, num_groups: int
) -> tuple[np.ndarray, list[np.ndarray]]:
  """Assign numbers from 0 to the members of each group.

  Returns the number of each record's member within its group, `[records]`, and
  for each group the codes of its members, ascending.
  """
  size = int(member.max()) + 1
  cells, which = np.unique(group * size + member, return_inverse=True)
  starts = np.searchsorted(cells, np.arange(num_groups) * size)
  return which - starts[group], np.split(cells % size, starts[1:])


def _filter(
  clients: np.ndarray,
  num_users: np.ndarray,
  min_users: int,
  min_records_per_user: float,
) -> tuple[np.ndarray, dict[str, int]]:
  """Return a mask of clients to keep, bool `[clients]`, and omissions."""
  num_records = np.bincount(clients)
  has_few_users = num_users < min_users
  has_few_records = num_records < min_records_per_user * num_users
  has_few_records &= ~has_few_users
  is_kept = ~(has_few_users | has_few_records)
  return is_kept, {
    'clients_with_few_users': int(has_few_users.sum()),
    'clients_with_few_records': int(has_few_records.sum()),
    'users_of_these_clients': int(num_users[~is_kept].sum()),
    'records_of_these_clients': int(num_records[~is_kept].sum()),
  }


def _attributes(
  name: str, item_ids: np.ndarray, tags: Tags
) -> tuple[np.ndarray, tuple[str, ...]]:
  """Return the attributes of items, int32 `[items, width]`, and their names.

  Attributes without items get no number.
  """
  is_used = np.isin(tags.item, item_ids)
  items = np.searchsorted(item_ids, tags.item[is_used])
  ids, codes = np.unique(tags.attribute[is_used], return_inverse=True)
  counts = np.bincount(np.unique(items), minlength=len(item_ids))
  if not counts.all():
    missing = np.flatnonzero(counts == 0)
    raise DataError(
      f'{name}: {len(missing)} of {len(item_ids)} items have no attribute, '
      f'such as the item {item_ids[missing[0]]}. Give each item at least one.'
    )
  own, _ = _number_within(items, codes, len(item_ids))
  table = np.full((len(item_ids), int(own.max()) + 1), -1, np.int32)
  table[items, own] = codes
  return table, tuple(tags.names[key] for key in ids.tolist())


def _texts(ids: np.ndarray) -> tuple[str, ...]:
  return tuple(str(key) for key in ids.tolist())


def _mean(values: np.ndarray) -> float:
  return float(values.mean()) if len(values) else 0.0
