"""Flags that an algorithm does not read are refused, and no others."""

from collections.abc import Iterator
import contextlib
import dataclasses
import operator
from unittest import mock

from absl import flags as absl_flags
import pytest

from tasks import evaluate
from tasks.errors import OptionError
from tasks.experiment import Config
from tasks.experiment import from_recipe
from tasks.experiment.command_line import flags
from tasks.experiment.command_line.arguments import parse
from tasks.experiment.methods import algorithms
from tasks.experiment.methods import building
from tasks.experiment.methods.setting import Setting
from tasks.experiment.options.hyperparameters import FedEmbed
from tasks.experiment.options.hyperparameters import Hpfl
from tasks.experiment.options.hyperparameters import Hyperparameters
from tasks.experiment.options.memory import Memory
from tasks.experiment.options.optimizers import Optimizer
from tasks.experiment.options.privacy import Privacy
from tasks.experiment.options.server import Server
from tasks.experiment.options.training import LocalTraining
from tasks.experiment.runs.result import Result
from tasks.searching import grids
from tests.support import planted
import tff_partial
from tff_partial.training.programs import ProgramError


def _read_by(algorithm: building.Algorithm, patch: pytest.MonkeyPatch) -> set:
  """The flags that are read while an algorithm and its exams are built."""
  setting = Setting(
    task=mock.MagicMock(),
    local=LocalTraining(tuning_learning_rate=0.1),
    server=Server(),
    hyperparameters=Hyperparameters(
      fed_embed=FedEmbed(forming_steps=1), hpfl=Hpfl(num_centers=3)
    ),
    privacy=Privacy(),
    num_clients=3,
  )
  setting.task.kept_tables.return_value = {'users': [3, 4]}
  read = set()
  values = FedEmbed, Hpfl, Hyperparameters, LocalTraining, Memory, Server
  for kind in (*values, Optimizer):
    example = Optimizer('', '') if kind is Optimizer else kind()
    named = {c.path[0]: c.flag.lstrip('_') for c in example.own_choices()}

    def get(self, field, named=named):
      if field in named:
        prefix = ''
        if isinstance(self, Optimizer):
          prefix = f'{object.__getattribute__(self, "name")}_'
        read.add(f'{prefix}{named[field]}')
      return object.__getattribute__(self, field)

    patch.setattr(kind, '__getattribute__', get)
  model = mock.MagicMock()
  # No builder takes such a model. What it is given was read before.
  with contextlib.suppress(Exception):
    algorithm.build(model, setting)
  with contextlib.suppress(Exception):
    algorithm.measure(model, setting, {})
  if algorithm.personal is not None:
    algorithm.personal(setting.local)
  patch.undo()
  return read


@pytest.mark.parametrize('name', algorithms.names())
def test_an_algorithm_reads_what_it_says(name, monkeypatch):
  algorithm = algorithms.ALGORITHMS[name]
  read = _read_by(algorithm, monkeypatch)
  special = {f for each in algorithms.ALGORITHMS.values() for f in each.reads}
  assert read & special == set(algorithm.reads)
  assert not read & set(algorithm.ignores)
  tuned = 'tuning_learning_rate' in algorithm.reads
  local = LocalTraining(tuning_learning_rate=0.1 if tuned else None)
  assert not read & Config(algorithm=name, local=local).without_effect()
  of_server = set(building.JOINING)
  if not algorithm.ignores:
    assert read & of_server


@pytest.mark.parametrize(
  'make',
  [
    lambda: parse(['--set=mixture=0.3', '--algorithm=fed_avg']),
    lambda: parse(['--recipe=emnist_fed_avg', '--set=mixture=0.3']),
    # What is said after another algorithm is meant for that one.
    lambda: parse(
      ['--recipe=emnist_apfl', '--algorithm=fed_avg', '--set=mixture=0.3']
    ),
    lambda: Config(
      algorithm='fed_avg', hyperparameters=Hyperparameters(mixture=0.3)
    ),
    lambda: from_recipe('emnist_fed_avg', mixture=0.3),
  ],
)
def test_a_flag_of_another_algorithm_is_refused(make):
  said = r'--set=mixture=0.3: the algorithm fed_avg does not .* does: apfl\.'
  with pytest.raises(OptionError, match=said):
    make()


@pytest.mark.parametrize(
  ('flag', 'algorithm'),
  [
    ('--joint', 'fed_avg'),
    ('--penalty=1', 'fed_avg'),
    ('--set=repeats=3', 'fed_avg'),
    ('--knn_scale=2', 'ngram_cache'),
    ('--server_optimizer=adam', 'fed_adam'),
    ('--clip_norm=1', 'local_only'),
    ('--update_learning_rate=1', 'local_only'),
    ('--update_optimizer=adam', 'fed_sgd'),
    ('--personalise_seen', 'fed_avg'),
    ('--update_optimizer=adam', 'p_fed_me'),
  ],
)
def test_flags_of_few_algorithms_are_refused_elsewhere(flag, algorithm):
  with pytest.raises(OptionError, match=f'{flag.split("=")[0]}=.*{algorithm}'):
    parse([flag, f'--algorithm={algorithm}'])


def test_a_memory_reads_flags_of_local_steps_for_tuning_alone():
  assert 'reconstruction_steps' in Config(algorithm='knn_per').without_effect()
  given = ['--algorithm=ngram_cache', '--tuning_learning_rate=0.1']
  found = parse(given).without_effect()
  assert 'reconstruction_learning_rate' in found
  assert 'reconstruction_steps' not in found


def test_a_memory_without_a_rate_tunes_nothing():
  run = mock.MagicMock(local=LocalTraining(tuned='head/.*'))
  with pytest.raises(OptionError, match=r'--tuned=head/\.\*: nothing is tuned'):
    algorithms.ALGORITHMS['ngram_cache'].measure(None, run, {})


@pytest.mark.parametrize(
  ('algorithm', 'privacy', 'clips'),
  [('fed_avg', None, True), ('fed_avg', {}, True), ('local_only', None, False)]
  + [('fed_avg', {'epsilon': 8.0}, False)],
)
def test_advice_is_not_a_flag_that_the_run_refuses(algorithm, privacy, clips):
  report = {'algorithm': algorithm, 'privacy': privacy, 'diverged': True}
  of_round = {'rounds': 3, 'train': {}, 'validation': {'loss': 9.0}}
  with pytest.raises(ProgramError, match='loss was 9. Try ') as caught:
    Result({**report, **of_round}).check()
  assert ('--clip_norm' in str(caught.value)) == clips


def test_a_program_reads_a_flag_that_is_also_of_another_task():
  given, values = (Config(), evaluate.Chosen()), absl_flags.FlagValues()
  for options in given:
    flags.define(options, values)
  values(['', '--top_n=7'])
  assert flags.read(given[0], values, given) == Config()
  assert flags.read(given[1], values, given).top_n == 7
  with pytest.raises(OptionError, match='--top_n=7: .* give --task=ratings'):
    flags.read(given[0], values)


@pytest.mark.slow
def test_fed_recon_shuffles_and_drops_remainders():
  local = LocalTraining(shuffle=True, drop_remainder=True)
  setting = Setting(
    mock.MagicMock(), local, Server(), Hyperparameters(), Privacy()
  )
  model = planted.factorization(planted.constant_user(0.3))
  how = algorithms.ALGORITHMS['fed_recon']
  reconstruct, update = how.build(model, setting).work.work
  adapt, _ = how.measure(model, setting, {}).parts.work
  assert reconstruct.shuffle and update.shuffle and adapt.shuffle
  assert all(p.drop_remainder for p in (reconstruct, update, adapt))
  # An exact solve takes no passes.
  exact = Optimizer('reconstruction', '', optimizer='exact')
  local = LocalTraining(shuffle=True, reconstruction=exact)
  setting = dataclasses.replace(setting, local=local)
  reconstruct, update = how.build(model, setting).work.work
  assert update.shuffle and not reconstruct.shuffle


@pytest.mark.slow
def test_p_fed_me_does_not_warn_of_a_default(caplog):
  setting = Setting(
    mock.MagicMock(), LocalTraining(), Server(), Hyperparameters(), Privacy()
  )
  model = tff_partial.from_keras(planted.build_slope, loss='mse')
  algorithms.ALGORITHMS['p_fed_me'].build(model, setting)
  assert not caplog.records


@pytest.mark.parametrize('name', ['ifca', 'fed_em', 'p_fed_km'])
def test_sub_populations_are_measured_by_the_split(name, monkeypatch):
  local = LocalTraining(split='fraction', support_share=0.1)
  setting = Setting(mock.MagicMock(), local, None, Hyperparameters(), None)
  build = mock.MagicMock()
  monkeypatch.setattr(building, 'builder', lambda name: build)
  algorithms.ALGORITHMS[name].measure(None, setting, {})
  support = build.call_args.kwargs['split'].support
  assert support.name.startswith('fraction(0.1)')


def test_a_flag_may_say_what_is_usual():
  config = parse(['--set=mixture=0.5', '--algorithm=fed_avg'])
  assert config == Config(algorithm='fed_avg')


@pytest.mark.parametrize(
  'spelled',
  ['--algorithm=fed_avg', '-algorithm=fed_avg', '--algorithm fed_avg'],
)
def test_another_algorithm_leaves_flags_of_the_recipes_one(spelled):
  assert from_recipe('emnist_apfl').hyperparameters.mixture_learning_rate > 0
  parsed = parse(['--recipe=emnist_apfl', *spelled.split()])
  changed = from_recipe('emnist_apfl', algorithm='fed_avg')
  assert parsed == changed
  assert parsed.hyperparameters == Hyperparameters()
  with pytest.raises(OptionError, match="'fed_avgg'|fed_avgg"):
    from_recipe('emnist_apfl', algorithm='fed_avgg')


def test_a_line_of_a_recipe_that_is_no_flag_is_refused(tmp_path):
  file = tmp_path / 'own.flags'
  file.write_text('# A comment.\n--task=emnist\n\nrounds=5\n')
  with pytest.raises(OptionError, match='own.flags: rounds=5: flags begin'):
    from_recipe(file)


@pytest.mark.parametrize(
  ('recipe', 'flag', 'value', 'left', 'given', 'usual'),
  [
    (
      *('subreddit_furl', 'reconstruction_optimizer', 'exact'),
      *('local.evaluation_reconstruction_epochs', 10, None),
    ),
    (
      *('next_word_fed_recon', 'split', 'halves'),
      *('local.support_share', 0.05, 0.5),
    ),
    (
      *('movielens_fed_recon_dp', 'clip', 0.5),
      *('privacy.initial_clip', 1.0, 0.1),
    ),
    (
      *('fashion_mnist_fed_avg', 'data', 'synthetic'),
      *('task.edition', 'fashion_mnist', 'mnist'),
    ),
  ],
)
def test_a_flag_leaves_what_has_no_use(recipe, flag, value, left, given, usual):
  read = operator.attrgetter(left)
  assert read(from_recipe(recipe)) == given
  parsed = parse([f'--recipe={recipe}', f'--{flag}={value}'])
  assert parsed == from_recipe(recipe, **{flag: value})
  assert read(parsed) == usual


def test_a_written_flag_that_is_left_is_named(monkeypatch, caplog):
  written = ['--initial_clip=2', '--clip=1']
  recipe = '--recipe=movielens_fed_recon_dp'
  monkeypatch.setattr('sys.argv', ['train', recipe, *written])
  assert parse([recipe, *written]).privacy.clip == 1.0
  # Not those of the recipe.
  assert caplog.messages == ['--initial_clip=2: left out, as --clip=1 follows.']


def test_flags_of_a_task_are_checked_together():
  flags = ['--task=subreddit', '--min_examples=50', '--max_documents=60']
  assert parse(flags).task.min_documents == 50
  with pytest.raises(OptionError, match='at most 60 documents and at least 61'):
    parse([*flags, '--min_examples=61'])


def _runs(*grid: str, passed_on: Iterator[str] = ()) -> dict[str, list[str]]:
  planned = grids.planned([], grid, list(passed_on))
  return {name: run.arguments for name, run in planned.items()}


def test_a_sweep_gives_each_algorithm_what_it_reads():
  found = _runs(
    'algorithm=fed_avg,apfl',
    'mixture=0.2,0.4',
    passed_on=['--mixture_learning_rate=0.1', '--rounds=3'],
  )
  both = ['--mixture_learning_rate=0.1', '--rounds=3', '--algorithm=apfl']
  assert found == {
    # Once, as no mixture makes a difference.
    'algorithm=fed_avg': ['--rounds=3', '--algorithm=fed_avg'],
    'algorithm=apfl,mixture=0.2': [*both, '--set=mixture=0.2'],
    'algorithm=apfl,mixture=0.4': [*both, '--set=mixture=0.4'],
  }
  # So are the values of a flag that has no use beside another.
  assert list(_runs('support_share=0.2,0.4', 'split=halves,fraction')) == [
    'split=halves',
    'support_share=0.2,split=fraction',
    'support_share=0.4,split=fraction',
  ]
  # And those of one without effect, as nothing trains local weights.
  steps = 'reconstruction_steps=1,2'
  assert list(_runs('algorithm=fed_avg,fed_recon', steps)) == [
    'algorithm=fed_avg',
    'algorithm=fed_recon,reconstruction_steps=1',
    'algorithm=fed_recon,reconstruction_steps=2',
  ]
  with pytest.raises(OptionError, match='steps has no effect: .* of fed_avg'):
    _runs(steps, passed_on=['--algorithm=fed_avg'])
  # Of a single algorithm all else is given, and refused by the run.
  found = _runs('mixture=0.2', passed_on=['--algorithm=fed_avg'])
  assert found == {'mixture=0.2': ['--algorithm=fed_avg', '--set=mixture=0.2']}


@pytest.mark.parametrize(
  'grid, said',
  [
    ('data_set=a/b.csv,a_b.csv', 'share the folder data_set=a_b.csv'),
    ('data_set=' + 'a' * 300, '309 bytes, and 255 are the most'),
  ],
)
def test_each_run_of_a_sweep_has_a_folder_of_its_own(grid, said):
  with pytest.raises(OptionError, match=said):
    _runs(grid)
  # The same run once more is one.
  assert list(_runs('seed=0,0')) == ['seed=0']
