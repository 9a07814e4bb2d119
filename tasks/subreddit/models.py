"""The document model of the FURL paper's Figure 1, in three forms.

A text is read by an embedding of its characters and a bidirectional LSTM; its
representation is concatenated with a user's vector, and an MLP makes the
prediction. The user's vector is local (`OWN`), a row of a table of all users
(`TABLE`), or left out (`NOBODY`).

Deviations from the paper, which prints no sizes: the LSTM's outputs are pooled
by their maximum and their mean, which learn faster than the last output alone.
Five options are off by default. Characters can be embedded with those before
them (hashed n-grams), and the LSTM can read the maximum of several positions as
one, which makes texts shorter. The mean of the embeddings can be added to the
LSTM's representation, as in a linear classifier of n-grams. A share of the
documents can be trained on without their users' vectors: where the author
predicts nearly all, texts are hardly used otherwise. And a user's vector can
drift: to a constant one is added an interpolation between control points over
the user's history (as biases do in Koren, Collaborative Filtering with Temporal
Dynamics, KDD 2009).
"""

from typing import Any

import tensorflow as tf

from tasks.errors import OptionError
from tasks.subreddit.layers import Drift
from tasks.subreddit.layers import FusedLSTM
from tasks.subreddit.layers import MeanOfPlaces
from tasks.subreddit.layers import NGrams
from tasks.subreddit.layers import SometimesUnknown
from tasks.subreddit.options import DocumentSizes
from tasks.task import NOBODY
from tasks.task import OWN
from tff_partial import layers as our_layers

# Local weights of a user, for `from_keras`: with a learned default the
# difference from it, otherwise the whole vector.
LOCAL_WEIGHTS = 'user_embedding/own'
# Weights of all users, in a table at the server.
TABLE_WEIGHTS = 'user_embedding/embeddings'

# Input names; a model has the first, or several.
TEXT, USER, WHEN = 'text', 'user', 'when'


def build_document_model(
  vocabulary_size: int,
  max_chars: int,
  num_outputs: int | None,
  sizes: DocumentSizes,
  *,
  user: str = NOBODY,
  num_users: int | None = None,
) -> tf.keras.Model:
  """Build a model from texts to logits.

  Args:
    vocabulary_size: Number of characters; 0 pads.
    max_chars: Length of a text. The input is `[batch, max_chars]` of the dtype
      `text_type(vocabulary_size)`.
    num_outputs: Number of classes, for logits `[batch, classes]`; None for one
      logit, `[batch]`.
    sizes: The sizes of the layers.
    user: OWN, TABLE or NOBODY, the form of the user's vector. With `TABLE` the
      input is a mapping of `TEXT` and `USER`, int32 `[batch]`; with control
      points it also has `WHEN`, float32 `[batch]`, from 0 for the beginning of
      the user's known history to 1 for its end.
    num_users: Number of users, for `TABLE`.

  Raises:
    OptionError: If the text is not a whole number of steps.
  """
  if max_chars % sizes.places_per_step:
    raise OptionError(
      f'--set=places_per_step={sizes.places_per_step}: texts of {max_chars} '
      'characters are no whole number of such steps. Choose a divisor.'
    )
  layers = tf.keras.layers
  text = layers.Input([max_chars], dtype=text_type(vocabulary_size), name=TEXT)
  inputs = {TEXT: text}
  said = _read(text, vocabulary_size, sizes)
  if sizes.dropout:
    said = layers.Dropout(sizes.dropout, name='text_dropout')(said)
  if user != NOBODY:
    num_vectors = 1 + sizes.control_points
    if user == OWN:
      vector = our_layers.PrivateVector(
        num_vectors * sizes.user_embedding,
        learned_default=sizes.learned_default,
        name='user_embedding',
      )(said)
    else:
      inputs[USER] = layers.Input([], dtype=tf.int32, name=USER)
      vector = layers.Embedding(
        num_users, num_vectors * sizes.user_embedding, name='user_embedding'
      )(inputs[USER])
    if sizes.control_points:
      inputs[WHEN] = layers.Input([], name=WHEN)
      vector = Drift(num_vectors, name='drift')([vector, inputs[WHEN]])
    if sizes.unknown_users:
      vector = SometimesUnknown(sizes.unknown_users, name='unknown_users')(
        vector
      )
    said = layers.Concatenate(name='text_and_user')([said, vector])
  for number, units in enumerate(sizes.mlp_units):
    said = layers.Dense(units, 'relu', name=f'mlp_{number}')(said)
  logits = layers.Dense(num_outputs or 1, name='logits')(said)
  if num_outputs is None:
    logits = layers.Reshape((), name='without_axis')(logits)
  return tf.keras.Model(
    inputs if len(inputs) > 1 else text, logits, name='document_model'
  )


def text_type(vocabulary_size: int) -> tf.DType:
  """Return the smallest dtype that holds the characters."""
  return tf.uint8 if vocabulary_size <= 256 else tf.int32


def _read(text: Any, vocabulary_size: int, sizes: DocumentSizes) -> Any:
  """Build the representation of a text from characters and LSTM."""
  layers = tf.keras.layers
  size = sizes.char_embedding
  embed = layers.Embedding(vocabulary_size, size, name='char_embedding')
  places = [embed(text)]
  for length in sizes.ngram_lengths:
    ngrams = NGrams(length, sizes.ngram_buckets, name=f'ngrams_{length}')(text)
    embed = layers.Embedding(
      sizes.ngram_buckets, size, name=f'ngram_embedding_{length}'
    )
    places.append(embed(ngrams))
  said = places[0]
  if len(places) > 1:
    said = layers.Concatenate(name='embeddings')(places)
  if sizes.place_dropout:
    said = layers.Dropout(
      sizes.place_dropout,
      noise_shape=(None, text.shape[1], 1),
      name='place_dropout',
    )(said)
  steps = said
  if sizes.places_per_step > 1:
    steps = layers.MaxPooling1D(sizes.places_per_step, name='steps')(said)
  heard = layers.Concatenate(name='both_directions')(
    [
      FusedLSTM(sizes.lstm_units, name='lstm_forward')(steps),
      FusedLSTM(sizes.lstm_units, go_backwards=True, name='lstm_backward')(
        steps
      ),
    ]
  )
  representation = [
    layers.GlobalMaxPooling1D(name='maximum')(heard),
    layers.GlobalAveragePooling1D(name='mean')(heard),
  ]
  if sizes.mean_of_places:
    representation.append(MeanOfPlaces(name='mean_of_places')([said, text]))
  return layers.Concatenate(name='text_representation')(representation)
