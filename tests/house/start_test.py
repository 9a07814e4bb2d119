"""Programs answer before TensorFlow is imported, which is too slow to wait."""

import json

import pytest

from tasks.experiment import Output
from tests.support import commands
from tests.support.commands import python
from tests.support.commands import run_here
import tff_partial_programs
from tff_partial_programs import recipes
from tff_partial_programs import spelling


@pytest.mark.parametrize(
  'code',
  [
    'import tff_partial, tasks.experiment',
    'import tasks.experiment.methods.algorithms',
    *(f'import tasks.{name}' for name in tff_partial_programs.PROGRAMS),
  ],
)
def test_modules_that_declare_options_import_no_tensorflow(code):
  heavy = '{"matplotlib", "optuna", "ray", "tensorflow"}'
  done = python('-c', f'{code}, sys; print({heavy} & set(sys.modules))')
  assert (done.stdout, done.stderr) == ('set()\n', '')


@pytest.mark.parametrize(
  'code',
  [
    pytest.param('from tff_partial.data import splits', marks=pytest.mark.slow),
    'import tff_partial, tensorflow',
    pytest.param('import tensorflow, tff_partial', marks=pytest.mark.slow),
    pytest.param(
      'import tff_partial; tff_partial.compose', marks=pytest.mark.slow
    ),
  ],
)
def test_tensorflow_comes_with_tff_our_runtime_and_our_layers(code):
  done = python(
    '-c',
    f'{code}\nimport sys, tensorflow as tf\n'
    'tff = sys.modules["tensorflow_federated"]\n'
    'current = tff.framework.get_context_stack().current\n'
    'assert type(current).__name__ == "NativeRuntime", current\n'
    'assert tf.__spec__.name == "tensorflow" and tf.__spec__.origin\n'
    'name = "tff_partial>PrivateVector"\n'
    'print(tf.keras.saving.get_registered_object(name).__name__)',
  )
  assert done.stdout == 'PrivateVector\n', done.stderr


@pytest.mark.slow
def test_a_sweep_waits_for_no_tensorflow_before_its_runs(tmp_path):
  code = (
    'import sys; from tasks import sweep; from tasks.searching import plan\n'
    'sweep._run = lambda *_: print("tensorflow" in sys.modules)\n'
    f'grid = sweep.Sweep({str(tmp_path)!r}, grid=("seed=0,1",))\n'
    'sweep.main(grid, plan.Search())'
  )
  lines = python('-c', code).stdout.splitlines()
  assert lines[1::2] == ['False', 'False'] and lines[-1] == 'False'


@pytest.mark.parametrize('name', tff_partial_programs.PROGRAMS)
def test_help_fits_two_screens(name):
  done = python('-m', f'tasks.{name}', '--help')
  assert (done.returncode, done.stderr) == (1, '')  # As absl has it.
  lines = done.stdout.splitlines()
  assert len(lines) <= 100 and max(map(len, lines)) <= 80
  assert f'tff-partial {name} --' in done.stdout
  assert 'python -m' not in done.stdout and 'tasks/recipes' not in done.stdout


def test_the_full_help_has_all_flags_and_options_without_one():
  code = 'import tff_partial_programs as p; p.main(["train", "--helpfull"])'
  full = python('-c', code).stdout
  for text in (
    'Data and task:',
    '--recipe:',
    '--clip_norm:',
    'mlp_units (64):',
  ):
    assert text in full


@pytest.mark.parametrize(
  ('argument', 'said'),
  [
    ('--client_per_round=5', 'Did you mean: clients_per_round'),
    ('--recipes=demo', 'Did you mean: recipe'),
    ('--recipe=demoo', 'Did you mean demo?'),
    ('--split=alternatin', 'Did you mean alternating?'),
    ('--algorithm=fedrecon', 'Did you mean fed_recon?'),
    ('--task=movilens', 'Did you mean movielens?'),
  ],
)
def test_a_misspelt_flag_ends_the_run(argument, said):
  outcome = run_here('train', argument, '--output_dir=x')
  commands.is_for_users(outcome, said)
  assert outcome.status == 1


def test_how_far_a_run_is(tmp_path):
  output = Output(str(tmp_path))
  assert output.state == 'a new run'
  for name in ('round_0', 'round_20', 'round_100', 'round_120_temp'):
    (tmp_path / 'checkpoints' / name).mkdir(parents=True)
  assert output.state == 'going on after round 100'
  (tmp_path / 'result.json').write_text(json.dumps({'rounds': 120}))
  assert output.state == 'which has the result of 120 rounds'
  (tmp_path / 'result.json').write_text('[')
  assert output.state == 'whose result cannot be read'


def test_a_recipe_is_read_by_its_name():
  path = commands.ROOT / 'tasks' / 'recipes' / 'demo.flags'
  assert recipes.expand(['--recipe', 'demo']) == list(recipes.flags_of(path))
  kept = ['--seed=1', '--', '--recipe=none']
  assert recipes.expand(kept) == kept


def test_the_nearest_is_suggested():
  assert spelling.hint('halvs', ['halves', 'same']) == ' Did you mean halves?'
  assert spelling.hint('x', ['halves', 'same']) == ''
  assert spelling.choose('sam', ['halves', 'same']) == (
    'choose one of halves, same. Did you mean same?'
  )
