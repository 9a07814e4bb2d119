"""Methods of PFLlib, by its own servers and clients.

Its servers run their own rounds. What is set from outside is who takes part and
the order of the examples, and that a server measures and saves nothing.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
import functools
import importlib
import pathlib
import sys
import types
from typing import Any

import numpy as np
import torch

from tests.references import problem
from tests.references import table
from tests.references import torch_models

# The module and the class of each server.
_SERVERS = {
  'FedAvg': ('serveravg', 'FedAvg'),
  'FedPer': ('serverper', 'FedPer'),
  'FedRep': ('serverrep', 'FedRep'),
  'FedBABU': ('serverbabu', 'FedBABU'),
  'LG-FedAvg': ('serverlg', 'LG_FedAvg'),
  'FedProx': ('serverprox', 'FedProx'),
  'SCAFFOLD': ('serverscaffold', 'SCAFFOLD'),
  'Ditto': ('serverditto', 'Ditto'),
  'pFedMe': ('serverpFedMe', 'pFedMe'),
  'FedProto': ('serverproto', 'FedProto'),
}


def prepare(source: pathlib.Path, examples: Sequence[Any] = ()) -> None:
  """Makes the sources importable, and gives them our clients' examples.

  Args:
    examples: Those of each client, pairs; those of the problem by default.
  """
  sys.path.insert(0, str(source / 'system'))
  # An attack that it can show, and which wants more packages.
  attack: Any = types.ModuleType('utils.dlg')
  attack.DLG = None
  sys.modules['utils.dlg'] = attack
  examples = examples or [
    torch_models.examples(fields) for fields in problem.clients().values()
  ]
  for module in ('clients.clientbase', 'servers.serverbase'):
    reading: Any = importlib.import_module(f'flcore.{module}')
    reading.read_client_data = lambda dataset, number, **_: examples[number]


def run(
  comparison: table.Comparison, left_in: Collection[str]
) -> problem.Arrays:
  """Trains as the reference does; see `one_reference`."""
  _fix_batches(table.DROPS in left_in)
  server = make_server(
    comparison.method,
    network(*torch_models.base_and_head(), torch_models.fill),
    arguments(comparison.settings),
  )
  cohorts = iter(problem.ROUNDS)
  let_choose(
    server,
    lambda: [server.clients[problem.NAMES.index(n)] for n in next(cohorts)],
  )
  mend = _MENDED.get(comparison.method)
  if mend:
    mend(server, left_in)
  server.train()
  return _results(comparison.method, server)


def network(
  base: Any, head: Any, fill: Callable[[Any], None] = lambda model: None
) -> Any:
  """Returns a base and a head as one network of the reference's."""
  models = importlib.import_module('flcore.trainmodel.models')
  model = models.BaseHeadSplit(base, head)
  fill(model)
  return model


def make_server(method: str, model: Any, given: types.SimpleNamespace) -> Any:
  """Makes a server, which measures and saves nothing."""
  module, name = _SERVERS[method]
  given.model = model
  server = getattr(importlib.import_module(f'flcore.servers.{module}'), name)(
    given, 0
  )
  for quiet in ('evaluate', 'evaluate_personalized', 'save_results'):
    setattr(server, quiet, lambda: None)
  server.save_global_model = lambda: None
  server.rs_test_acc = server.rs_test_acc_per = [0.0]
  return server


def let_choose(server: Any, choose: Callable[[], list[Any]]) -> None:
  """Has a server take clients from a function."""

  def chosen() -> list[Any]:
    clients = choose()
    server.current_num_join_clients = len(clients)
    return clients

  server.select_clients = chosen


def arguments(
  settings: problem.Settings, **others: Any
) -> types.SimpleNamespace:
  """What the reference's command line says, with its defaults."""
  taking_part = len(problem.ROUNDS[0]) / len(problem.NAMES)
  return types.SimpleNamespace(
    **{
      'algorithm': '',
      'alpha': settings.mixture,
      'auto_break': False,
      'batch_num_per_client': 2,
      'batch_size': settings.batch_size,
      'beta': settings.server_rate,
      'client_drop_rate': 0.0,
      'dataset': 'ours',
      'device': 'cpu',
      'dlg_eval': False,
      'dlg_gap': 100,
      'eval_gap': 1,
      'few_shot': 0,
      'fine_tuning_epoch_new': 0,
      'fine_tuning_epochs': 0,
      # Its servers run one round more than they are told.
      'global_rounds': len(problem.ROUNDS) - 1,
      'goal': '',
      'join_ratio': taking_part,
      'K': settings.repeats,
      'lamda': settings.penalty,
      'learning_rate_decay': False,
      'learning_rate_decay_gamma': 1.0,
      'local_epochs': settings.epochs,
      'local_learning_rate': settings.rate,
      'mu': settings.penalty,
      'num_classes': problem.NUM_CLASSES,
      'num_clients': len(problem.NAMES),
      'num_new_clients': 0,
      'p_learning_rate': settings.personal_rate,
      'plocal_epochs': settings.personal_epochs,
      'random_join_ratio': False,
      'save_folder_name': '',
      'send_slow_rate': 0.0,
      'server_learning_rate': settings.server_rate,
      'time_select': False,
      'time_threthold': 10000,
      'top_cnt': 100,
      'train_slow_rate': 0.0,
      **others,
    }
  )


def _fix_batches(drop_remainder: bool) -> None:
  """Has clients take their examples in their order."""
  base = importlib.import_module('flcore.clients.clientbase')

  def load(self: Any, batch_size: int | None = None) -> Any:
    return torch.utils.data.DataLoader(
      base.read_client_data(self.dataset, self.id),
      batch_size or self.batch_size,
      drop_last=drop_remainder,
    )

  base.Client.load_train_data = load


def _before(instance: Any, method: str, work: Callable[[], None]) -> None:
  """Has an object do some work before one of its methods."""
  as_it_was = getattr(instance, method)

  def replaced(*given: Any) -> Any:
    work()
    return as_it_was(*given)

  setattr(instance, method, replaced)


def _mend_ditto(server: Any, left_in: Collection[str]) -> None:
  if table.FIRST_OF_SERVER in left_in:
    return
  begun = set()

  def begin(client: Any) -> None:
    if client.id not in begun:
      begun.add(client.id)
      client.model_per.load_state_dict(client.model.state_dict())

  for client in server.clients:
    _before(client, 'ptrain', functools.partial(begin, client))


def _mend_p_fed_me(server: Any, left_in: Collection[str]) -> None:
  if table.DECAYS not in left_in:
    for client in server.clients:
      for group in client.optimizer.param_groups:
        group['mu'] = 0.0


def _mend_fed_proto(server: Any, left_in: Collection[str]) -> None:
  received, sent = server.receive_protos, server.send_protos
  kept: dict[int, Any] = {}

  def receive() -> None:
    if table.MET_IN_TRAINING not in left_in:
      for client in server.selected_clients:
        client.collect_protos()
    received()
    if table.ALIKE not in left_in:
      server.uploaded_protos = list(_once_an_example(server))

  def send() -> None:
    if table.FORGETS not in left_in:
      for label, prototype in kept.items():
        if label not in server.global_protos:
          server.global_protos[label] = prototype
      kept.update(server.global_protos)
    sent()

  server.receive_protos, server.send_protos = receive, send


def _once_an_example(server: Any) -> Iterator[dict[int, Any]]:
  """Yields a client's prototypes as often as it has examples of the class."""
  clients = list(problem.clients().values())
  for number, prototypes in zip(
    server.uploaded_ids, server.uploaded_protos, strict=True
  ):
    for label in clients[number]['y'].tolist():
      yield {label: prototypes[label]}


_MENDED = {
  'Ditto': _mend_ditto,
  'pFedMe': _mend_p_fed_me,
  'FedProto': _mend_fed_proto,
}


def _results(method: str, server: Any) -> problem.Arrays:
  found: problem.Arrays = {}
  arrays_of = torch_models.arrays_of
  if method == 'FedProto':
    prototypes = np.zeros([problem.NUM_CLASSES, problem.NUM_FEATURES])
    for label, prototype in server.global_protos.items():
      if isinstance(prototype, torch.Tensor):
        prototypes[label] = prototype.numpy()
    found |= problem.named(problem.SERVER, {'prototypes': prototypes})
  else:
    # Some servers hold only the part that is shared.
    part = {'LG-FedAvg': 'head.', 'FedAvg': '', 'FedProx': ''}.get(method)
    names = dict(server.global_model.named_parameters())
    if part is None and not all(name in torch_models.NAMES for name in names):
      part = 'base.'
    found |= problem.named(
      problem.SERVER,
      arrays_of({f'{part or ""}{n}': v for n, v in names.items()}),
    )
  if method == 'SCAFFOLD':
    of_model = [name for name, _ in server.global_model.named_parameters()]
    holders = {problem.SERVER: server.global_c}
    for name, client in zip(problem.NAMES, server.clients, strict=True):
      holders[name] = client.client_c
    for name, controls in holders.items():
      found |= problem.named(
        f'{name} control', arrays_of(dict(zip(of_model, controls, strict=True)))
      )
  keeps = {
    'FedPer': ('model', 'head.'),
    'FedRep': ('model', 'head.'),
    'LG-FedAvg': ('model', 'base.'),
    'FedProto': ('model', ''),
    'Ditto': ('model_per', ''),
  }.get(method)
  if keeps:
    attribute, begins = keeps
    for name, client in zip(problem.NAMES, server.clients, strict=True):
      kept = getattr(client, attribute).named_parameters()
      found |= problem.named(
        name, arrays_of({n: v for n, v in kept if n.startswith(begins)})
      )
  return found
