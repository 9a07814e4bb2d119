"""Checks that measured clients and exports are encoded as in training."""

from collections.abc import Mapping
import functools
from typing import Any

from absl import logging

from tff_partial.data.vocabularies import Vocabulary
from tff_partial.data.vocabularies import VocabularyError


def check_alike(trained: Any, measured: Any) -> None:
  """Refuse measured clients whose values have other ids or places in vectors.

  Clients without vocabularies, such as packed arrays, bring a warning.
  """
  known = getattr(trained, 'vocabularies', {})
  found = getattr(measured, 'vocabularies', {})
  check_encoding(known, found)
  others = getattr(measured, 'columns', {})
  for field, columns in getattr(trained, 'columns', {}).items():
    order = others.get(field, columns)
    if order != columns and set(order) == set(columns):
      raise VocabularyError(
        f'{field}: clients that are measured join the columns {order}, those '
        f'that train {columns}. Name them in the order of training.'
      )
  if known and not found:
    _warn_of_missing(tuple(known))


@functools.cache  # Once for the same columns.
def _warn_of_missing(columns: tuple[Any, ...]) -> None:
  logging.warning(
    'Clients that are measured have no vocabularies, those that train encode '
    '%s: ids are taken as they are. Encode data frames by those of training: '
    '`from_pandas(..., encode=clients.vocabularies)`.',
    list(columns),
  )


def check_encoding(
  known: Mapping[Any, Vocabulary], given: Mapping[Any, Vocabulary]
) -> None:
  """Refuse vocabularies of columns that give values other ids than known ones.

  Columns may have other names in the two.
  """
  # In the file of a run, a column of number 1 is '1'.
  found = {str(column): vocabulary for column, vocabulary in given.items()}
  new = [v for v in found.values() if v not in known.values()]
  for column, vocabulary in known.items():
    other = found.get(str(column), new[0] if new else vocabulary)
    if other != vocabulary:
      raise VocabularyError(
        f'Column {column!r}: clients that are measured or served have a '
        f'{other!r}, those that train a {vocabulary!r}, so that one id stands '
        'for two values. Encode by that of training: '
        '`from_pandas(..., encode=clients.vocabularies)`.'
      )
