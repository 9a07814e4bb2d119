"""What a run says before TensorFlow is imported, and of misspelt flags."""

import json
import subprocess
import sys
import time

import pytest

from tests.support import commands
from tests.support.commands import run_here
from tff_partial_programs import opening
from tff_partial_programs import recipes
from tff_partial_programs import spelling

_DEMO = f'--flagfile={commands.ROOT}/tasks/recipes/demo.flags'


def test_a_run_is_described_in_a_sentence(tmp_path):
  assert opening.sentence([_DEMO, f'--output_dir={tmp_path}/out']) == (
    'movielens by fed_recon, invented data: 100 rounds of 50 clients, measured '
    f'every 20; into {tmp_path}/out, a new run.'
  )


def test_later_flags_win_and_may_stand_apart(tmp_path):
  said = opening.sentence(
    [
      *(_DEMO, '--rounds', '7', '-clients_per_round=3', '--nobiases'),
      *('--target_epsilon=8', f'--output_dir={tmp_path}', '--', '--rounds=1'),
    ]
  )
  assert '7 rounds of 3 clients' in said
  assert 'private, epsilon 8 at delta 1e-05;' in said


def test_flags_of_a_file_stand_where_the_file_does(tmp_path):
  (tmp_path / 'inner').write_text('--seed=1\n# --rounds=2\n--rounds=3\n')
  (tmp_path / 'outer').write_text(f'--flagfile={tmp_path}/inner\n--biases\n')
  found = opening.given(
    ['--rounds=9', f'--flagfile={tmp_path}/outer'], opening.noted()
  )
  assert found == {'rounds': '3', 'seed': '1', 'biases': 'true'}


def test_a_recipe_is_read_by_its_name():
  known = opening.noted()
  by_name = opening.given(['--recipe', 'demo', '--rounds=7'], known)
  assert by_name == opening.given([_DEMO, '--rounds=7'], known)
  kept = ['--seed=1', '--', '--recipe=none']
  assert recipes.expand(kept) == kept


def test_how_far_a_run_is(tmp_path):
  assert opening.state(str(tmp_path / 'none')) == 'a new run'
  for name in ('round_0', 'round_20', 'round_100', 'round_120_temp'):
    (tmp_path / 'checkpoints' / name).mkdir(parents=True)
  assert opening.state(str(tmp_path)) == 'going on after round 100'
  (tmp_path / 'result.json').write_text(json.dumps({'rounds': 120}))
  assert opening.state(str(tmp_path)) == 'which has the result of 120 rounds'
  (tmp_path / 'result.json').write_text('[')
  assert opening.state(str(tmp_path)) == 'whose result cannot be read'


def test_nothing_is_said_of_a_run_without_a_folder():
  assert opening.sentence(['--rounds=3']) == ''
  assert 'nothing is written' in opening.sentence(['--dry_run'])


@pytest.mark.parametrize('arguments', [['--flagfile=/none'], ['--flagfile']])
def test_what_cannot_be_read_is_left_to_the_program(arguments, capsys):
  opening.say([*arguments, '--output_dir=x'])
  assert capsys.readouterr().out == ''


@pytest.mark.parametrize(
  ('argument', 'said'),
  [
    ('--task=movilens', '--task=movilens: choose one of'),
    ('--task=movilens', 'Did you mean movielens?'),
    ('--algorithm=fedrecon', 'Did you mean fed_recon?'),
    ('--client_per_round=5', 'Did you mean --clients_per_round?'),
    ('--recipes=demo', 'Did you mean --recipe?'),
    ('--recipe=demoo', 'Did you mean demo?'),
  ],
)
def test_a_misspelt_flag_ends_the_run_at_once(argument, said, capsys):
  with pytest.raises(SystemExit):
    opening.say([argument, '--output_dir=x'])
  assert said in capsys.readouterr().err


def test_flags_of_absl_are_no_misspelt_ones(tmp_path):
  opening.sentence(
    ['--verbosity=1', '--alsologtostderr', f'--output_dir={tmp_path}']
  )


def test_the_nearest_is_suggested():
  assert spelling.hint('halvs', ['halves', 'same']) == ' Did you mean halves?'
  assert spelling.hint('x', ['halves', 'same']) == ''
  assert spelling.choose('sam', ['halves', 'same']) == (
    'choose one of halves, same. Did you mean same?'
  )


@pytest.mark.parametrize(
  ('argument', 'said'),
  [
    ('--split=alternatin', 'Did you mean alternating?'),
    ('--algorithm=fedrecon', 'Did you mean fed_recon?'),
    ('--client_per_round=5', 'clients_per_round'),
  ],
)
def test_programs_suggest_the_nearest(argument, said):
  commands.is_for_users(run_here('train', argument), said)


def test_a_run_says_within_five_seconds_what_it_is_about_to_do(tmp_path):
  begun = time.perf_counter()
  with subprocess.Popen(
    commands.command('train', _DEMO, f'--output_dir={tmp_path}/out'),
    cwd=commands.ROOT,
    stdout=subprocess.PIPE,
    text=True,
  ) as process:
    line = process.stdout.readline()
    seconds = time.perf_counter() - begun
    process.kill()
  assert line.startswith('movielens by fed_recon')
  assert seconds < 5.0


def test_no_tensorflow_is_imported_for_it():
  code = (
    'import sys\nfrom tff_partial_programs import opening\nopening.noted()\n'
    "sys.exit('tensorflow' in sys.modules or 'numpy' in sys.modules)"
  )
  subprocess.run([sys.executable, '-c', code], cwd=commands.ROOT, check=True)
