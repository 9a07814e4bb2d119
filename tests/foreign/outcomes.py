"""What became of foreign tests, and which failures are known and why."""

from collections.abc import Iterable, Mapping
import fnmatch
import pathlib
from typing import NamedTuple
from xml.etree import ElementTree

# A file that could not be run at all fails as one test of this name.
WHOLE_FILE = '*whole file*'


class Known(NamedTuple):
  """A failure that is allowed, of names `FILE::TEST` as in a shell, and why."""

  pattern: str
  reason: str


class Verdict(NamedTuple):
  """What a run says.

  Attributes:
    failed: The names of tests that fail and should not, with what they say.
    allowed: Those that fail for a known reason, with the reason.
    unused: Allowances for files that were run, of which no test failed.
  """

  failed: Mapping[str, str]
  allowed: Mapping[str, str]
  unused: list[Known]


def read_allowed(text: str) -> list[Known]:
  """Reads the allow-list: a pattern, two spaces or more, and a reason a line.

  Empty lines and those that begin with # say nothing.

  Raises:
    ValueError: If a pattern has no reason.
  """
  known = []
  for number, line in enumerate(text.splitlines(), start=1):
    if not line.strip() or line.startswith('#'):
      continue
    pattern, _, reason = line.partition('  ')
    if not reason.strip():
      raise ValueError(
        f'Line {number} allows {pattern!r} to fail and does not say why; '
        'write the reason behind two spaces.'
      )
    known.append(Known(pattern.strip(), reason.strip()))
  return known


def read_results(xml: str) -> dict[str, str | None]:
  """Reads what absl writes of a file's tests.

  Returns:
    From each test to what it says if it fails, else None.
  """
  results: dict[str, str | None] = {}
  for suite in ElementTree.fromstring(xml).iter('testsuite'):
    for case in suite.iter('testcase'):
      problem = case.find('failure')
      if problem is None:
        problem = case.find('error')
      name = f'{suite.get("name")}.{case.get("name")}'
      results[name] = None if problem is None else problem.get('message') or ''
  return results


def judge(
  results: Mapping[str, Mapping[str, str | None]], known: Iterable[Known]
) -> Verdict:
  """Compares what failed with what may."""
  failed, allowed, used = {}, {}, set()
  known = list(known)
  for file, tests in results.items():
    for test, problem in tests.items():
      if problem is None:
        continue
      name = f'{file}::{test}'
      matching = [k for k in known if fnmatch.fnmatchcase(name, k.pattern)]
      used.update(matching)
      if matching:
        allowed[name] = matching[0].reason
      else:
        failed[name] = problem
  unused = [
    one
    for one in known
    if one not in used
    and any(
      fnmatch.fnmatchcase(file, one.pattern.partition('::')[0])
      for file in results
    )
  ]
  return Verdict(failed, allowed, unused)


def results_of(
  path: pathlib.Path, status: int | None, said: str
) -> dict[str, str | None]:
  """What became of a file; a status of None says that it took too long."""
  if status is None:
    return {WHOLE_FILE: 'it took too long'}
  if path.is_file():
    return read_results(path.read_text(encoding='utf-8'))
  if not status:
    return {}
  lines = [line for line in said.splitlines() if line.strip()]
  return {WHOLE_FILE: lines[-1] if lines else f'it ended with status {status}'}
