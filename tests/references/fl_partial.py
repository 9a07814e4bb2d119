"""Methods of FL_partial_personalization, by its own rounds.

It was written for an earlier PyTorch, which is made up for here. Its models and
its reports are not needed, and so neither are the packages that they import.
"""

from collections.abc import Collection, Sequence
import functools
import importlib
import pathlib
import sys
import types
from typing import Any

import torch

from tests.references import problem
from tests.references import table
from tests.references import torch_models

_CLASSES = {
  'FedAvg': 'FedAvg',
  'FedAlt': 'FedAlt',
  'FedSim': 'FedSim',
  'pFedMe': 'PFedMe',
}


def prepare(source: pathlib.Path) -> None:
  """Makes the sources importable."""
  sys.path.insert(0, str(source))
  sys.modules['pfl.metrics'] = types.ModuleType('pfl.metrics')
  models = types.ModuleType('pfl.models')
  models.__path__ = [str(source / 'pfl' / 'models')]
  sys.modules['pfl.models'] = models
  # Later versions of PyTorch want to be told the direction.
  importlib.import_module(
    'pfl.optim.server_optimizers'
  ).F = types.SimpleNamespace(
    sgd=functools.partial(torch.optim._functional.sgd, maximize=False)
  )


class _Loader:
  """Examples as the reference asks for them."""

  def __init__(self, batch_size: int):
    self._batches = {
      name: [
        torch_models.tensors(batch)
        for batch in problem.batches(fields, batch_size)
      ]
      for name, fields in problem.clients().items()
    }

  def get_loss_and_metrics_fn(self) -> Any:
    return torch.nn.functional.cross_entropy, None

  def get_client_dataloader(self, client: str) -> Sequence[Any]:
    return self._batches[client]


def _build(head_is_local: bool) -> Any:
  base_model = importlib.import_module('pfl.models.base_model')

  class Network(base_model.PFLBaseModel):
    def __init__(self) -> None:
      super().__init__()
      self.base, self.head = torch_models.base_and_head()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
      return self.head(self.base(x))

  network = Network()
  torch_models.fill(network)
  network.is_on_client = lambda name: head_is_local and name.startswith('head.')
  network.is_on_server = lambda name: not network.is_on_client(name)
  return network


def run(
  comparison: table.Comparison, left_in: Collection[str]
) -> problem.Arrays:
  """Trains as the reference does; see `one_reference`."""
  settings, method = comparison.settings, comparison.method
  head_is_local = method in ('FedAlt', 'FedSim')
  optim = importlib.import_module('pfl.optim')
  as_it_is = getattr(optim, _CLASSES[method])
  trainer = _mended(as_it_is, settings.penalty, left_in)(
    _Loader(settings.batch_size),
    available_clients=list(problem.NAMES),
    clients_to_cache=None,
    server_model=_build(head_is_local),
    server_optimizer='sgd',
    server_lr=1.0,
    server_momentum=0.0,
    max_grad_norm=0.0,
    clip_grad_norm=False,
    save_dir='',
    seed=0,
    num_pfedme_steps=settings.repeats,
    pfedme_reg_param=settings.penalty,
  )
  at_clients = types.SimpleNamespace(
    client_lr=settings.rate, client_momentum=0.0, scheduler='const'
  )
  cohorts = iter(problem.ROUNDS)
  trainer.sample_clients = lambda number: next(cohorts)
  for cohort in problem.ROUNDS:
    trainer.run_one_round(len(cohort), settings.epochs, 'sgd', at_clients)
  found = problem.named(
    problem.SERVER,
    torch_models.arrays_of(trainer.server_model.server_state_dict()),
  )
  if head_is_local:
    for name, kept in trainer.saved_client_params.items():
      found |= problem.named(name, torch_models.arrays_of(kept))
  return found


def _mended(as_it_is: Any, penalty: float, left_in: Collection[str]) -> Any:
  """Returns a class of the reference's without its departures."""

  class Mended(as_it_is):
    _begun = False

    def run_local_updates(self, client_loader: Any, *given: Any) -> Any:
      self._begun = False
      loss, number = super().run_local_updates(client_loader, *given)
      if table.BY_BATCHES not in left_in:
        number = sum(len(y) for _, y in client_loader)
      return loss, number

    def reset_temp_model(self) -> None:
      if table.BEGINS_ANEW in left_in or not self._begun:
        super().reset_temp_model()
      self._begun = True

    def get_l2_reg_pfedme(self) -> Any:
      if table.NO_PULL in left_in:
        return super().get_l2_reg_pfedme()
      pairs = zip(
        self.temp_model.parameters(),
        self.combined_model.parameters(),
        strict=True,
      )
      return penalty / 2 * sum(((v - w.detach()) ** 2).sum() for v, w in pairs)

  return Mended
