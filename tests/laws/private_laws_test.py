"""What leaves clients beside noise, and runs that go on, of all algorithms."""

import dataclasses
import inspect
from typing import Any

import numpy as np
import pytest
import tensorflow_federated as tff

import baselines
from tests.laws import laws_test
from tests.support import planted
from tests.support import small_runs
import tff_partial
from tff_partial import algorithms
from tff_partial import processes
from tff_partial.composition import Aggregation
from tff_partial.dp import clipping
from tff_partial.dp import privacy
from tff_partial.errors import UserError
from tff_partial.exporting.errors import ExportError
from tff_partial.training import programs
from tff_partial.training import run_privacy
from tff_partial.training.errors import ProgramError

# The rows, and what these need.
globals().update(
  {n: f for n, f in vars(laws_test).items() if n.startswith('fixture_')}
)

_NOISED = privacy.private_mean(
  clipping.FixedClip(1e-7),
  noise_multiplier=1.0,
  clients_per_round=12,
  noise_seed=0,
)
# Why there is no noise for what else their clients send.
_REFUSED = {
  'fed_att': 'FedAtt divides by the sum of attentions, which a private',
  'fed_dbe': "statistic 'features': clients would send it exactly, beside",
  'furl, averaged statistics': "state='averaged': .* would be clipped and",
  'hpfl': "statistic 'public': clients would send it exactly, beside",
  'ifca': r'Pass Aggregation\(mean_of_members=False\)',
  'scaffold': "statistic 'control': clients would send it exactly, beside",
}
# They take no aggregator, so that a ledger finds nothing to count.
_WITHOUT_NOISE = ('fed_als', 'fed_ials', 'fed_proto', 'local_only')


@pytest.fixture(
  scope='module', name='row', params=laws_test.rows(('fed_recon',))
)
def fixture_row(request) -> laws_test.Row:
  return request.param


def _noised(row: laws_test.Row) -> Aggregation | None:
  """The builder's own way of aggregation with a private mean, if it has one."""
  name = f'build_{row.name.split(",")[0]}'
  package = algorithms if hasattr(algorithms, name) else baselines
  known = inspect.signature(getattr(package, name)).parameters
  if 'aggregation' not in known:
    return None
  default = known['aggregation'].default
  if not isinstance(default, Aggregation):
    default = Aggregation()
  return dataclasses.replace(default, aggregator=_NOISED)


def _released(state: Any) -> list[np.ndarray]:
  """All numbers of the server's state."""
  parts = tff.structure.flatten(
    tff.structure.from_container(state, recursive=True)
  )
  arrays = map(np.asarray, parts)
  return [array for array in arrays if array.dtype.kind in 'fiub']


def test_beside_noise_nothing_leaves_a_client_unclipped(row, model_of):
  """Clients of other labels move what is released by the clip alone."""
  model, aggregation = row.model(model_of), _noised(row)
  if row.name in _WITHOUT_NOISE:
    assert aggregation is None
    with pytest.raises(ProgramError, match='the process is not private'):
      run_privacy.ledger_of(row.build(model), 'unaccounted', 1)
    return
  if row.name in _REFUSED:
    with pytest.raises(UserError, match=_REFUSED[row.name]):
      row.build(model, aggregation=aggregation)
    return
  process = row.build(model, aggregation=aggregation)
  assert process.mechanism == _NOISED.mechanism
  state = process.initialize()
  others = laws_test._clients()
  for fields in others.values():
    fields['y'] = fields['y'][::-1] / 2
  one, other = (
    planted.run(process, planted.cohort_of(process, clients, 1), state)
    for clients in (laws_test._clients(), others)
  )
  # Adam's first steps are as long for small updates as for large ones.
  planted.assert_close(_released(one.state), _released(other.state), 1e-3)


def test_an_aggregator_alone_is_named(row, model_of):
  if row.name not in _WITHOUT_NOISE:
    with pytest.raises(UserError, match='aggregation: expected `Aggregation'):
      row.build(row.model(model_of), aggregation=_NOISED)


def _trained(
  process: processes.PartialProcess, rounds: int, folder: Any = None
) -> programs.TrainingResult:
  return tff_partial.train(
    process,
    planted.pack(laws_test._clients(), process.example_spec),
    rounds=rounds,
    clients_per_round=5,
    output_dir=folder,
    privacy='unaccounted' if process.is_noised else None,
    show_progress=False,
    tensorboard=False,
  )


def test_a_run_that_goes_on_is_as_one_run(
  row, model_of, process, measuring, tmp_path
):
  """Its personal models too, of clients that it remembers, bit for bit."""
  if process.is_noised:  # With a secret seed.
    process = row.build(row.model(model_of), aggregation=_noised(row))
  whole = _trained(process, 3)
  _trained(process, 1, tmp_path / 'run')
  resumed = _trained(process, 3, tmp_path / 'run')
  small_runs.assert_same(whole, resumed)
  if not process.is_stateless:
    whole_kept, kept = (
      list(result.client_store.read(laws_test._NAMES))
      for result in (whole, resumed)
    )
    assert small_runs.flat(whole_kept) == small_runs.flat(kept)
  clients = planted.pack(laws_test._clients(), measuring.example_spec)
  if row.name == 'fed_em':
    with pytest.raises(ProgramError, match='not one Keras model'):
      tff_partial.personalise(whole, clients, 'client 3', evaluation=measuring)
    return
  whole_model, model = (
    tff_partial.personalise(
      result, clients, 'client 3', evaluation=measuring
    ).get_weights()
    for result in (whole, resumed)
  )
  assert small_runs.flat(whole_model) == small_runs.flat(model)


# What a device would have to do, and cannot.
_NOT_EXPORTED = {
  'fed_babu': 'train no local weights of their own',
  'fed_dbe': "read 'sum' of the state that the server sends them",
  'fed_proto': 'train personal weights of their own',
  'hpfl': 'train personal weights of their own',
  'local_only': 'train personal weights of their own',
}


def test_what_was_trained_is_exported_or_refused(row, process, tmp_path):
  weights = process.get_model_weights(process.initialize())
  reason = 'for groups' if row.grouped else _NOT_EXPORTED.get(row.name)
  options = {'formats': ['saved_model'], 'reconstruct': process}
  if reason is None:
    tff_partial.export(process.model, weights, tmp_path / 'made', **options)
    assert (tmp_path / 'made').is_dir()
    return
  with pytest.raises(ExportError, match=reason):
    tff_partial.export(process.model, weights, tmp_path / 'made', **options)
