"""The wheel installs anywhere, and the lock is complete."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

from packaging import requirements
import pytest

import tff_partial_programs

ROOT = pathlib.Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / 'requirements'
ENVIRONMENT = ROOT / 'tff_partial' / '_environment'


def run(*command: str | pathlib.Path, **options) -> subprocess.CompletedProcess:
  return subprocess.run(
    [str(part) for part in command], capture_output=True, text=True, **options
  )


def run_checked(*command: str | pathlib.Path, **options) -> str:
  done = run(*command, **options)
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


def outside() -> dict[str, str]:
  """The environment variables, without those that lead back to the checkout."""
  own = {name for name in os.environ if not name.startswith('PYTHON')}
  return {name: os.environ[name] for name in own}


@pytest.fixture(scope='module')
def wheel(tmp_path_factory) -> pathlib.Path:
  """The wheel, built from a copy: a build leaves files among its sources."""
  sources = tmp_path_factory.mktemp('sources')
  for name in ('LICENSE', 'README.md', 'pyproject.toml', 'setup.py'):
    shutil.copy(ROOT / name, sources)
  # Each of these folders could pass for a package.
  compiled = shutil.ignore_patterns('__pycache__')
  for name in (
    *('baselines', 'benchmarks', 'tasks', 'tests'),
    *('tff_partial', 'tff_partial_programs'),
  ):
    if (ROOT / name).is_dir():
      shutil.copytree(ROOT / name, sources / name, ignore=compiled)
  wheels = tmp_path_factory.mktemp('wheels')
  run_checked(
    *(sys.executable, '-m', 'pip', 'wheel', '--no-deps'),
    *('--no-build-isolation', '--wheel-dir', wheels, sources),
  )
  (path,) = wheels.glob('*.whl')
  return path


@pytest.fixture(scope='module')
def bare_python(wheel, tmp_path_factory) -> pathlib.Path:
  """An interpreter with the wheel, and nothing that it requires."""
  environment = tmp_path_factory.mktemp('bare')
  run_checked(sys.executable, '-m', 'venv', '--without-pip', environment)
  python = environment / 'bin' / 'python'
  run_checked(
    *(sys.executable, '-m', 'pip', '--python', python),
    *('install', '--no-index', '--no-deps', wheel),
  )
  return python


@pytest.mark.slow
def test_wheel_holds_the_library_and_its_programs(wheel):
  with zipfile.ZipFile(wheel) as archive:
    names = set(archive.namelist())
  modules = {name for name in names if not name.split('/')[0].endswith('-info')}
  expected = {
    str(path.relative_to(ROOT))
    for folder in ('tff_partial', 'tff_partial_programs')
    for path in (ROOT / folder).rglob('*.py')
  }
  # These names are too common to be taken from anybody.
  expected |= {
    f'tff_partial_programs/{path.relative_to(ROOT)}'
    for folder, pattern in (
      ('baselines', '**/*.py'),
      ('tasks', '**/*.py'),
      ('tasks/recipes', '*.flags'),
    )
    for path in (ROOT / folder).glob(pattern)
  }
  # Tells type checkers that the library has types.
  assert modules == {*expected, 'tff_partial/py.typed'}
  assert any(name.endswith('/licenses/LICENSE') for name in names)


def version() -> str:
  """The version, of which nothing needs to be imported."""
  text = (ROOT / 'tff_partial' / '__init__.py').read_text('utf-8')
  return re.search(r"^__version__ = '(.*)'$", text, re.MULTILINE)[1]


def test_wheel_says_what_it_requires(wheel):
  with zipfile.ZipFile(wheel) as archive:
    (name,) = (n for n in archive.namelist() if n.endswith('/METADATA'))
    metadata = archive.read(name).decode()
  assert wheel.name == f'tff_partial-{version()}-py3-none-any.whl'
  assert 'License: Apache-2.0' in metadata
  assert 'Requires-Python: <3.14,>=3.11' in metadata
  needs = [
    requirements.Requirement(line)
    for line in re.findall(r'^Requires-Dist: (.*)$', metadata, re.MULTILINE)
  ]
  assert 'tensorflow-federated==0.87.0' in map(str, needs)
  asked_for = {need.name: need.specifier for need in needs}
  # Those that `make dist` makes, and what they were tried with.
  for name, tried in (
    ('tensorflow-federated', '0.87.0+relaxed'),
    ('tensorflow-privacy', '0.9.0+relaxed'),
    ('dp-accounting', '0.4.3+relaxed'),
    ('tensorflow', '2.21.0'),
    ('numpy', '2.5.0'),
  ):
    assert tried in asked_for[name]
  for python, (lock, *_, of_ray) in LOCKS.items():
    locked = locked_versions(lock) | locked_versions(of_ray)
    for need in needs:  # All of them are locked, as they are asked for.
      assert locked[need.name] in need.specifier, (python, need)


@pytest.mark.slow
def test_import_without_tff_says_what_to_type(bare_python, tmp_path):
  code = 'import tff_partial'
  done = run(bare_python, '-c', code, cwd=tmp_path, env=outside())
  assert done.returncode == 1
  assert 'which is not installed here' in done.stderr
  reason = 'jaxlib==0.4.14' if PYTHON == '3.11' else 'it finds 0.1.0'
  assert reason in done.stderr
  assert 'make env' in done.stderr
  options = '--ignore-requires-python ' if PYTHON != '3.11' else ''
  assert (
    f'pip install --no-deps --require-hashes {options}'
    f'-r requirements/{LOCKS[PYTHON][0]}' in done.stderr
  )


def test_the_commands_in_the_message_are_those_of_the_lock():
  message = (ENVIRONMENT / 'require_tff.py').read_text('utf-8')
  for override in required('overrides.txt', '3.11'):
    if override.name != 'numpy':  # As TFF asks for it.
      assert f'{override.name}{override.specifier}' in message
  direct = {need.name: need for need in required('base.in', '3.11')}
  for name in ('tensorflow-federated', 'setuptools'):
    assert f'{name}{direct[name].specifier}' in message


def import_beside(fake_tff: str, bare_python, folder: pathlib.Path):
  """Runs the library's check beside a stand-in for TFF."""
  (folder / 'tensorflow_federated.py').write_text(fake_tff)
  package = folder / 'tff_partial' / '_environment'
  package.mkdir(parents=True)
  (package.parent / '__init__.py').touch()
  for name in ('__init__.py', 'require_tff.py', 'newer_tensorflow.py'):
    shutil.copy(ENVIRONMENT / name, package)
  code = 'import tff_partial._environment.require_tff'
  command = (bare_python, '-W', 'default', '-c', code)
  return run(*command, cwd=folder, env=outside())


@pytest.mark.slow
def test_broken_tff_is_told_from_missing_tff(bare_python, tmp_path):
  done = import_beside('import no_such_module', bare_python, tmp_path)
  assert done.returncode == 1
  assert (
    'installed here but cannot be imported '
    "(No module named 'no_such_module')" in done.stderr
  )
  assert 'make env' in done.stderr


def test_warning_about_pkg_resources_is_not_shown(bare_python, tmp_path):
  fake = """
import warnings
warnings.warn('pkg_resources is deprecated as an API. See elsewhere.')
warnings.warn('Something else.')
"""
  done = import_beside(fake, bare_python, tmp_path)
  assert done.returncode == 0
  assert 'pkg_resources' not in done.stderr.replace(fake, '')
  assert 'Something else.' in done.stderr


# ---- the command -------------------------------------------------------------


def _command(python: pathlib.Path, *arguments: str, **options):
  command = (python.parent / 'tff-partial', *arguments)
  return run(*command, **{'env': outside(), **options})


@pytest.mark.parametrize('arguments', [(), ('--help',)])
def test_the_command_names_the_programs(bare_python, tmp_path, arguments):
  """Without TensorFlow, and so at once: there is none in this environment."""
  done = _command(bare_python, *arguments, cwd=tmp_path)
  assert (done.returncode, done.stderr) == (0, '')
  named = re.findall(r'^  (\w+)  +[A-Z].*[.,;]?', done.stdout, re.MULTILINE)
  assert tuple(named) == tff_partial_programs.PROGRAMS
  assert 'tff-partial train --recipe=demo' in done.stdout


def test_a_recipe_of_the_wheel_is_found_by_its_name(bare_python, tmp_path):
  # It includes another one, and no folder is the checkout's.
  code = (
    'from tff_partial_programs import recipes; '
    "print(*recipes.expand(['--recipe=emnist_ditto', '--seed=1']))"
  )
  done = run(bare_python, '-c', code, cwd=tmp_path, env=outside())
  assert done.stderr == ''
  flags = done.stdout.split()
  assert '--algorithm=ditto' in flags and '--task=emnist' in flags
  assert flags[-1] == '--seed=1'


def test_the_command_knows_all_programs():
  with_main = {
    path.stem
    for path in (ROOT / 'tasks').glob('*.py')
    if "__name__ == '__main__'" in path.read_text('utf-8')
  }
  assert set(tff_partial_programs.PROGRAMS) == with_main


def test_a_misspelt_program_is_refused(bare_python, tmp_path):
  done = _command(bare_python, 'trian', cwd=tmp_path)
  assert done.returncode == 1
  assert "no program 'trian'. Did you mean train?" in done.stderr


def test_a_program_without_tff_says_what_to_type(bare_python, tmp_path):
  done = _command(bare_python, 'train', cwd=tmp_path)
  assert done.returncode == 1
  assert 'which is not installed here' in done.stderr


@pytest.mark.slow
def test_the_command_runs_a_program_of_the_wheel(bare_python, tmp_path):
  # With the packages of this environment, and without this project.
  (tmp_path / 'tasks').mkdir()  # Somebody else's.
  (tmp_path / 'tasks' / '__init__.py').touch()
  environment = outside()
  del environment['TF_CPP_MIN_LOG_LEVEL']  # As a user has it.
  environment['PYTHONPATH'] = os.pathsep.join(
    path for path in sys.path if path.endswith('site-packages')
  )
  done = _command(bare_python, 'report', cwd=tmp_path, env=environment)
  assert done.stderr == 'error: --sweep_dir: name a folder of runs.\n'
  assert (done.returncode, done.stdout) == (1, '')


# ---- the lock ----------------------------------------------------------------


def parse_requirements(name: str) -> list[requirements.Requirement]:
  """The requirements of a file, without hashes and comments."""
  text = (REQUIREMENTS / name).read_text('utf-8').replace('\\\n', ' ')
  lines = (re.sub(r'(^|\s)#.*|--hash=\S+', '', x) for x in text.splitlines())
  return [requirements.Requirement(line) for line in lines if line.strip()]


def required(name: str, python: str) -> list[requirements.Requirement]:
  """The requirements of a file that are for a version of Python."""
  return [
    need
    for need in parse_requirements(name)
    if not need.marker or need.marker.evaluate({'python_version': python})
  ]


LOCKS = {
  python: tuple(
    f'{part}-{python}.txt' for part in ('base', 'notebook', 'docs', 'ray')
  )
  for python in ('3.11', '3.12', '3.13')
}
PYTHON = '.'.join(map(str, sys.version_info[:2]))


@pytest.mark.parametrize('lock', sum(LOCKS.values(), ()))
def test_lock_has_versions_and_hashes_and_no_address(lock):
  text = (REQUIREMENTS / lock).read_text('utf-8')
  entries = re.findall(r'^(?=[^#\s])(?:.*\\\n)*.*', text, re.MULTILINE)
  assert len(entries) > (5 if 'ray' in lock else 50)
  for entry in entries:
    assert re.match(r'[\w.-]+==[\w.+!-]+ \\\n', entry), entry
    assert '--hash=sha256:' in entry, entry
  assert '://' not in text
  assert not re.search(r'^\s*--(?!hash)', text, re.MULTILINE)


def locked_versions(lock: str) -> dict[str, str]:
  locked = {}
  for requirement in parse_requirements(lock):
    (version,) = requirement.specifier
    locked[requirement.name] = version.version
  return locked


@pytest.mark.parametrize('python', LOCKS)
def test_notebooks_and_docs_change_no_package_of_the_environment(python):
  # These lie in folders of their own, and would come before those.
  environment, *others = map(locked_versions, LOCKS[python])
  for other in others:
    assert not set(environment) & set(other)
  if python == '3.11':
    assert environment['typing-extensions'] < '4.6'  # See require_tff.py.


@pytest.mark.parametrize('python', LOCKS)
def test_tff_and_what_computes_epsilons_are_the_same_on_all_pythons(python):
  here, there = (locked_versions(LOCKS[name][0]) for name in ('3.11', python))
  for package in (
    *('tensorflow-federated', 'tensorflow-privacy', 'dp-accounting'),
    *('ruff', 'mypy'),  # What is clean is clean everywhere.
  ):
    assert here[package] == there[package]


@pytest.mark.parametrize('python', LOCKS)
@pytest.mark.parametrize(
  ('which', 'name'),
  [(0, 'base.in'), (0, 'overrides.txt')]
  + [(1, 'notebook.in'), (2, 'docs.in'), (3, 'ray.in')],
)
def test_lock_follows_its_sources(python, which, name):
  lock = LOCKS[python][which]
  locked = locked_versions(lock)
  for wanted in required(name, python):
    found = locked.get(wanted.name, 'nothing')
    assert found != 'nothing' and found in wanted.specifier, (
      f'make lock: {wanted} is asked for in {name}, and {found} is in {lock}.'
    )
