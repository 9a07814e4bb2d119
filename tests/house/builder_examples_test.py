"""The example in each builder's docstring runs as printed.

With something else in the place of a phase it ends in a message instead.
"""

import collections
import doctest
import inspect
import re
from typing import Any

import pytest
import tensorflow as tf

import baselines
from tests.support import planted
import tff_partial
from tff_partial import algorithms
from tff_partial import assignments
from tff_partial import layers
from tff_partial.algorithms import hpfl
from tff_partial.dp import clipping
from tff_partial.dp import privacy_plans
from tff_partial.dp.local_noise import LaplaceNoise
from tff_partial.phases import Phase
from tff_partial.phases import PhaseError

_BUILDERS = dict.fromkeys(  # Some have several names.
  getattr(package, name)
  for package in (algorithms, baselines)
  for name in sorted(package.__all__)
)
# They read the model before their phases.
_SLOW = (
  *('build_hpfl', 'build_fed_dbe', 'build_fed_proto'),
  *('build_fed_proto_nearest_eval', 'build_knn_per_eval'),
  'build_ngram_cache_eval',
)
_PHASES = [
  pytest.param(
    *(build, name),
    id=f'{build.__name__}-{name}',
    marks=[pytest.mark.slow] if build.__name__ in _SLOW else [],
  )
  for build in _BUILDERS
  for name, parameter in inspect.signature(build).parameters.items()
  if parameter.annotation in (Phase, Phase | None)
]


def _classifier() -> tf.keras.Model:
  pixels = tf.keras.Input([4])
  features = tf.keras.layers.Dense(3, 'relu', name='features')(pixels)
  return tf.keras.Model(
    pixels, tf.keras.layers.Dense(2, name='logits')(features)
  )


def _tokens() -> tf.keras.Model:
  tokens = tf.keras.Input([5], dtype=tf.int32)
  vectors = tf.keras.layers.Embedding(7, 3)(tokens)
  return tf.keras.Model(
    tokens, tf.keras.layers.Dense(7, name='logits')(vectors)
  )


def _named() -> tf.keras.Model:
  model = _classifier()
  features = model.get_layer('features').output
  return tf.keras.Model(
    model.input, {'features': features, 'logits': model.output}
  )


def _shifted() -> tf.keras.Model:
  model = _classifier()
  features = model.get_layer('features').output
  own = layers.PrivateVector(3, initializer='zeros', name='own')(features)
  logits = model.get_layer('logits')(features + own)
  return tf.keras.Model(model.input, {'features': features, 'logits': logits})


def _of_logits(labels: Any, outputs: Any) -> tf.Tensor:
  return tf.nn.sparse_softmax_cross_entropy_with_logits(
    labels, outputs['logits']
  )


def _centers() -> tf.keras.Model:
  pixels = tf.keras.Input([4])
  features = tf.keras.layers.Dense(3, name='encoder')(pixels)
  features = layers.Centers(2, 19, name='prototypes')(features)
  return tf.keras.Model(
    pixels,
    {
      name: tf.keras.layers.Dense(1, name=name)(features)
      for name in ('head', 'global_head')
    },
  )


def _additive() -> tf.keras.Model:
  item = tf.keras.Input((), dtype=tf.int32)
  tables = [
    tf.keras.layers.Embedding(planted.NUM_ITEMS, 2, name=name)(item)
    for name in ('item', 'user_item')
  ]
  user = tf.keras.layers.Dense(1, use_bias=False, name='user')
  return tf.keras.Model(item, user(tables[0] + tables[1])[:, 0])


def _square(name: str) -> Any:
  return lambda labels, outputs: tf.square(labels - outputs[name][:, 0])


_LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


# The names that examples use, but for those of models.
_KNOWN: dict[str, Any] = {
  'LaplaceNoise': LaplaceNoise,
  'Phase': Phase,
  'algorithms': algorithms,
  'assignment': planted.OF_FIRST_ITEM,
  'attributes': hpfl.Attributes(
    planted.NUM_ITEMS,
    lambda items: tf.one_hot(items, planted.NUM_ITEMS),
    ['items/embeddings'],
    lambda labels, predictions: tf.abs(labels - predictions) < 0.5,
  ),
  'baselines': baselines,
  'of_centers': assignments.FedEmbedVariables(
    embedding='',
    global_head='global_head/.*',
    global_loss=_square('global_head'),
    prototypes='prototypes/vectors',
  ),
  'parts': planted.HEADS,
  'sgd': tff_partial.sgd,
  'templates': tff_partial.templates,
  'tff_partial': tff_partial,
}


@pytest.fixture(scope='module')
def known() -> dict[str, Any]:
  """The names that examples use."""
  return {
    **_KNOWN,
    'additive': tff_partial.from_keras(_additive, local='user.*', loss='mse'),
    'centers': tff_partial.from_keras(
      _centers,
      loss=_square('head'),
      labels=tf.TensorSpec([], tf.float32),
      group='^head',
      num_groups=2,
    ),
    'clusters': tff_partial.from_keras(
      _classifier, loss=_LOSS, group='.*', num_groups=2
    ),
    'factors': planted.factorization(),
    'heads': planted.heads(),
    'model': tff_partial.from_keras(_classifier, local='logits', loss=_LOSS),
    'named': tff_partial.from_keras(
      _named, loss=_of_logits, labels=tf.TensorSpec([], tf.int32)
    ),
    'plan': privacy_plans.plan(
      clipping.FixedClip(1.0),
      noise_multiplier=1.0,
      delta=1e-5,
      population=100,
      clients_per_round=100,
      rounds=3,
    ),
    'shifted': tff_partial.from_keras(
      _shifted, loss=_of_logits, labels=tf.TensorSpec([], tf.int32), local='own'
    ),
    'tokens': tff_partial.from_keras(_tokens, loss=_LOSS),
    'whole': tff_partial.from_keras(_classifier, loss=_LOSS),
  }


@pytest.mark.slow
@pytest.mark.parametrize('build', _BUILDERS, ids=lambda build: build.__name__)
def test_the_example_of_a_builder_runs(build, known):
  text = inspect.getdoc(build) or ''
  example = doctest.DocTestParser().get_doctest(
    text, dict(known), build.__name__, None, 0
  )
  assert example.examples, f'{build.__name__} has no example.'
  told: list[str] = []
  result = doctest.DocTestRunner(verbose=False).run(example, out=told.append)
  assert not result.failed, ''.join(told)


@pytest.mark.parametrize(
  ('given', 'found'),
  [
    (tff_partial.sgd(0.1), r'the optimizer SGD.*0\.1\) alone'),
    (tf.keras.optimizers.Adam(), 'Adam'),
  ],
  ids=['TFF', 'Keras'],
)
@pytest.mark.parametrize(('build', 'argument'), _PHASES)
def test_an_optimizer_is_no_phase(build, argument, given, found, request):
  is_slow = build.__name__ in _SLOW
  known = request.getfixturevalue('known') if is_slow else _KNOWN
  example, *_ = doctest.DocTestParser().get_examples(inspect.getdoc(build))

  def wrong(*arguments: Any, **options: Any) -> Any:
    return build(*arguments, **{**options, argument: given})

  source = re.sub(r'\w+\.build_\w+', 'wrong', example.source, count=1)
  known = collections.defaultdict(lambda: None, {**known, 'wrong': wrong})
  with pytest.raises(PhaseError, match=rf'found {found}. Pass `Phase\(opt'):
    exec(source, {}, known)
