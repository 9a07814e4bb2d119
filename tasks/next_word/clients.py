"""Users as clients, with their sentences as examples."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tasks.errors import OptionError
from tasks.next_word.parts import Part
from tasks.next_word.sentences import Sentences
from tasks.next_word.words import Words
import tff_partial
from tff_partial.data import client_readers
from tff_partial.data import examples
from tff_partial.data import populations

# Field that marks examples held back from a client's training, and the field of
# times.
IS_QUERY, TIME = 'is_query', 'time'

# Larger parts are not packed: packing takes some 550 bytes a sentence.
_MOST_PACKED = 2_000_000


class Authors:
  """All users of a corpus, by part.

  A user's examples are its sentences in order of time: `x` are token ids, `y`
  those of the next tokens, both int32 `[max_tokens]`.
  """

  def __init__(
    self, sentences: Sentences, words: Words, parts: Mapping[str, Part]
  ):
    self._sentences, self._words, self._parts = sentences, words, parts

  def clients(
    self, part: str, example_spec: examples.ExampleSpec
  ) -> populations.Population | client_readers.Reader:
    """Pack the users of a part, or read them on demand if it is large.

    Args:
      part: One of the parts.
      example_spec: Fields of an example: x and y, perhaps the field `time`, and
        the mark `is_query`: 1 for the newer sentences. With the mark, users
        also have the sentences that they trained on.
    """
    if part not in self._parts:
      raise OptionError(f'part: {part!r} is none of {", ".join(self._parts)}.')
    held = self._parts[part]
    places = {
      self._sentences.authors[user]: place
      for place, user in enumerate(held.users)
    }
    number = sum(int(np.diff(rows).sum()) for rows in (held.older, held.newer))
    if number <= _MOST_PACKED:
      return tff_partial.pack(
        {
          name: self._fields(held, place, example_spec)
          for name, place in places.items()
        },
        example_spec,
      )
    return client_readers.Reader(
      list(places),
      lambda name: self._fields(held, places[name], example_spec),
      example_spec,
    )

  def _fields(
    self, part: Part, place: int, example_spec: examples.ExampleSpec
  ) -> dict[str, Any]:
    """Return the fields of one user's examples that the spec asks for."""
    ranges = [(part.older[place], 0), (part.newer[place], 1)]
    if part.knows_past and IS_QUERY not in example_spec:
      del ranges[0]
    rows = np.concatenate(
      [
        self._words.encode(
          *self._sentences.between(*bounds), self._sentences.max_tokens
        )
        for bounds, _ in ranges
      ]
    )
    fields = {'x': rows[:, :-1], 'y': rows[:, 1:]}
    if TIME in example_spec:
      times = [self._sentences.time[slice(*bounds)] for bounds, _ in ranges]
      fields[TIME] = np.concatenate(times)
    if IS_QUERY in example_spec:
      marks = [np.full(np.diff(bounds), mark) for bounds, mark in ranges]
      fields[IS_QUERY] = np.concatenate(marks).astype(np.int32)
    return fields
