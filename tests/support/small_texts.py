"""The texts that sentences are made of."""

import numpy as np

from tasks.next_word import sentences as sentences_lib


def texts_of(sentences: sentences_lib.Sentences, user: int) -> list[str]:
  """Return the sentences of one author, with spaces between the tokens."""
  bounds = sentences.bounds[user], sentences.bounds[user + 1]
  tokens, lengths = sentences.between(*bounds)
  words = sentences.lexicon.words_of(tokens)
  ends = np.cumsum(lengths)
  return [
    ' '.join(words[start:end])
    for start, end in zip(ends - lengths, ends, strict=True)
  ]
