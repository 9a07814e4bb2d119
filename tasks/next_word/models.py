"""Next-word models, section 5.1.2 of the FedRecon paper.

A sentence is read token by token, by an LSTM with a projection as in the paper
(and in Reddi et al., Adaptive Federated Optimization), or by a small
transformer. Words and special tokens have their vectors in one table; buckets
of words outside the vocabulary have theirs in another, the layer
`BUCKET_LAYER`, so that either can be local. With local buckets the weights that
predict buckets are global, as with the authors: only the input vectors of
buckets are local.

Deviations from the paper: the default sizes are small, for two cores; the
paper's are 96, 670 and 96 (appendix C.2). The recurrence does not skip padding,
which follows all tokens that count. The transformer is ours.
"""

import tensorflow as tf

from tasks.next_word import transformer
from tasks.next_word.layers import LoopedLSTM
from tasks.next_word.layers import OneOfTwo
from tasks.next_word.layers import TokenRows
from tasks.next_word.options import LSTM as LSTM
from tasks.next_word.options import NextWordSizes
from tasks.next_word.options import TRANSFORMER as TRANSFORMER
from tasks.next_word.tokens import Tokens
from tasks.task import FEATURES
from tasks.task import LOGITS

# Layer of the vectors of words outside the vocabulary, for `from_keras`; local
# in FedRecon.
BUCKET_LAYER = 'bucket_embedding'


def build_next_word_model(
  tokens: Tokens,
  length: int,
  sizes: NextWordSizes = NextWordSizes(),
  *,
  features: bool = False,
) -> tf.keras.Model:
  """Build a model from sentences to logits for each next token.

  Args:
    tokens: The sizes that determine all ids.
    length: Number of tokens to read, int32 `[batch, length]`.
    sizes: Architecture and sizes of the model.
    features: True to also return the input of the output layer; adds no
      variable.

  Returns:
    A functional model, to a logit of each id, float32 `[batch, length, ids]`;
    or to a mapping of these LOGITS and of FEATURES, float32
    `[batch, length, size]`.
  """
  layers = tf.keras.layers
  sentence = layers.Input([length], dtype=tf.int32, name='sentence')
  rows, bucket_rows, is_bucket = TokenRows(*tokens, name='rows')(sentence)
  words, buckets = (
    layers.Embedding(number, sizes.embedding, name=name)(places)
    for places, number, name in (
      (rows, tokens.words + 3, 'word_embedding'),
      (bucket_rows, tokens.buckets, BUCKET_LAYER),
    )
  )
  vectors = OneOfTwo(name='embedding')([words, buckets, is_bucket])
  if sizes.architecture == LSTM:
    said = LoopedLSTM(sizes.lstm_units, name='lstm')(vectors)
    said = layers.Dense(sizes.projection, name='projection')(said)
  else:
    said = transformer.read(vectors)
  logits = layers.Dense(tokens.total, name='logits')(said)
  outputs = {LOGITS: logits, FEATURES: said} if features else logits
  return tf.keras.Model(sentence, outputs, name='next_word')
