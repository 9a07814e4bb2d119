"""Metrics of next-word prediction, beside loops over tokens.

The vocabulary has three words, and there are two buckets for all others:

  padding 0, words 1 2 3, buckets 4 5, beginning 6, end 7.
"""

import math

import numpy as np
import pytest
import tensorflow as tf

from tasks.next_word import metrics
from tasks.next_word.tokens import Tokens
from tff_partial.model import keras_metrics

_TOKENS = Tokens(words=3, buckets=2)
_TOP = 3
# Sentences without their beginning: what is to be predicted.
_LABELS = np.array(
  [
    [1, 2, 7, 0, 0],
    [3, 4, 3, 5, 7],
    [5, 4, 7, 0, 0],  # Nothing that is known.
    [0, 0, 0, 0, 0],
    [2, 1, 1, 2, 3],  # Cut off before its end.
  ],
  np.int32,
)
_WEIGHTS = np.array([1.0, 0.5, 2.0, 1.0, 0.0], np.float32)
_NAMES = (
  *('accuracy', 'accuracy_in_vocabulary', 'accuracy_top_3'),
  *('perplexity', 'num_tokens'),
)


def _logits(seed: int = 0) -> np.ndarray:
  generator = np.random.default_rng(seed)
  return generator.normal(size=[*_LABELS.shape, _TOKENS.total]).astype('f')


def _by_hand(labels, logits, weights) -> dict[str, float]:
  """The metrics, by a loop over tokens."""
  right = dict.fromkeys(_NAMES[:3], 0.0)
  words = entropy = targets = 0.0
  tokens = 0
  for sentence, scores, weight in zip(labels, logits, weights, strict=True):
    for label, score in zip(sentence, scores, strict=True):
      if label == 0:
        continue
      tokens += weight > 0
      if label in (1, 2, 3):
        words += weight
        place = label - 1
        of_words = score[1:4]
        best = np.argsort(-of_words, kind='stable')
        right['accuracy'] += weight * (score.argmax() == label)
        right['accuracy_in_vocabulary'] += weight * (best[0] == place)
        right['accuracy_top_3'] += weight * (place in best[:_TOP])
      targets += weight
      entropy += weight * (math.log(np.exp(score).sum()) - score[label])
  found = {name: value / words for name, value in right.items()}
  found['perplexity'] = math.exp(entropy / targets)
  return {**found, 'num_tokens': tokens}


def _measured(labels, logits, weights=None, tokens=_TOKENS) -> dict[str, float]:
  found = {}
  for metric in metrics.build_metrics(tokens):
    metric.update_state(labels, logits, sample_weight=weights)
    found[metric.name] = metric.result().numpy()
  return found


# ---- values ------------------------------------------------------------------


def test_metrics_are_those_of_a_loop_over_tokens():
  logits = _logits()
  expected = _by_hand(_LABELS, logits, _WEIGHTS)
  assert expected['num_tokens'] == 3 + 5 + 3
  found = _measured(_LABELS, logits, _WEIGHTS)
  assert tuple(found) == _NAMES
  assert found == pytest.approx(expected, rel=1e-5)


def test_batches_add_up():
  logits = _logits()
  pure = keras_metrics.PureMetrics(
    lambda: metrics.build_metrics(_TOKENS),
    tf.TensorSpec([5], tf.int32),
    tf.TensorSpec([5, _TOKENS.total]),
    tf.TensorSpec([]),
  )
  state = pure.initial_state()
  for rows in (slice(0, 2), slice(2, 5)):
    batch = _LABELS[rows], logits[rows], _WEIGHTS[rows]
    state = pure.update(state, *map(tf.constant, batch))
  expected = _by_hand(_LABELS, logits, _WEIGHTS)
  for name, finalize in pure.finalizers().items():
    found = finalize(state[name]).numpy()
    assert found == pytest.approx(expected[name], rel=1e-5)
  assert state['num_tokens'][0].dtype == tf.int64


def test_tokens_can_have_weights_of_their_own():
  scores = np.zeros([1, 2, 8], np.float32)
  scores[0, :, 2] = 1.0  # Always says 2.
  labels = np.array([[2, 3]], np.int32)
  found = _measured(labels, scores, np.array([[3.0, 1.0]], 'f'))
  assert found['accuracy'] == 0.75


def test_answers_outside_of_the_vocabulary_are_wrong_in_one_accuracy_only():
  scores = np.zeros([1, 4, 8], np.float32)
  scores[..., 2] = 1.0  # The likeliest word is 2, but at first comes
  for place, other in enumerate([4, 5, 7, 0]):
    scores[0, place, other] = 9.0  # a bucket, the end, or padding.
  found = _measured(np.full([1, 4], 2, np.int32), scores)
  assert found['accuracy'] == 0.0
  assert found['accuracy_in_vocabulary'] == 1.0


def test_the_three_likeliest_of_more_words():
  tokens = Tokens(words=6, buckets=1)
  scores = np.zeros([1, 6, tokens.total], np.float32)
  scores[..., 1:7] = [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
  scores[..., tokens.end] = 9.0
  labels = np.arange(1, 7, dtype=np.int32)[None]  # Each word once.
  found = _measured(labels, scores, tokens=tokens)
  assert found['accuracy_top_3'] == 3 / 6
  assert found['accuracy_in_vocabulary'] == pytest.approx(1 / 6)


def test_guessing_has_as_much_perplexity_as_there_are_classes():
  found = _measured(_LABELS, np.zeros([5, 5, 8], np.float32))
  assert found['perplexity'] == pytest.approx(8, rel=1e-5)


def test_ties_count_against_the_right_class():
  scores = tf.constant([[[1.0, 2.0, 2.0, 0.0, 3.0]] * 5])
  found = metrics.rank(scores, tf.range(5)[None])
  # Two classes are as likely, and one is likelier.
  assert found.numpy().tolist() == [[3, 2, 2, 4, 0]]


def test_what_is_no_number_is_never_right():
  scores = np.full([1, 1, 8], np.nan, np.float32)
  found = _measured(np.array([[1]], np.int32), scores)
  assert found['accuracy'] == found['accuracy_in_vocabulary'] == 0.0


@pytest.mark.parametrize('labels', [[0, 0], [4, 5]])
def test_of_no_target_all_is_undefined(labels):
  labels = np.array([labels], np.int32)
  found = _measured(labels, _logits()[:1, :2])
  assert found.pop('num_tokens') == (labels != 0).sum()
  assert (found.pop('perplexity') > 0) == labels.any()
  assert np.isnan(list(found.values())).all()
  # Nor is there a number at a client that has no examples at all.
  *means, count = metrics.build_metrics(_TOKENS)
  assert np.isnan([metric.result() for metric in means]).all()
  assert count.result() == 0


def test_metrics_can_be_given_as_a_list_of_which_copies_are_made():
  for metric in metrics.build_metrics(_TOKENS):
    again = type(metric).from_config(metric.get_config())
    assert again.get_config() == metric.get_config()
    assert again.name == metric.name
