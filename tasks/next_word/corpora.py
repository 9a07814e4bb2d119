"""Named corpora of the task, and custom ones."""

from collections.abc import Iterator, Sequence
import os
import pathlib

from tasks.errors import DataError
from tasks.errors import OptionError
from tasks.files import json_lines
from tasks.next_word import federated_files
from tasks.next_word import sentences
from tasks.next_word import tokenising

LEAN_CHAT, SUBREDDIT = 'lean_chat', 'subreddit'
STACKOVERFLOW, SHAKESPEARE = 'stackoverflow', 'shakespeare'
NAMES = (LEAN_CHAT, SUBREDDIT, STACKOVERFLOW, SHAKESPEARE)

# Named corpora in JSON lines, with file patterns besides `*.jsonl`.
_JSON_LINES = {LEAN_CHAT: (), SUBREDDIT: ('RC_*',)}
_FEDERATED = {
  STACKOVERFLOW: (federated_files.STACKOVERFLOW, tokenising.SPACED),
  SHAKESPEARE: (federated_files.SHAKESPEARE, tokenising.CHARACTERS),
}
_FIELDS = (
  json_lines.Field(('author', 'user'), json_lines.identifier),
  json_lines.Field(('time', 'created_utc'), json_lines.seconds, 0),
  json_lines.Field(('text', 'body'), json_lines.text),
)
# Placeholders for deleted authors and texts in Reddit's dumps.
_GONE = frozenset(('[deleted]', '[removed]'))
_REMEDY = (
  'Put files of JSON lines there, one message a line with the fields author '
  '(or user), time (or created_utc) and text (or body), name another folder '
  'with --data_dir or $TFF_PARTIAL_DATA_DIR, or use invented data with '
  '--data=synthetic, which needs no files.'
)


def load(
  corpus: str,
  data_dir: str | os.PathLike[str] | None,
  limits: sentences.Limits,
  *,
  download: bool = False,
) -> sentences.Sentences:
  """Read a corpus, mostly kept on disk (see `sentences`).

  Args:
    corpus: One of `NAMES`, or the path of a file of JSON lines, compressed or
      not, or of a folder with such files.
    data_dir: For a named corpus: the folder with its files, or the parent of a
      folder of that name.
    limits: Limits on what is read.
    download: True to have TFF fetch one of its data sets if it is missing.

  Raises:
    OptionError: If there is no such corpus, or it cannot be fetched.
    DataError: If files are missing or damaged, or no author is left.
  """
  if corpus in NAMES and not data_dir:
    raise DataError(f'{corpus}: no data folder is named. {_REMEDY}')
  if download and corpus not in _FEDERATED:
    raise OptionError(
      f'--download: nothing is fetched for the corpus {corpus}, only for '
      f'{" and ".join(_FEDERATED)}. Leave it out.'
    )
  if corpus in _FEDERATED:
    data_set, rule = _FEDERATED[corpus]
    messages = federated_files.read(
      data_set, data_dir or '', limits, download=download
    )
    return sentences.gather(corpus, messages, rule, limits)
  if corpus in _JSON_LINES:
    files = json_lines.find(
      data_dir or '', corpus, _JSON_LINES[corpus], _REMEDY
    )
    name = corpus
  else:
    files = _own_files(corpus)
    name = pathlib.Path(corpus).name
  return sentences.gather(name, _messages(files), tokenising.CHAT, limits)


def _own_files(corpus: str) -> list[pathlib.Path]:
  path = pathlib.Path(os.path.expanduser(corpus))
  if path.is_file():
    return [path]
  if path.is_dir():
    return json_lines.find(path, 'messages', (), _REMEDY)
  raise OptionError(
    f'--data_set={corpus}: is none of {", ".join(NAMES)}, nor a file or folder.'
  )


def _messages(files: Sequence[pathlib.Path]) -> Iterator[sentences.Message]:
  for path in files:
    for author, time, text in json_lines.read(path, _FIELDS):
      if author not in _GONE and text not in _GONE:
        yield sentences.Message(author, time, text)
