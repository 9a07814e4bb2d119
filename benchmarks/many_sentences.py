"""Next words of up to ten million sentences: does memory stay bounded?

Writes JSON lines of invented authors, 100 sentences each, with Zipf-distributed
words and a rare word in a tenth of the sentences. Each file is read in its own
process, which learns a vocabulary of 1,000 words and reads the sentences of 32
authors, a cohort, 100 times. Reports peak anonymous memory beyond that of the
libraries; the page cache does not count.

  python -m benchmarks.many_sentences
"""

import argparse
from collections.abc import Callable
import json
import pathlib
import tempfile
import threading
import time
from typing import Any

import numpy as np

from benchmarks import measuring

SENTENCES_PER_AUTHOR, NUM_WORDS, RARE_WORDS = 100, 50_000, 1_000_000
MEAN_TOKENS, MAX_TOKENS = 11, 20
CLIENTS_PER_ROUND, ROUNDS = 32, 100
# Sentences that messages are drawn from, and messages written at once.
_DISTINCT, _AT_ONCE = 100_000, 50_000


def sentences(number: int, draw: np.random.Generator) -> list[str]:
  """Return sentences of words that are as frequent as Zipf says."""
  shares = 1.0 / np.arange(1, NUM_WORDS + 1)
  lengths = np.clip(draw.poisson(MEAN_TOKENS, number), 1, MAX_TOKENS)
  words = draw.choice(NUM_WORDS, lengths.sum(), p=shares / shares.sum())
  return [
    ' '.join(f'w{word}' for word in some)
    for some in np.split(words, np.cumsum(lengths)[:-1])
  ]


def write(path: pathlib.Path, number: int) -> None:
  """Write messages of one sentence each, in order of time."""
  draw = np.random.default_rng(0)
  distinct = sentences(_DISTINCT, draw)
  with path.open('w', encoding='utf-8') as file:
    for begin in range(0, number, _AT_ONCE):
      size = min(_AT_ONCE, number - begin)
      authors = draw.integers(max(number // SENTENCES_PER_AUTHOR, 1), size=size)
      texts = draw.integers(_DISTINCT, size=size)
      rare = draw.integers(10 * RARE_WORDS, size=size)
      file.writelines(
        f'{{"author": "a{author}", "time": {begin + place}, "text": '
        f'"{distinct[text]}{f" r{word}" if word < RARE_WORDS else ""}"}}\n'
        for place, (author, text, word) in enumerate(
          zip(authors.tolist(), texts.tolist(), rare.tolist(), strict=True)
        )
      )


class _OwnMemory:
  """Peak anonymous memory of this process, sampled by a thread."""

  def __init__(self) -> None:
    self.most = self._now()
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._watch, daemon=True)
    self._thread.start()

  def end(self) -> int:
    """Stop sampling and return the peak in bytes."""
    self._ended.set()
    self._thread.join()
    return self.most

  def _watch(self) -> None:
    while not self._ended.wait(0.02):
      self.most = max(self.most, self._now())

  @staticmethod
  def _now() -> int:
    for line in pathlib.Path('/proc/self/status').read_text().splitlines():
      if line.startswith('RssAnon'):
        return 1024 * int(line.split()[1])
    raise measuring.BenchmarkError('The system does not tell RssAnon.')


def _watched(work: Callable[[], Any]) -> tuple[Any, float, int]:
  """Run `work` and return its result, its seconds and its peak memory."""
  memory = _OwnMemory()
  started = time.perf_counter()
  done = work()
  return done, time.perf_counter() - started, memory.end()


def read(path: str) -> dict[str, float]:
  """Read a file and some cohorts of its authors in this process."""
  from tasks import task as tasks
  from tasks.next_word import task as next_word

  options = next_word.NextWordOptions(corpus=path)
  # Memory that libraries take at first use is not the corpus's.
  next_word.NextWordOptions().load(tasks.Data(data='synthetic'), seed=0)
  before = _OwnMemory().end()
  task, loading, most_loading = _watched(
    lambda: options.load(tasks.Data(), seed=0)
  )
  spec = task.model_with(tasks.NOBODY).example_spec
  clients = task.clients(tasks.TRAIN, spec)
  draw = np.random.default_rng(0)
  seeds = np.zeros([CLIENTS_PER_ROUND, 2], np.int32)

  def rounds() -> int:
    found = 0
    for _ in range(ROUNDS):
      some = draw.choice(len(clients.client_ids), CLIENTS_PER_ROUND, False)
      ids = [clients.client_ids[place] for place in some]
      found += sum(int(value['count']) for value in clients.cohort(ids, seeds))
    return found

  number, reading, most_reading = _watched(rounds)
  return {
    'sentences': len(task.sentences),
    'words': len(task.words.words),
    'loading_seconds': loading,
    'loading_bytes': most_loading - before,
    'cohort_seconds': reading / ROUNDS,
    'cohort_bytes': most_reading - before,
    'sentences_per_cohort': number / ROUNDS,
  }


def main() -> None:
  """Read the arguments and measure all files, or read one."""
  parser = measuring.parser(__doc__)
  add = parser.add_argument
  add(
    '--sentences',
    type=int,
    nargs='+',
    default=[100_000, 1_000_000, 10_000_000],
    help='sizes of the corpora',
  )
  add('--file', help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.file:
    measuring.say(json.dumps(read(options.file)))
    return
  measuring.begin('Many sentences')
  with tempfile.TemporaryDirectory() as folder:
    for number in options.sentences:
      path = pathlib.Path(folder) / 'messages.jsonl'
      write(path, number)
      size = path.stat().st_size
      _, line = measuring.new_process(
        '-m', 'benchmarks.many_sentences', f'--file={path}'
      )
      found = json.loads(line)
      held = found['loading_bytes']
      measuring.say(
        f'{number:,} sentences, {measuring.in_mib(size)} of JSON lines:\n'
        f'  read in {measuring.in_seconds(found["loading_seconds"])} '
        f'({number / found["loading_seconds"]:,.0f} sentences a second), '
        f'{found["sentences"]:,} are used\n'
        f'  memory: {measuring.in_mib(held)} more than before at most '
        f'({held / number:.0f} bytes a sentence)\n'
        f'  a cohort of {CLIENTS_PER_ROUND} authors, '
        f'{found["sentences_per_cohort"]:,.0f} sentences: '
        f'{measuring.in_seconds(found["cohort_seconds"])}; memory: '
        f'{measuring.in_mib(found["cohort_bytes"])} more than before'
      )


if __name__ == '__main__':
  main()
