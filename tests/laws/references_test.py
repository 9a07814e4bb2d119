"""Our methods come to what other implementations came to, as recorded.

`make references` runs these implementations and tells what was taken out.
"""

import functools
import subprocess
import sys

import numpy as np
import pytest

from tests.references import __main__ as comparing
from tests.references import ours
from tests.references import problem
from tests.references import recorded
from tests.references import table

# Four references have FedAvg; we train it once.
_run = functools.cache(
  lambda method, settings: ours.run(table.Comparison(method, '', (), settings))
)


@pytest.fixture(scope='module', name='theirs')
def fixture_theirs():
  return recorded.read()


@pytest.mark.slow
@pytest.mark.parametrize('one', table.COMPARISONS, ids=lambda one: one.name)
def test_we_agree(one, theirs):
  found = _run(one.method, one.settings)
  assert problem.difference(found, theirs[one.name]) <= one.tolerance


def test_every_method_is_compared_and_every_departure_is_said(theirs):
  assert {one.method for one in table.COMPARISONS} == set(
    'FedAvg FedPer FedRep FedBABU LG-FedAvg FedProx SCAFFOLD Ditto FedAlt '
    'FedSim FedRecon FedAtt APFL pFedMe FedProto'.split()
  )
  taken_out = {name for one in table.COMPARISONS for name in one.taken_out}
  assert taken_out == set(table.DEPARTURES)
  assert {one.name for one in table.COMPARISONS} == set(theirs)


def test_training_moves_every_weight_that_is_compared(theirs):
  # Otherwise agreement would say nothing.
  first = problem.first_weights()
  for name, arrays in theirs.items():
    for key, array in arrays.items():
      if (weight := key.partition('/')[2]) in first and 'control' not in key:
        assert np.all(array != first[weight]), (name, key)


def test_results_of_other_things_are_no_agreement():
  with pytest.raises(ValueError, match='Of one of the two alone'):
    problem.difference({'a': np.zeros(2)}, {'b': np.zeros(2)})


def test_a_departure_left_in_is_found(capsys):
  one = table.Comparison('FedAtt', table.FED_ATT, (table.SPECTRAL,))
  mine = {'server/w': np.zeros(2)}
  away = {'server/w': np.array([0.0, 1e-6])}
  departed = table.result_name(one, table.SPECTRAL)
  assert comparing.compare(one, mine, {one.name: mine, departed: away})
  assert not comparing.compare(one, mine, {one.name: away, departed: away})
  # One that changes nothing need not be taken out.
  assert not comparing.compare(one, mine, {one.name: mine, departed: mine})
  assert f'FAILED: {departed}: 0.0' in capsys.readouterr().out


def test_what_is_missing_is_said(tmp_path):
  (tmp_path / table.FED_ATT).mkdir()
  lacking = tmp_path / 'python'
  lacking.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
  lacking.chmod(0o755)
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'tests.references', str(tmp_path)),
      *(table.PFLLIB, table.FED_ATT, f'--python={lacking}'),
    ],
    stdout=subprocess.PIPE,
    text=True,
    check=False,
  )
  assert done.returncode == 1
  assert f'not compared: PFLlib: {tmp_path}/PFLlib is missing' in done.stdout
  assert f'{lacking} lacks torch, scipy: make an environment' in done.stdout
  assert '0 of 0 agree' in done.stdout
