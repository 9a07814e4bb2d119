"""A new algorithm is three files: its own, and a row in each of two tables."""

import pathlib
import shutil

import pytest

from tests.support.commands import python
from tests.support.commands import ROOT

FOLDERS = ('baselines', 'tasks', 'tests', 'tff_partial', 'tff_partial_programs')
_BUILDER = '''"""Half steps: FedAvg whose server moves half as far."""

import dataclasses

from tff_partial.composition import Aggregation
from tff_partial.composition import compose
from tff_partial.model import models
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training
from tff_partial.tiers import GLOBAL


def build_half_steps(
  model: models.PartialModel,
  *,
  training: Phase = Phase(),
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
) -> PartialProcess:
  """Build FedAvg with a server that moves half as far."""
  return compose(
    model,
    work=[dataclasses.replace(training, train=(GLOBAL,), measured=True)],
    aggregation=aggregation,
    server_optimizer=server_optimizer or sgd(0.5),
  )


build_half_steps_eval = partial_training.build_evaluation
'''
_ROW = """
  Row('half_steps', _TRAINED),"""
_ENTRY = """
  'half_steps': building.Algorithm(
    building.trained_by('build_half_steps', training=_GLOBAL),
    _FOR_ALL,
  ),"""


def _insert(path: pathlib.Path, after: str, text: str) -> None:
  old = path.read_text('utf-8')
  assert old.count(after) == 1, after
  path.write_text(old.replace(after, after + text), 'utf-8')


def _changed(one: pathlib.Path, other: pathlib.Path) -> set[str]:
  """Paths of the files in which `other` differs from `one`."""
  before, after = (
    {
      str(path.relative_to(folder)): path.read_bytes()
      for name in FOLDERS
      for path in (folder / name).rglob('*')
      if path.is_file() and '__pycache__' not in path.parts
    }
    for folder in (one, other)
  )
  return {name for name, _ in before.items() ^ after.items()}


@pytest.fixture(name='project', scope='module')
def fixture_project(tmp_path_factory) -> pathlib.Path:
  """A copy of the project with one more algorithm."""
  folder = tmp_path_factory.mktemp('project')
  for name in FOLDERS:
    shutil.copytree(
      ROOT / name, folder / name, ignore=shutil.ignore_patterns('__pycache__')
    )
  shutil.copy(ROOT / 'pyproject.toml', folder)
  (folder / 'baselines' / 'half_steps.py').write_text(_BUILDER, 'utf-8')
  _insert(folder / 'tests/laws/laws_test.py', '\nROWS = [', _ROW)
  registry = folder / 'tasks/experiment/methods/algorithms.py'
  _insert(registry, '\nALGORITHMS: dict[str, building.Algorithm] = {', _ENTRY)
  return folder


def _run(project: pathlib.Path, *command: str) -> str:
  done = python(*command, cwd=project)
  assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
  return done.stdout


def test_three_files_are_touched(project):
  assert _changed(ROOT, project) == {
    'baselines/half_steps.py',
    'tasks/experiment/methods/algorithms.py',
    'tests/laws/laws_test.py',
  }


@pytest.mark.slow
def test_a_program_trains_it(project):
  printed = _run(
    project,
    *('-m', 'tasks.train', '--recipe=demo', '--algorithm=half_steps'),
    *('--rounds=1', f'--output_dir={project}/output'),
  )
  assert printed
  assert (project / 'output' / 'metrics.csv').exists()


@pytest.mark.slow
def test_the_laws_hold_for_it(project):
  printed = _run(
    project,
    *('-m', 'pytest', '-q', 'tests/laws/laws_test.py'),
    *('-k', 'half_steps and learn or every_algorithm_has_a_row'),
  )
  assert '2 passed' in printed


@pytest.mark.slow
def test_the_pages_list_it(project):
  page = (ROOT / 'docs' / 'reference' / 'baselines.md').read_text('utf-8')
  # It shows what the package names, by Sphinx's rule for `__all__`.
  assert (
    '.. automodule:: baselines\n   :members:\n   :imported-members:' in page
  )
  printed = _run(
    project, '-c', 'import baselines; print(*baselines.__all__, sep="\\n")'
  )
  assert {'build_half_steps', 'build_half_steps_eval'} <= set(printed.split())
