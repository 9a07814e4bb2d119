"""The scripts in `examples` run as they stand."""

import os
import pathlib
import re
import runpy
import sys

import numpy as np
import pandas as pd
import pytest

from tasks.subreddit import data as documents

_EXAMPLES = pathlib.Path(__file__).parents[2] / 'examples'


def _said(name: str, capsys, monkeypatch, *arguments: str) -> str:
  """What a script prints."""
  monkeypatch.setattr(sys, 'argv', [name, *arguments])
  runpy.run_path(str(_EXAMPLES / name), run_name='__main__')
  return capsys.readouterr().out


def test_examples_are_short():
  scripts = sorted(_EXAMPLES.glob('*.py'))
  assert len(scripts) == 8
  for script in scripts:
    assert len(script.read_text(encoding='utf-8').splitlines()) <= 60, script


def test_examples_silence_tensorflow():
  for script in _EXAMPLES.glob('*.py'):
    names = re.findall(r'^import (\w+)', script.read_text('utf-8'), re.M)
    if 'tff_partial' in names:
      assert names[0] == 'tff_partial', script


def test_emoticons_become_labels_and_go(tmp_path, capsys, monkeypatch):
  texts = ['Thanks! :-)', 'f : A -> B; see 10:30', ':tada: done', ':D']
  texts += ['so \U0001f600', '\U0001f469\u200d\u2695\ufe0f']
  path = tmp_path / 'messages.jsonl'
  pd.DataFrame({'author': '0123', 'time': range(6), 'text': texts}).to_json(
    path, orient='records', lines=True
  )
  said = _said(
    'emoticons.py', capsys, monkeypatch, str(path), str(tmp_path / 'data')
  )
  assert said == '4 messages of 1 users, 75.0% with an emoticon\n'
  read = documents.load('sticker', tmp_path / 'data')
  assert read.authors == ('0123',) and read.label.tolist() == [1, 0, 1, 1]
  assert read.texts.tolist() == ['Thanks!', texts[1], 'done', 'so']


@pytest.mark.slow
def test_a_csv_file_of_ones_own(tmp_path, capsys, monkeypatch):
  random = np.random.default_rng(0)
  frame = pd.DataFrame(
    {
      'reader': [f'reader {number // 6}' for number in range(240)],
      'book': [f'book {number}' for number in random.integers(0, 9, 240)],
      'stars': random.integers(1, 6, 240),
    }
  )
  frame.to_csv(tmp_path / 'stars.csv', index=False)
  said = _said(
    'own_csv.py',
    capsys,
    monkeypatch,
    *(str(tmp_path / 'stars.csv'), '--client=reader', '--item=book'),
    *('--label=stars', '--rounds=3'),
  )
  assert 'Population of 40 clients with 240 examples' in said
  assert re.search(r'^For reader 0: book \d, book \d, book \d$', said, re.M)


def test_the_way_to_the_phone_is_short():
  text = (_EXAMPLES / 'csv_to_phone.py').read_text(encoding='utf-8')
  _, _, code = text.split('"""', 2)
  assert sum(bool(line.strip()) for line in code.splitlines()) <= 25


@pytest.mark.slow
def test_a_csv_file_on_a_phone(tmp_path, capsys, monkeypatch):
  random = np.random.default_rng(0)
  frame = pd.DataFrame(
    [
      # Those of even numbers like items of even numbers.
      (f'user {u:02d}', f'item {i:02d}', 5 - 4 * ((u + i) % 2))
      for u in range(30)
      for i in random.choice(24, 12, replace=False)
    ],
    columns=['user', 'item', 'rating'],
  )
  frame.to_csv(tmp_path / 'ratings.csv', index=False)
  phone = tmp_path / 'phone'
  said = _said(
    *('csv_to_phone.py', capsys, monkeypatch),
    *(str(tmp_path / 'ratings.csv'), str(phone)),
  )
  found = re.findall(r'^user 00 may like item (\d+): (-?\d\.\d\d)$', said, re.M)
  assert len(found) == 10
  rated = set(frame.item[frame.user == 'user 00'])
  assert not rated & {f'item {number}' for number, _ in found}
  assert int(found[0][0]) % 2 == 0
  files = {'model.tflite', 'signatures.json', 'vocabularies.json'}
  assert {path.name for path in phone.iterdir()} == {'saved_model', *files}


@pytest.mark.slow
def test_an_algorithm_of_ones_own(capsys, monkeypatch):
  said = _said('own_algorithm.py', capsys, monkeypatch)
  first, second = map(float, re.findall(r'first slope (-?[\d.]+)', said))
  # Where those who do badly count for more, the odd one in ten does.
  assert second < first - 0.3


@pytest.mark.slow
def test_a_keras_model_of_ones_own(capsys, monkeypatch):
  said = _said('own_keras_model.py', capsys, monkeypatch)
  head, alone = map(float, re.findall(r': (0\.\d+)', said))
  assert head > alone + 0.02 > 0.8


@pytest.mark.slow
def test_batch_normalization(capsys, monkeypatch):
  data = os.environ.get('TFF_PARTIAL_DATA_DIR', '')
  folder = pathlib.Path(data) / 'fashion_mnist'
  if not (data and folder.is_dir()):
    pytest.skip('There is no Fashion-MNIST in $TFF_PARTIAL_DATA_DIR.')
  said = _said(
    *('batch_normalization.py', capsys, monkeypatch), str(folder), '3', '0'
  )
  assert len(re.findall(r': 0\.\d{3}', said)) == 16
  methods = re.findall(r'^(\w+), seen, as trained: ', said, re.M)
  assert methods == ['FedAvg', 'SiloBN', 'FedBN', 'GroupNorm']


@pytest.mark.slow
def test_a_private_run(capsys, monkeypatch):
  said = _said('private_run.py', capsys, monkeypatch)
  assert 'at epsilon 8.00' in said or 'at epsilon 7.9' in said
  (error,) = re.findall(r'Off by ([\d.]+)%', said)
  assert float(error) < 10.0
