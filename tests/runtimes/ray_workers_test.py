"""The Ray runtime: the same bits, also when its workers are lost.

Skipped where Ray is not installed; `make ray` installs it.
"""

import contextlib
import os
import pathlib
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np
import psutil
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import planted
from tests.support.computations import mapped
from tests.support.computations import summed
import tff_partial
from tff_partial import algorithms
from tff_partial import Exact
from tff_partial import Phase
from tff_partial import runtimes
from tff_partial import sgd
from tff_partial.data import examples
from tff_partial.data import stored_clients
from tff_partial.runtimes import errors
from tff_partial.runtimes.errors import CohortRuntimeError
from tff_partial.runtimes.ray_runtime import deposits
from tff_partial.runtimes.ray_runtime import ray_workers

ray = pytest.importorskip('ray')

_ROOT = pathlib.Path(__file__).parents[2]

# Seconds until a worker that says nothing is given up.
_PATIENCE = 20.0


@pytest.fixture(scope='module', name='process')
def fixture_process():
  model = planted.factorization(planted.build_tastes)
  return algorithms.build_furl(
    model, training=Phase(optimizer=sgd(0.1), epochs=2, shuffle=True)
  )


def _train(process, rounds=3, each=lambda number: None):
  """Weights, metrics and memories after some rounds of 100 clients."""
  clients = planted.rate({f'client {i}': 3 + i % 20 for i in range(100)})
  state, kept = process.initialize(), None
  for number in range(rounds):
    each(number)
    cohort = planted.cohort_of(process, clients, number)
    output = planted.run(process, cohort, state, kept)
    state, kept = output.state, output.client_states
  return (
    planted.global_weights(process, state),
    planted.train_metrics(output),
    list(kept),
  )


@pytest.fixture(scope='module', name='expected')
def fixture_expected(process):
  with runtimes.cohort(jit=False):
    return _train(process)


@pytest.fixture(scope='module', name='context')
def fixture_context():
  with runtimes.ray(workers=2, jit=False, patience=_PATIENCE) as context:
    yield context


def _workers(context):
  """The numbers of the processes of all workers that have started."""
  crew = context._resources.workers
  deadline = time.monotonic() + 300
  while time.monotonic() < deadline:
    places = [worker.place for worker in list(crew._workers)]
    if len(places) == 2 and all(places):
      return [pid for _, pid in places]
    with crew._lock:
      crew._hire()
      crew._listen(ray_workers._Work([], None), context._chooser)
  raise TimeoutError('The workers do not start.')


def _is_gone(pid, seconds=60):
  deadline = time.monotonic() + seconds
  while time.monotonic() < deadline:
    if not psutil.pid_exists(pid):
      return True
    with contextlib.suppress(psutil.Error):
      if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
        return True
    time.sleep(0.1)
  return False


def test_the_bits_are_those_of_the_cohort_runtime(context, process, expected):
  with context:
    planted.assert_same(_train(process), expected)
  assert len(set(_workers(context))) == 2
  assert os.getpid() not in _workers(context)


def _assert_same_bits(context, process):
  with runtimes.cohort(jit=False):
    expected = _train(process)
  with context:
    planted.assert_same(_train(process), expected)


def test_exact_solves_have_the_same_bits(context):
  """Of a user's vector, and of the gradient through it."""
  process = algorithms.build_fed_recon(
    planted.factorization(),
    reconstruct=Phase(optimizer=Exact()),
    through_solution=True,
  )
  _assert_same_bits(context, process)


@pytest.mark.parametrize(
  'kind', ['strings', 'texts', 'outputs', 'mixed_bfloat16', 'normalized', '']
)
def test_models_that_people_bring_have_the_same_bits(context, kind):
  """The last one has adapters, one for all and one of the client's own."""
  state = 'local' if kind == 'normalized' else None
  model = planted.brought(tf.keras, kind, state=state)
  if not kind:
    model = tff_partial.add_lora(model, 2, where='items', b='local')
    model = tff_partial.add_lora(model, 1, a='frozen', where='items', name='b')
  process = algorithms.build_furl(
    model, training=Phase(optimizer=sgd(0.1), epochs=2, shuffle=True)
  )
  _assert_same_bits(context, process)


@pytest.mark.parametrize('seconds', [None, 0.02])
def test_a_worker_is_killed(context, process, expected, seconds):
  """Before a round, and at some moment of it."""
  killed = []

  def each(number):
    if number != 1:
      return
    pid = _workers(context)[0]
    killed.append(pid)
    if seconds is None:
      os.kill(pid, signal.SIGKILL)
    else:
      threading.Timer(seconds, os.kill, (pid, signal.SIGKILL)).start()

  with context:
    found = _train(process, each=each)
  planted.assert_same(found, expected)
  assert killed[0] not in _workers(context)
  assert _is_gone(killed[0])


# ---- who may use what is started ---------------------------------------------


def test_only_this_machine_and_user_reach_what_is_started(context):
  _workers(context)
  this = psutil.Process()
  listening = [
    connection.laddr.ip.removeprefix('::ffff:')  # IPv4, as IPv6 has it.
    for process in [this, *this.children(recursive=True)]
    for connection in process.net_connections(kind='inet')
    if connection.status == psutil.CONN_LISTEN
  ]
  # This process, the head, the node with its agents, two workers.
  assert len(listening) >= 5
  assert set(listening) == {'127.0.0.1'}
  session = ray._private.worker._global_node.get_session_dir_path()
  token = pathlib.Path(os.environ['RAY_AUTH_TOKEN_PATH'])
  folder = token.parents[1]
  assert folder in pathlib.Path(session).parents
  assert stat.S_IMODE(folder.stat().st_mode) == 0o700
  assert stat.S_IMODE(token.stat().st_mode) == 0o600


_PROBE = """
import sys
import ray
from ray._raylet import GcsClient
try:
  print(len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=60)))
except ray.exceptions.AuthenticationError:
  print('refused')
"""


def test_a_process_without_the_token_is_refused(context):
  _workers(context)
  address = ray.get_runtime_context().gcs_address

  def probe(**token):
    env = {k: v for k, v in os.environ.items() if 'RAY_AUTH' not in k}
    return subprocess.run(
      [sys.executable, '-c', _PROBE, address],
      env={**env, **token},
      capture_output=True,
      text=True,
    ).stdout.strip()

  right = pathlib.Path(os.environ['RAY_AUTH_TOKEN_PATH']).read_text()
  assert probe() == 'refused'
  assert probe(RAY_AUTH_MODE='token', RAY_AUTH_TOKEN='0' * 64) == 'refused'
  assert probe(RAY_AUTH_MODE='token', RAY_AUTH_TOKEN=right) == '1'


_TWICE = """
import os
import ray
from tff_partial import runtimes
tokens = set()
for address in (None, 'local'):
  with runtimes.ray(address, workers=1, jit=False) as context:
    context._resources.workers.start()
    assert ray.get(ray.put(7)) == 7 and len(ray.nodes()) == 1
    tokens.add(open(os.environ['RAY_AUTH_TOKEN_PATH']).read())
  assert os.environ['RAY_AUTH_MODE'] == 'disabled'
  assert not {'RAY_AUTH_TOKEN', 'RAY_AUTH_TOKEN_PATH'} & set(os.environ)
print(len(tokens))
"""


def test_each_cluster_has_a_token_and_leaves_nothing():
  # Sockets need a short path.
  with tempfile.TemporaryDirectory(dir='/tmp') as folder:
    env = {k: v for k, v in os.environ.items() if 'RAY_AUTH' not in k}
    done = subprocess.run(
      [sys.executable, '-c', _TWICE],
      env={**env, 'RAY_AUTH_MODE': 'disabled', 'TMPDIR': folder},
      capture_output=True,
      cwd=_ROOT,
      text=True,
    )
    assert done.stdout == '2\n', done.stderr
    assert 'can run any code' not in done.stderr
    assert [name for name in os.listdir(folder) if 'tff_partial' in name] == []


# ---- what becomes of work ----------------------------------------------------


def test_what_clients_remember_stays_where_they_ran(context):
  kind = tff.TensorType(np.float32, [20_000])

  change_all = mapped(lambda state: state * 0.5 + 1.0, kind)
  with context:
    states = change_all(
      [np.full([20_000], number, np.float32) for number in range(40)]
    )
    for _ in range(2):
      # Nobody has read them here.
      assert all(map(_is_in_file, states.scattered.sources))
      states = change_all(states)
  for number, state in enumerate(states):
    expected = ((number * 0.5 + 1.0) * 0.5 + 1.0) * 0.5 + 1.0
    np.testing.assert_array_equal(state, np.full([20_000], expected))


def _is_in_file(source):
  return isinstance(source, deposits.Deposit) and os.path.exists(source.path)


def test_workers_read_the_clients_that_they_run(context, tmp_path, monkeypatch):
  model = planted.factorization(planted.build_tastes)
  process = algorithms.build_furl(
    model, training=Phase(optimizer=sgd(0.1), epochs=2)
  )
  spec = process.example_spec
  given = planted.rate({f'client {i:02}': 3 + i % 20 for i in range(100)})
  tff_partial.write_clients(tmp_path / 'clients', given.items(), spec)
  clients = tff_partial.open_clients(tmp_path / 'clients', spec)

  def train():
    found = tff_partial.train(process, clients, rounds=3, clients_per_round=90)
    return found.weights, list(found.client_store.read(clients.client_ids))

  with runtimes.cohort(jit=False):
    expected = train()

  def refuse(files, clients):
    raise AssertionError('The driver reads a client.')

  monkeypatch.setattr(stored_clients.Files, 'read', refuse)
  with context:
    planted.assert_same(train(), expected)
    with open(tmp_path / 'clients' / 'examples.bin', 'r+b') as file:
      file.truncate(8)
    # A worker says what is wrong, and not that it is lost.
    with pytest.raises(
      examples.ClientDataError,
      match=r"examples.bin .* client 'client \d\d' are not as they were",
    ):
      train()


def test_a_worker_freezes(context, process, expected):
  frozen = []

  def each(number):
    if number == 1:
      frozen.append(_workers(context)[0])
      os.kill(frozen[0], signal.SIGSTOP)

  with context:
    planted.assert_same(_train(process, each=each), expected)
  assert frozen[0] not in _workers(context)
  assert _is_gone(frozen[0])


def test_shards_that_kill_every_worker_are_given_up(context, process, expected):
  crew, is_over = context._resources.workers, threading.Event()

  def kill():
    while not is_over.wait(0.001):
      for worker in list(crew._workers):
        if worker.block is not None and worker.place:
          with contextlib.suppress(ProcessLookupError):
            os.kill(worker.place[1], signal.SIGKILL)

  _workers(context)
  killer = threading.Thread(target=kill)
  killer.start()
  try:
    with (
      context,
      pytest.raises(
        CohortRuntimeError,
        match=r'5 workers were lost while they ran the clients from place \d+ '
        r'to \d+ of the cohort',
      ),
    ):
      _train(process, 1)
  finally:
    is_over.set()
    killer.join()
  with context:  # The next round is a new one.
    planted.assert_same(_train(process), expected)


def test_a_client_that_fails_is_named(context):
  def check(number):
    with tf.control_dependencies([tf.debugging.assert_less(number, 77)]):
      return tf.identity(number)

  total = summed(check, np.int32)
  with context:
    for _ in range(5):
      # What another worker still does for the round before is not taken.
      assert total(list(range(77))) == sum(range(77))
      with pytest.raises(
        errors.ClientComputationError, match='Client 0 of 78'
      ) as caught:
        total([77] + [0] * 77)
  assert caught.value.client == 0


def test_the_page_on_scale_trains_as_the_cohort_runtime_does(context):
  text = (_ROOT / 'docs/scale.md').read_text(encoding='utf-8')
  blocks = re.findall(r'^```python\n(.*?)^```', text, re.M | re.S)
  known: list[dict[str, Any]] = [{}, {}]
  for names, runtime in zip(known, (context, runtimes.cohort()), strict=True):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(runtimes, 'ray', lambda workers, used=runtime: used)
      for block in blocks:
        exec(block, names)
  on_ray, here = (
    names['result'].weights.trainable['global'] for names in known
  )
  planted.assert_close(on_ray, here)


_DRIVER = """
import tff_partial
from tests.runtimes import ray_workers_test as test
from tff_partial import algorithms, runtimes
process = test.fixture_process.__wrapped__()
with runtimes.ray(workers=2, jit=False) as context:
  print(*test._workers(context), flush=True)
  while True:
    test._train(process)
"""


def test_a_driver_that_is_killed_leaves_nothing():
  with subprocess.Popen(
    [sys.executable, '-c', _DRIVER],
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    cwd=_ROOT,
    text=True,
  ) as driver:
    pids = list(map(int, driver.stdout.readline().split()))
    children = [p.pid for p in psutil.Process(driver.pid).children(True)]
    time.sleep(1.0)
    driver.kill()
  assert len(pids) == 2
  assert all(map(_is_gone, pids))
  # Ray's own agents try for a minute to tell the driver that it is dead.
  assert all(_is_gone(pid, seconds=150) for pid in children)


_NODES = """
import ray
import tff_partial
from ray.cluster_utils import Cluster
from tests.runtimes import ray_workers_test as test
from tests.support import planted
from tff_partial import runtimes
process = test.fixture_process.__wrapped__()
cluster = Cluster(initialize_head=True, head_node_args={'num_cpus': 0})
machines = [cluster.add_node(num_cpus=1) for _ in range(2)]
with runtimes.ray(cluster.address, jit=False, patience=20.0) as context:
  test._workers(context)
  nodes = {w.place[0] for w in context._resources.workers._workers}
  print(len(nodes))
  # Of all on one host a driver joins any, and ends with that.
  own = ray.get_runtime_context().get_node_id()
  lost = next(machine for machine in machines if machine.node_id != own)
  def lose(number):
    if number == 1:
      cluster.remove_node(lost, allow_graceful=False)
  found = test._train(process, each=lose)
cluster.shutdown()
with runtimes.cohort(jit=False):
  planted.assert_same(found, test._train(process))
print('the same')
"""


def test_a_machine_is_lost():
  done = subprocess.run(
    [sys.executable, '-c', _NODES],
    capture_output=True,
    cwd=_ROOT,
    text=True,
    timeout=600,
  )
  assert done.stdout.endswith('the same\n'), done.stderr
  assert '\n2\n' in f'\n{done.stdout}'  # Each machine had a worker.
  assert 'can run any code as its user' in done.stderr
