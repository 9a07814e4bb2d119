"""A cache of the user's own n-grams, mixed into a model of the next token.

Cache models go back to Kuhn and De Mori, "A cache-based natural language model
for speech recognition" (1990); Grave et al., "Improving neural language models
with a continuous cache" (ICLR 2017), mix one with a neural model. Here the
cache consists of counts in each client's support examples: c(y) is the number
of times that token y followed the same preceding tokens, and n = sum_y c(y).

    p(y) = share c(y) / n + (1 - share) p_model(y),
    share = mixing n / (n + smoothing).

Up to `num_tokens` preceding tokens are compared. If the client never wrote them
in this order, the cache backs off to one fewer; if it never wrote even the last
one, only the model predicts.

Deviations: the cache has the client's past sentences and not the last words of
the current one, it has n-grams with back-off where Kuhn and De Mori's has
single words, and its share grows with the counts.
"""

import math

import tensorflow as tf

from baselines import memories
from tff_partial import evaluation
from tff_partial.data import splits
from tff_partial.errors import SettingError
from tff_partial.model import models
from tff_partial.phases import Phase

# Padding before the first token of an example.
_NOTHING = -1


def build_ngram_cache_eval(
  model: models.PartialModel,
  *,
  logits: str | None = None,
  targets: memories.TargetsFn = memories.classes_from_zero,
  num_tokens: int = 2,
  mixing: float = 0.5,
  smoothing: float = 1.0,
  personalise: Phase | None = None,
  tune: Phase | None = None,
  split: splits.Split | None = None,
  measure_batch_size: int = 100,
) -> evaluation.Evaluation:
  """Build an evaluation with the model and a cache of clients' n-grams.

  Clients without support examples are measured with the model alone.

  Args:
    model: A model from tokens, integers `[batch, time]` from 0 on, to logits of
      each next token, `[batch, time, classes]`.
    logits: The name of the logits among the model's outputs; None if they are
      its only output.
    targets: (labels `[batch, time]`) -> correct classes, integers, and the mask
      of valid ones, which excludes padding. By default labels are classes, and
      negative ones do not count.
    num_tokens: Maximum number of preceding tokens that are compared.
    mixing: lambda, the cache's share for large counts, from 0 to less than 1.
    smoothing: The count at which the cache has half of this share.
    personalise, tune, split, measure_batch_size: As for
      `memories.memory_evaluation`.

  Example:
    >>> evaluation = baselines.build_ngram_cache_eval(tokens, num_tokens=2)

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
    SettingError: If a number is invalid, or the model does not read
      tokens.
  """
  memories.check_mixing(mixing)
  if num_tokens < 1:
    raise SettingError(
      f'num_tokens={num_tokens}: a cache compares at least 1 of the tokens '
      'before.'
    )
  if not 0.0 <= smoothing < math.inf:
    raise SettingError(
      f'smoothing={smoothing}: give a finite number of 0 or more.'
    )
  read = model.example_spec['x']
  if not isinstance(read, tf.TensorSpec) or not (
    read.dtype.is_integer and read.shape.rank == 1
  ):
    raise SettingError(
      f'The model reads {read} of an example, which is no sequence of tokens. '
      'A cache of n-grams is for models of the next token.'
    )

  def recall(asked: tf.Tensor, memory: memories.Memory) -> memories.Votes:
    votes = _votes(asked, memory)
    number = tf.reduce_sum(votes, -1)
    share = mixing * tf.math.divide_no_nan(number, number + smoothing)
    return memories.Votes(votes, share)

  return memories.memory_evaluation(
    model,
    keys=lambda x, _: _last_tokens(x, num_tokens),
    recall=recall,
    logits=logits,
    targets=targets,
    personalise=personalise,
    tune=tune,
    split=split,
    measure_batch_size=measure_batch_size,
  )


def _last_tokens(tokens: tf.Tensor, number: int) -> tf.Tensor:
  """Return tokens with those before, last first: `[batch, time, number]`."""
  padded = tf.pad(tokens, [[0, 0], [number - 1, 0]], constant_values=_NOTHING)
  ends = [place or None for place in range(0, -number, -1)]
  columns = [
    padded[:, number - 1 - place : end] for place, end in enumerate(ends)
  ]
  return tf.stack(columns, -1)


def _votes(asked: tf.Tensor, memory: memories.Memory) -> tf.Tensor:
  """Return 1 for keys with the longest match of last tokens, else 0.

  From integers `[questions, tokens]`, the last first, to `[questions, keys]`.
  """
  are_same = memory.is_key[tf.newaxis]
  votes = tf.zeros([1, 1])
  for place in range(asked.shape[1]):
    token = asked[:, place, tf.newaxis]
    same = tf.equal(token, memory.keys[tf.newaxis, :, place])
    are_same = are_same & same & tf.not_equal(token, _NOTHING)
    is_known = tf.reduce_any(are_same, -1, keepdims=True)
    votes = tf.where(is_known, tf.cast(are_same, tf.float32), votes)
  return votes
