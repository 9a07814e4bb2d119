"""Documents by many authors, from files or records.

Two data sets of section 4.1 of the FURL paper: `subreddit` has comments from
Reddit's dumps; the class is the subreddit. `sticker` has a user's own messages
with a label of 0 or 1, like the paper's unpublished Sticker data: whether a
suggestion was clicked on. Authors are clients, and each author's documents are
divided (`parts`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
import dataclasses
import itertools
import math
import os
from typing import Any

from absl import logging
import numpy as np
import pandas as pd

from tasks.errors import DataError
from tasks.files import json_lines
from tff_partial import random_bits

REMEDY_NO_DATA = (
  'Put files of JSON lines there, one {record} a line, name another folder '
  'with --data_dir or $TFF_PARTIAL_DATA_DIR, or use invented data with '
  '--data=synthetic, which needs no files.'
)

# Placeholders for deleted authors and texts in Reddit's dumps.
_GONE = frozenset(('[deleted]', '[removed]'))

_COMMENT = (
  json_lines.Field(('author',), json_lines.identifier),
  json_lines.Field(('subreddit',), json_lines.identifier),
  json_lines.Field(('created_utc', 'time'), json_lines.seconds, 0),
  json_lines.Field(('body',), json_lines.text),
)
_MESSAGE = (
  json_lines.Field(('user',), json_lines.identifier),
  json_lines.Field(('label',), json_lines.binary),
  json_lines.Field(('time',), json_lines.seconds, 0),
  json_lines.Field(('text',), json_lines.text),
)
# By name of the data set: fields, file patterns besides the usual ones, what a
# record is called, and the labels if they are given.
_SOURCES: dict[str, tuple[Any, Sequence[str], str, Sequence[Any] | None]] = {
  'subreddit': (_COMMENT, ('RC_*',), 'comment', None),
  'sticker': (_MESSAGE, (), 'message', (0, 1)),
}

# An author, a label, a time and a text.
_Record = tuple[str, Any, int, str]


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
  """Short texts, each with an author, a time and a label.

  The arrays have one row a document, `[documents]`. Rows are sorted by author,
  then time; documents of one author and second keep the order of the files.

  Attributes:
    name: The data set.
    authors: The authors' names, sorted.
    labels: The classes' names, the most common first; for a label of 0 or 1 the
      names '0' and '1'.
    author: int32, the position in `authors`.
    label: int32, the position in `labels`.
    time: int64, seconds since 1970.
    texts: The texts, cut to the maximum length.
    left_out: Number of documents left out, by reason.
  """

  name: str
  authors: tuple[str, ...]
  labels: tuple[str, ...]
  author: np.ndarray
  label: np.ndarray
  time: np.ndarray
  texts: np.ndarray
  left_out: dict[str, int]

  def __len__(self) -> int:
    return len(self.author)

  @property
  def has_several_labels(self) -> np.ndarray:
    """True for authors with documents of several classes, `[authors]`."""
    return (label_counts(self, np.ones(len(self), bool)) > 0).sum(axis=1) > 1

  def describe(self) -> dict[str, Any]:
    """Count documents, authors and classes, and what was left out."""
    return {
      'documents': len(self),
      'authors': len(self.authors),
      'mixed_authors': int(self.has_several_labels.sum()),
      'labels': len(self.labels),
      'left_out': dict(self.left_out),
    }


def load(
  name: str,
  folder: str | os.PathLike[str],
  *,
  num_labels: int = 256,
  min_documents: int = 1,
  max_documents: int | None = None,
  max_chars: int = 280,
) -> Documents:
  """Read a data set from files of JSON lines, in two passes.

  A dump may be large: the first pass counts, the second one keeps the documents
  to be used. Documents with a deleted author or text, and empty ones, are left
  out first. Of the rest those of the most common classes are kept, and of these
  those of authors with neither too few nor too many.

  Args:
    name: `subreddit` or `sticker`.
    folder: Holds files `*.jsonl` or `*.ndjson`, perhaps compressed (`.gz`,
      `.bz2`, `.xz`, `.zst`), or a folder of that name that does; those of
      comments may be called `RC_*`, too. A line of comments has the fields
      author, subreddit, body, and created_utc or time; one of messages user,
      text, label and time.
    num_labels: Number of subreddits to keep; of equally large ones the first by
      name. Labels of 0 and 1 are both kept.
    min_documents: Authors with fewer are left out.
    max_documents: Authors with more are left out; None for no limit.
    max_chars: Texts are cut to this length.

  Raises:
    DataError: If there are no files, one is damaged, or nothing is left.
  """
  fields, patterns, record, labels = _SOURCES[name]
  remedy = REMEDY_NO_DATA.format(record=record)
  files = json_lines.find(folder, name, patterns, remedy)
  return _gather(
    name,
    lambda: itertools.chain.from_iterable(
      json_lines.read(path, fields) for path in files
    ),
    labels=labels,
    num_labels=num_labels,
    min_documents=min_documents,
    max_documents=max_documents,
    max_chars=max_chars,
  )


def from_records(
  name: str, records: Sequence[_Record], labels: Sequence[Any] | None = None
) -> Documents:
  """Make documents of records in memory, without leaving any out."""
  return _gather(name, lambda: records, labels=labels)


def label_counts(documents: Documents, rows: np.ndarray) -> np.ndarray:
  """Count each author's documents by class.

  Args:
    documents: All documents.
    rows: The documents to count: their positions, or bool `[documents]`.

  Returns:
    int64 `[authors, labels]`.
  """
  shape = (len(documents.authors), len(documents.labels))
  cells = documents.author[rows] * shape[1] + documents.label[rows]
  return np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)


def generator(seed: int, *words: int | str) -> np.random.Generator:
  """Return a generator for a seed and a purpose."""
  return random_bits.generator('documents', seed, *words)


def _why_left_out(author: str, text: str) -> str | None:
  """Return the reason to leave a document out, or None."""
  if author in _GONE:
    return 'author_deleted'
  if text in _GONE:
    return 'text_deleted'
  if not text or text.isspace():
    return 'text_empty'
  return None


def _gather(
  name: str,
  read: Callable[[], Iterable[_Record]],
  *,
  labels: Sequence[Any] | None = None,
  num_labels: int | None = None,
  min_documents: int = 1,
  max_documents: int | None = None,
  max_chars: int | None = None,
) -> Documents:
  """Count the records, then keep those to be used.

  Args:
    name: Name of the data set.
    read: Starts reading; called twice.
    labels: The classes in order; None for those that occur, by size.
    num_labels: Maximum number of classes to keep.
    min_documents: Authors with fewer documents of these classes are left out.
    max_documents: Authors with more are left out.
    max_chars: Texts are cut to this length.
  """
  counts: Counter[tuple[str, Any]] = Counter()
  left_out: Counter[str] = Counter()
  for author, label, _, text in read():
    reason = _why_left_out(author, text)
    if reason is None:
      counts[author, label] += 1
    else:
      left_out[reason] += 1
  by = pd.DataFrame(list(counts), columns=['author', 'label'])
  by['count'] = list(counts.values())
  if labels is None:
    sizes = by.groupby('label')['count'].sum()
    # Of equally large classes the first by name.
    labels = sizes.sort_values(ascending=False, kind='stable').index.tolist()
    labels = labels[:num_labels]
  of_author = by[by['label'].isin(labels)].groupby('author')['count'].sum()
  is_small = of_author < min_documents
  is_large = of_author > (max_documents or math.inf)
  authors = tuple(of_author.index[~is_small & ~is_large])
  left_out['label_not_kept'] = int(by['count'].sum() - of_author.sum())
  left_out['author_too_small'] = int(of_author[is_small].sum())
  left_out['author_too_large'] = int(of_author[is_large].sum())
  left_out = +left_out
  if not authors:
    raise DataError(
      f'{name}: no author has at least {min_documents} documents'
      + (f' and at most {max_documents}' if max_documents else '')
      + f' that can be used. Left out were {dict(left_out)}. Allow authors '
      'with other numbers of documents, or give more data.'
    )
  for reason, number in left_out.items():
    logging.info('%s: %d documents left out: %s.', name, number, reason)

  label_codes = {label: code for code, label in enumerate(labels)}
  author_codes = {author: code for code, author in enumerate(authors)}
  rows: list[tuple[int, int, int]] = []
  texts: list[str] = []
  for author, label, time, text in read():
    if (
      author in author_codes
      and label in label_codes
      and _why_left_out(author, text) is None
    ):
      rows.append((author_codes[author], label_codes[label], time))
      texts.append(text[:max_chars])
  whose, classes, times = np.array(rows, np.int64).T
  order = np.lexsort((times, whose))  # Stable.
  return Documents(
    name=name,
    authors=authors,
    labels=tuple(map(str, labels)),
    author=whose[order].astype(np.int32),
    label=classes[order].astype(np.int32),
    time=times[order],
    texts=np.array(texts, object)[order],
    left_out=dict(left_out),
  )
