"""`BUILD` finds the modules that exist, each once."""

import collections
from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Target(dict):
  """The arguments of one call of a rule, and the rule's name."""

  def __init__(self, rule: str, arguments: Mapping[str, Any]):
    super().__init__(arguments)
    self.rule = rule


def found(include: list[str], exclude: Sequence[str] = ()) -> list[str]:
  """What Bazel's `glob` finds."""
  return sorted(existing(*include) - existing(*exclude))


def existing(*patterns: str) -> set[str]:
  paths = (path for pattern in patterns for path in ROOT.glob(pattern))
  return {str(path.relative_to(ROOT)) for path in paths if path.is_file()}


def read_targets(text: str) -> list[Target]:
  """The targets of a BUILD file, which Python can execute, in its order."""
  targets: list[Target] = []

  def rule(name: str):
    return lambda **arguments: targets.append(Target(name, arguments))

  names: dict[str, Any] = {'__builtins__': {}}
  for name in ('filegroup', 'py_binary', 'py_library', 'py_test'):
    names[name] = rule(name)
  for name in ('licenses', 'load', 'package'):
    names[name] = lambda *_, **__: []
  names['glob'] = found
  names['len'] = len
  exec(compile(text, 'BUILD', 'exec'), names)
  return targets


PACKAGES = ('baselines', 'tff_partial', 'tff_partial_programs')
TARGETS = read_targets((ROOT / 'BUILD').read_text(encoding='utf-8'))


def listed_sources() -> collections.Counter[str]:
  return collections.Counter(
    source
    for target in TARGETS
    if target.rule in ('py_binary', 'py_library')
    for source in target['srcs']
  )


def test_every_module_is_in_one_target():
  modules = existing(*(f'{p}/**/*.py' for p in PACKAGES))
  modules |= existing('tasks/**/*.py')
  listed = listed_sources()
  missing = sorted(modules - set(listed))
  assert not missing, f'BUILD: add to the srcs of a target: {missing}'
  twice = sorted(source for source, times in listed.items() if times > 1)
  assert not twice, f'BUILD: in the srcs of several targets: {twice}'


def test_every_test_has_a_target():
  mains = [t['args'] for t in TARGETS if t.rule == 'py_test']
  tests = [f'$(rootpath {test})' for test in existing('tests/**/*_test.py')]
  missing = sorted(test for test in tests if [test] not in mains)
  assert not missing, f'BUILD: add a py_test for: {missing}'
  # Names of targets are different, and those of tests follow from the file.


def test_no_target_names_a_missing_file():
  for target in TARGETS:
    for source in [*target['srcs'], *filter(None, [target.get('main')])]:
      assert (ROOT / source).is_file(), (
        f'BUILD: {target["name"]} names {source}, which does not exist.'
      )


def test_tests_run_the_file_they_are_named_after():
  for target in TARGETS:
    if target.rule == 'py_test':
      (file,) = (s for s in target['srcs'] if s.endswith('_test.py'))
      stem = file[len('tests/') : -len('.py')]
      assert target['name'] == stem.replace('/', '_')
      assert target['args'] == [f'$(rootpath {file})']


def test_dependencies_are_targets_of_the_file():
  names = [target['name'] for target in TARGETS]
  assert len(names) == len(set(names))
  for target in TARGETS:
    for label in [*target.get('deps', ()), *target.get('data', ())]:
      if label.startswith(':'):
        assert label[1:] in names, f'{target["name"]} needs {label}'


def test_programs_are_binaries():
  for path in sorted((ROOT / 'tasks').glob('*.py')):
    if "__name__ == '__main__'" in path.read_text(encoding='utf-8'):
      (target,) = (t for t in TARGETS if t['name'] == path.stem)
      assert target.rule == 'py_binary', path.stem
      assert target['srcs'] == [f'tasks/{path.name}'] == [target['main']]
