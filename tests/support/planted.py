"""Clients whose tastes are planted, and small models that can find them."""

import collections
from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tests.support.computations import summed
from tff_partial import assignments
from tff_partial import evaluation
from tff_partial import groups
from tff_partial import layers
from tff_partial import processes
from tff_partial import random_bits
from tff_partial import runtimes
from tff_partial import tiers
from tff_partial.data import cohorts
from tff_partial.data import examples
from tff_partial.data import lengths
from tff_partial.data import packing
from tff_partial.data import populations
from tff_partial.model import keras_models
from tff_partial.model import models

NUM_ITEMS = 29
NUM_FACTORS = 4
# Sizes a local variable in `build_tastes`: a prime number that is in no other
# shape, so that it can be looked for.
LOCAL_SIZE = 13

Fields = dict[str, np.ndarray]

# Within each of these contexts, computations run in another way.
RUNTIMES: dict[str, Callable[[], Any]] = {
  'jit': functools.partial(runtimes.cohort, jit=True, strict=True),
  'no jit': functools.partial(runtimes.cohort, jit=False),
  'native': runtimes.native,
}


class UserVector(tf.keras.layers.Layer):
  """Scalar products with a vector that is the client's own."""

  def __init__(self, initializer: Any = 'random_normal', **options: Any):
    super().__init__(**options)
    self._initializer = initializer

  def build(self, input_shape: Any) -> None:
    self.vector = self.add_weight(
      'vector', [input_shape[-1]], initializer=self._initializer
    )

  def call(self, inputs: tf.Tensor) -> tf.Tensor:
    return tf.linalg.matvec(inputs, self.vector)


def build_factorization(user: Any = 'random_normal') -> tf.keras.Model:
  """Matrix factorization: an item's vector times the user's."""
  item = tf.keras.Input([], dtype=tf.int32)
  vectors = tf.keras.layers.Embedding(NUM_ITEMS, NUM_FACTORS, name='items')
  return tf.keras.Model(item, UserVector(user, name='user')(vectors(item)))


def constant_user(value: float) -> Callable[[], tf.keras.Model]:
  """A callable for a factorization whose users all begin alike."""
  return functools.partial(
    build_factorization, tf.keras.initializers.Constant(value)
  )


def build_slope() -> tf.keras.Model:
  """y = own * x + shared."""
  x = tf.keras.Input([1])
  slope = tf.keras.layers.Dense(
    1, use_bias=False, kernel_initializer='zeros', name='own'
  )(x)
  shared = layers.PrivateVector(1, name='shared')(x)
  return tf.keras.Model(x, slope + shared)


def build_tastes() -> tf.keras.Model:
  """Local weights of a shape of their own, behind a layer that draws."""
  item = tf.keras.Input([], dtype=tf.int32)
  vectors = tf.keras.layers.Embedding(NUM_ITEMS, NUM_FACTORS, name='items')
  noisy = tf.keras.layers.Dropout(0.1)(vectors(item))
  taste = tf.keras.layers.Dense(LOCAL_SIZE, use_bias=False, name='user')(noisy)
  return tf.keras.Model(item, tf.reduce_sum(taste, -1))


def brought(
  keras: Any, kind: str, dropout: float = 0.1, **options: Any
) -> models.PartialModel:
  """A model of tastes as people bring theirs.

  Args:
    kind: 'strings', found in a vocabulary; 'texts', of any number of words;
      'normalized', by moving averages; 'outputs', one of which is shared; or
      the name of a dtype policy, and with '' nothing is special.
  """
  layers = keras.layers
  is_open = kind == 'texts'

  def build() -> Any:
    item = given = keras.Input([], dtype=_TYPES.get(kind, 'int32'))
    words = [_word(item) for item in range(NUM_ITEMS)]
    if kind == 'strings':
      item = layers.StringLookup(vocabulary=words[1:], name='lookup')(item)
    if is_open:
      lookup = layers.TextVectorization(vocabulary=words[2:], name='lookup')
      item = lookup(item)
    vectors = layers.Embedding(
      NUM_ITEMS, NUM_FACTORS, mask_zero=is_open, name='items'
    )(item)
    if is_open:
      vectors = layers.GlobalAveragePooling1D()(vectors)
    if kind == 'normalized':
      vectors = layers.BatchNormalization(momentum=0.5, name='norm')(vectors)
    noisy = layers.Dropout(dropout)(vectors) if dropout else vectors
    taste = layers.Dense(LOCAL_SIZE, use_bias=False, name='user')(noisy)
    # Of vectors that are normalized, sums would be large.
    join = tf.reduce_mean if kind == 'normalized' else tf.reduce_sum
    total = layers.Lambda(lambda each: join(each, -1))(taste)
    if kind != 'outputs':
      return keras.Model(given, total)
    liked = layers.Dense(1, name='liked')(noisy)
    return keras.Model(given, {'rating': total, 'liked': liked})

  if kind == 'outputs':
    liked = keras.losses.BinaryCrossentropy(from_logits=True)
    options = {
      'loss': {'rating': 'mse', 'liked': liked},
      'loss_weights': {'liked': 0.1},
      'metrics': {'rating': ['mae']},
      **options,
    }
  policy = kind if kind.startswith('mixed') else 'float32'
  keras.mixed_precision.set_global_policy(policy)
  try:
    return factorization(build, **options)
  finally:
    keras.mixed_precision.set_global_policy('float32')


_TYPES = {'strings': 'string', 'texts': 'string'}


def _word(item: int) -> str:
  return f'w{item}'


def build_heads() -> tf.keras.Model:
  """FedEmbed's structure: a user's embedding, a head of a group, one of all."""
  item = tf.keras.Input([], dtype=tf.int32)
  vectors = tf.keras.layers.Embedding(NUM_ITEMS, NUM_FACTORS, name='items')
  noisy = tf.keras.layers.Dropout(0.1)(vectors(item))
  own = layers.PrivateVector(
    LOCAL_SIZE, initializer='random_normal', name='user'
  )(item)
  # No weight at the server has the size of what must not be there.
  taste = tf.reshape(tf.pad(own, [[0, 0], [0, 3]]), [-1, 4, NUM_FACTORS])
  joined = noisy * (1.0 + tf.reduce_sum(taste, 1))
  outputs = {
    name: tf.keras.layers.Dense(1, name=name)(joined)[:, 0]
    for name in ('head', 'global_head')
  }
  return tf.keras.Model(item, outputs)


def heads(build: Callable[[], Any] = build_heads) -> models.PartialModel:
  """That model, or one of its structure, for two groups."""
  return keras_models.from_keras(
    build,
    local='user',
    group='head',
    num_groups=2,
    loss=lambda labels, outputs: tf.square(labels - outputs['head']),
    labels=tf.TensorSpec([]),
  )


# Which parts its variables play, and that clients are of the group that the
# number of their first item says.
HEADS = assignments.FedEmbedVariables(
  embedding='user/own',
  global_head='global_head/.*',
  global_loss=lambda labels, outputs: tf.square(
    labels - outputs['global_head']
  ),
)
OF_FIRST_ITEM = assignments.Assignment(
  groups.by_attribute(lambda held: held['x'] % 2)
)


def factorization(
  build: Callable[[], tf.keras.Model] = build_factorization, **options: Any
) -> models.PartialModel:
  """One of the models above, with the user's part local."""
  return keras_models.from_keras(
    build,
    **{
      'local': 'user',
      'loss': tf.keras.losses.MeanSquaredError(),
      'metrics': lambda: [tf.keras.metrics.RootMeanSquaredError(name='rmse')],
      **options,
    },
  )


def rate(counts: Mapping[str, int], seed: int = 0) -> dict[str, Fields]:
  """Each client rates some items, as its taste and theirs are: a low rank."""
  generator = np.random.default_rng(seed)
  items = generator.normal(size=[NUM_ITEMS, 2])
  clients = {}
  for client, count in counts.items():
    taste = generator.normal(size=[2])
    seen = generator.integers(0, NUM_ITEMS, count)
    clients[client] = {
      'x': seen.astype(np.int32),
      'y': (items[seen] @ taste).astype(np.float32),
    }
  return clients


def client_seeds(client_ids: Sequence[str], *words: int | str) -> np.ndarray:
  return np.stack([random_bits.derive(*words, each) for each in client_ids])


def pack(
  clients: Mapping[str, Fields],
  spec: examples.ExampleSpec,
  capacities: Sequence[int] | None = None,
) -> populations.Population:
  """The clients, without what the spec has no field or input for.

  Where a model reads strings they are words, one for an item; clients of many
  items say some two or three times, if texts have an open length.
  """
  is_open = lengths.are_open(spec)

  def read(fields: Any, known: Any) -> Any:
    if not isinstance(fields, Mapping) or not isinstance(known, Mapping):
      return fields
    if spec.lifted and 'x' in fields:
      most = 3 if is_open and len(fields['x']) > 9 else 1
      said = [' '.join([_word(n)] * (1 + n % most)) for n in fields['x']]
      fields = {**fields, 'x': said}
    if isinstance(known.get('y'), Mapping):
      liked = (fields['y'] > 0).astype(np.float32)[:, np.newaxis]
      fields = {**fields, 'y': {'rating': fields['y'], 'liked': liked}}
    return {
      n: read(value, known[n]) for n, value in fields.items() if n in known
    }

  return packing.pack(
    {client: read(fields, spec) for client, fields in clients.items()},
    spec,
    capacities=capacities,
    lengths=[1, 3] if is_open else None,
  )


def cohort_of(
  process: Any,
  clients: Mapping[str, Fields],
  *words: int | str,
  capacities: Sequence[int] | None = None,
) -> cohorts.Cohort:
  """All the clients as one cohort; their seeds follow from the words."""
  population = pack(clients, process.example_spec, capacities)
  return population.cohort(list(clients), client_seeds(list(clients), *words))


def first_states(process: Any, cohort: cohorts.Cohort) -> list[Any]:
  """What clients remember that never took part."""
  if process.initialize_client.type_signature.result == tff.to_type(
    collections.OrderedDict()
  ):
    return [collections.OrderedDict()] * len(cohort)
  return [process.initialize_client(value['seed']) for value in cohort]


def run(
  process: processes.PartialProcess,
  cohort: cohorts.Cohort,
  state: Any = None,
  client_states: Sequence[Any] | None = None,
) -> processes.PartialProcessOutput:
  """One round of all clients, the first one by default."""
  if state is None:
    state = process.initialize()
  if client_states is None:
    client_states = first_states(process, cohort)
  return process.next(state, client_states, cohort)


def before_and_after(
  process: processes.PartialProcess,
  clients: Mapping[str, Fields],
  *words: int | str,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  """The global weights before and after a first round of all clients."""
  state = process.initialize()
  output = run(process, cohort_of(process, clients, *words), state)
  return global_weights(process, state), global_weights(process, output.state)


def evaluate(
  measuring: evaluation.Evaluation,
  weights: Any,
  clients: Mapping[str, Fields],
  runtime: Callable[[], Any] = RUNTIMES['no jit'],
  **options: Any,
) -> Any:
  """Measures all clients, which remember nothing yet, in a runtime."""
  cohort = cohort_of(measuring, clients, 1, **options)
  with runtime():
    return measuring.evaluate(weights, first_states(measuring, cohort), cohort)


def as_model_weights(named: Mapping[str, Any]) -> Any:
  """Global weights by name as an evaluation takes them."""
  return tff.learning.models.ModelWeights(
    collections.OrderedDict({tiers.GLOBAL: collections.OrderedDict(named)}),
    collections.OrderedDict(),
  )


def global_weights(
  process: processes.PartialProcess, state: Any
) -> dict[str, np.ndarray]:
  """The global weights by name."""
  return dict(process.get_model_weights(state).trainable[tiers.GLOBAL])


def train_metrics(output: processes.PartialProcessOutput) -> dict[str, Any]:
  return dict(output.metrics['client_work']['train'])


def assert_same(one: Any, other: Any) -> None:
  """Asserts that two structures are equal bit for bit."""
  tf.nest.map_structure(np.testing.assert_array_equal, one, other)


def assert_close(
  one: Any, other: Any, tolerance: float = 1e-6, relative: float = 0.0
) -> None:
  """Asserts that two structures differ by rounding."""
  compare = functools.partial(
    np.testing.assert_allclose, rtol=relative, atol=tolerance
  )
  tf.nest.map_structure(compare, one, other)


def assert_same_weights(
  process: processes.PartialProcess, one: Any, other: Any
) -> None:
  """Asserts that two states have the same global weights, bit for bit."""
  assert_same(global_weights(process, one), global_weights(process, other))


def drawn(
  sizes: Mapping[str, int], width: int = 2, seed: Any = 1, around: float = 0.0
) -> dict[str, Fields]:
  """Each client has inputs and labels that are drawn, so many examples."""
  random = np.random.default_rng(seed)
  return {
    client: {
      'x': random.normal(size=[size, width]).astype(np.float32),
      'y': random.normal(around, size=[size, 1]).astype(np.float32),
    }
    for client, size in sizes.items()
  }


def trained(
  process: processes.PartialProcess,
  clients: Mapping[str, Fields],
  rounds: Sequence[Sequence[str]],
  capacities: Sequence[int] | None = None,
) -> tuple[Any, dict[str, Any]]:
  """The server's state after some rounds, and what each client remembers.

  With capacities that all clients fit, rounds are traced once.
  """
  state, remembered = process.initialize(), {}
  for number, names in enumerate(rounds):
    cohort = cohort_of(
      process,
      {name: clients[name] for name in names},
      number,
      capacities=capacities,
    )
    first = first_states(process, cohort)
    kept = [
      remembered.get(name, new) for name, new in zip(names, first, strict=True)
    ]
    output = run(process, cohort, state, kept)
    state = output.state
    remembered.update(zip(names, output.client_states, strict=True))
  return state, remembered


def scaled_sum(factor: float) -> tff.Computation:
  """Return a computation: the sum of clients' numbers times a factor."""
  return summed(lambda value: factor * value, np.float32)
