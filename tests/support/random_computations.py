"""Federated computations drawn at random, each by a seed.

A computation starts from arguments of several kinds at clients, and one at the
server, and applies what `_STEPS` lists, broadcasts, selections and aggregates.
Some fail, for instance where a client divides by zero: then they must do so
under every runtime. Numbers of the kinds `exact` and `vector` are multiples of
a quarter, so that sums are the same in any order and one may round them; those
of the kind `rough` are compared up to rounding.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

_TYPES: dict[str, tff.Type] = {
  'exact': tff.TensorType(np.float32),
  'places': tff.TensorType(np.int32, [4]),
  'rough': tff.TensorType(np.float32),
  'rows': tff.TensorType(np.float32, [None]),
  'text': tff.TensorType(np.str_),
  'vector': tff.TensorType(np.float32, [3]),
  'whole': tff.TensorType(np.int32),
}
_TABLE = np.array([0.25, -1.5, 2.0, 4.75], np.float32)
# Kinds of which a sum, a maximum, a mean exists.
_ADDED = ('exact', 'places', 'rough', 'vector', 'whole')
_ORDERED = ('exact', 'whole')
_AVERAGED = ('exact', 'rough')


def _counted_down(x: tf.Tensor) -> tf.Tensor:
  """The sum of the table's numbers at x, x - 1, ..., 0; fails above 3."""
  return tf.while_loop(
    lambda x, _: x >= 0,
    lambda x, total: (x - 1, total + tf.gather(_TABLE, x)),
    [x, 0.0],
  )[1]


def _chosen(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
  """Divides by y where x is positive, and only there."""
  return tf.cond(x > 0, lambda: x // y, lambda: y - x)


def _trained(x: tf.Tensor) -> tf.Tensor:
  """A few steps down the slope of a small loss."""
  for _ in range(3):
    with tf.GradientTape() as tape:
      tape.watch(x)
      loss = tf.reduce_sum(tf.nn.relu(x) ** 2)
    x -= 0.25 * tape.gradient(loss, x)
  return tf.clip_by_value(x, -8.0, 8.0)


# What a client, or the server, may compute: kinds of inputs, kind of output.
_STEPS: list[tuple[tuple[str, ...], str, Callable[..., Any]]] = [
  (('exact',), 'exact', lambda x: 2.0 * x - 1.0),
  (('exact',), 'exact', tf.nn.relu),
  (('exact',), 'exact', lambda x: tf.where(x > 1.0, tf.abs(x), -x)),
  (('exact',), 'rough', lambda x: tf.exp(-tf.abs(x))),
  (('exact',), 'rough', lambda x: tf.sqrt(tf.abs(x))),
  (('exact',), 'rough', lambda x: 1.0 / x),
  (('exact',), 'whole', lambda x: tf.cast(x, tf.int32)),
  (('exact', 'exact'), 'exact', lambda x, y: x + y),
  (('exact', 'exact'), 'exact', tf.maximum),
  (('exact', 'exact'), 'exact', lambda x, y: tf.clip_by_value(x, -y, y)),
  (('exact', 'whole'), 'vector', lambda x, y: tf.one_hot(y, 3) * x),
  (('places',), 'exact', lambda x: tf.reduce_sum(tf.gather(_TABLE, x))),
  (('places',), 'whole', lambda x: tf.cast(tf.argmax(x), tf.int32)),
  (('places',), 'whole', tf.reduce_min),
  (('places',), 'places', lambda x: tf.sort(x) % 4),
  (
    ('places',),
    'exact',
    lambda x: tf.reduce_max(
      tf.math.unsorted_segment_sum(tf.constant(_TABLE), x, 4)
    ),
  ),
  (('rough',), 'rough', tf.tanh),
  (('rough', 'exact'), 'rough', lambda x, y: x + y),
  (('rows',), 'exact', tf.reduce_sum),
  (('rows',), 'rows', lambda x: tf.concat([x, 2.0 * x], 0)),
  (('rows',), 'whole', tf.size),
  (('text',), 'text', lambda x: tf.strings.join([x, '!'])),
  (('text',), 'whole', tf.strings.length),
  (('text', 'whole'), 'text', lambda x, y: x + tf.strings.as_string(y)),
  (('vector',), 'exact', tf.reduce_max),
  (('vector',), 'exact', lambda x: tf.reduce_sum(tf.cumsum(x))),
  (('vector',), 'rough', lambda x: tf.nn.softmax(x)[0]),
  (('vector',), 'vector', tf.sort),
  (('vector',), 'vector', _trained),
  (('vector',), 'whole', lambda x: tf.cast(tf.argmin(x), tf.int32)),
  (('vector', 'vector'), 'exact', lambda x, y: tf.reduce_min(x - y)),
  (('vector', 'whole'), 'exact', lambda x, y: x[y]),
  (('whole',), 'exact', lambda x: tf.gather(_TABLE, x)),
  (('whole',), 'exact', _counted_down),
  (('whole',), 'rough', lambda x: tf.random.stateless_normal([], [x, 7])),
  (('whole',), 'rough', lambda x: tf.random.stateless_uniform([], [7, x])),
  (
    ('whole',),
    'whole',
    lambda x: tf.random.stateless_uniform([], [x, x], 0, 4, tf.int32),
  ),
  (('whole',), 'whole', lambda x: 3 * x - 1),
  (('whole',), 'whole', lambda x: tf.Variable(2).assign_add(x) + 0),
  (('whole', 'places'), 'places', lambda x, y: tf.where(y > x, y, x)),
  (('whole', 'whole'), 'whole', lambda x, y: x // y),
  (('whole', 'whole'), 'whole', lambda x, y: x % y),
  (('whole', 'whole'), 'whole', _chosen),
]


class _Value(NamedTuple):
  kind: str
  value: Any


class Drawn(NamedTuple):
  """A computation and what to call it with.

  Attributes:
    arguments: Its arguments: values of clients, then one of the server.
  """

  computation: tff.Computation
  arguments: list[Any]
  size: int


class _Drawer:
  """Draws the body of one computation."""

  def __init__(self, generator: np.random.Generator):
    self._generator = generator
    self.clients: list[_Value] = []
    self.server: list[_Value] = []

  def _one_of(self, values: list[Any]) -> Any:
    return values[self._generator.integers(len(values))]

  def _of_kind(self, values: list[_Value], *kinds: str) -> _Value | None:
    found = [value for value in values if value.kind in kinds]
    return self._one_of(found) if found else None

  def map(self) -> None:
    """A step at the clients, or now and then at the server."""
    values = self._one_of([self.clients, self.clients, self.server])
    kinds, kind, function = self._one_of(_STEPS)
    inputs = [self._of_kind(values, one) for one in kinds]
    if None in inputs:
      return
    step = _step(kinds, function)
    (first, *rest) = [one.value for one in inputs]
    argument = (first, *rest) if rest else first
    values.append(_Value(kind, tff.federated_map(step, argument)))

  def broadcast(self) -> None:
    """The server hands a value to all clients, which combine it with theirs."""
    kinds, kind, function = self._one_of(
      [step for step in _STEPS if len(step[0]) == 2]
    )
    one = self._of_kind(self.clients, kinds[0])
    other = self._of_kind(self.server, kinds[1])
    if one is None or other is None:
      return
    step = _step(kinds, function)
    handed = tff.federated_broadcast(other.value)
    self.clients.append(
      _Value(kind, tff.federated_map(step, (one.value, handed)))
    )

  def select(self) -> None:
    """Clients choose numbers of the server's."""
    keys = self._of_kind(self.clients, 'places')
    if keys is None:
      return
    inside = tff.tensorflow.computation(lambda x: x % 4, _TYPES['places'])
    read = tff.tensorflow.computation(
      lambda table, key: tf.gather(table, key),
      tff.TensorType(np.float32, [4]),
      np.int32,
    )
    chosen = tff.federated_select(
      tff.federated_map(inside, keys.value),
      tff.federated_value(4, tff.SERVER),
      tff.federated_eval(
        tff.tensorflow.computation(lambda: tf.constant(_TABLE)), tff.SERVER
      ),
      read,
    )
    add = tff.tensorflow.computation(
      lambda numbers: numbers.reduce(0.0, lambda old, new: 2.0 * old + new)
    )
    self.clients.append(_Value('exact', tff.federated_map(add, chosen)))

  def aggregate(self) -> None:
    """Something of all clients, for the server."""
    way = self._one_of(['sum', 'mean', 'weighted', 'max', 'min', 'join'])
    if way == 'sum':
      one = self._of_kind(self.clients, *_ADDED)
      self._add(one, one and one.kind, tff.federated_sum)
    elif way == 'mean':
      self._add(
        self._of_kind(self.clients, *_AVERAGED), 'rough', tff.federated_mean
      )
    elif way == 'weighted':
      size = tff.tensorflow.computation(
        lambda x: 1.0 + tf.cast(tf.size(x), tf.float32), _TYPES['rows']
      )
      rows = self._of_kind(self.clients, 'rows')
      if rows is not None:
        weight = tff.federated_map(size, rows.value)
        self._add(
          self._of_kind(self.clients, *_AVERAGED),
          'rough',
          lambda value: tff.federated_mean(value, weight),
        )
    elif way == 'join':
      self._add(self._of_kind(self.clients, 'text'), 'text', _joined)
    else:
      one = self._of_kind(self.clients, *_ORDERED)
      extreme = tff.federated_max if way == 'max' else tff.federated_min
      self._add(one, one and one.kind, extreme)

  def _add(
    self, one: _Value | None, kind: Any, aggregate: Callable[[Any], Any]
  ) -> None:
    if one is not None:
      self.server.append(_Value(kind, aggregate(one.value)))

  def results(self) -> list[Any]:
    """Some values of the server and of the clients."""
    found = []
    for values, number in ((self.server, 3), (self.clients, 2)):
      places = self._generator.permutation(len(values))[:number]
      found.extend(values[place].value for place in places)
    return found


def _step(
  kinds: tuple[str, ...], function: Callable[..., Any]
) -> tff.Computation:
  # TFF takes no function that has other parameters, too.
  exactly = {1: lambda x: function(x), 2: lambda x, y: function(x, y)}
  return tff.tensorflow.computation(
    exactly[len(kinds)], *[_TYPES[kind] for kind in kinds]
  )


def _joined(text: Any) -> Any:
  add = tff.tensorflow.computation(lambda a, b: a + b, np.str_, np.str_)
  same = tff.tensorflow.computation(lambda a: a, np.str_)
  return tff.federated_aggregate(text, '', add, add, same)


def _draw_value(generator: np.random.Generator, kind: str) -> Any:
  def quarters(size: int) -> np.ndarray:
    numbers = (generator.integers(-20, 20, size) / 4.0).astype(np.float32)
    if not generator.integers(60):
      numbers[:1] = generator.choice([np.nan, np.inf])
    return numbers

  if kind == 'exact':
    return quarters(1)[0]
  if kind == 'vector':
    return quarters(3)
  if kind == 'rows':
    return quarters(2 * int(generator.integers(2)))
  if kind == 'whole':
    return np.int32(
      generator.integers(-1 if not generator.integers(9) else 1, 4)
    )
  if kind == 'places':
    return generator.integers(0, 4, 4).astype(np.int32)
  return bytes(generator.integers(0, 3, generator.integers(3)).tolist())


def draw(seed: int) -> Drawn:
  """Draws a computation and its arguments."""
  generator = np.random.default_rng(seed)
  kinds = [
    str(kind)
    for kind in generator.choice(
      [kind for kind in _TYPES if kind != 'rough'],
      generator.integers(2, 6),
      replace=False,
    )
  ]
  of_server = str(generator.choice(['exact', 'vector', 'whole', 'places']))

  @tff.federated_computation(
    [
      *[tff.FederatedType(_TYPES[kind], tff.CLIENTS) for kind in kinds],
      tff.FederatedType(_TYPES[of_server], tff.SERVER),
    ]
  )
  def computation(arguments):
    drawer = _Drawer(generator)
    *clients, server = [arguments[place] for place in range(len(kinds) + 1)]
    drawer.clients.extend(map(_Value, kinds, clients))
    drawer.server.append(_Value(of_server, server))
    for _ in range(generator.integers(2, 6)):
      drawer.map()
      getattr(
        drawer, generator.choice(['map', 'broadcast', 'select', 'aggregate'])
      )()
    drawer.aggregate()
    return drawer.results()

  size = int(generator.choice([0, 1, 2, 5, 20, 40]))
  arguments = [
    [_draw_value(generator, kind) for _ in range(size)] for kind in kinds
  ]
  return Drawn(
    computation, [*arguments, _draw_value(generator, of_server)], size
  )
