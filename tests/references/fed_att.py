"""FedAtt by the code of its authors: their clients, and their server's rule.

Their clients train on sentences. So an example is a sentence of two words, its
number and its label, and the network looks its inputs up by the number.
"""

from collections.abc import Collection
import copy
import importlib
import pathlib
import sys
import types
from typing import Any

import torch

from tests.references import problem
from tests.references import table
from tests.references import torch_models


def prepare(source: pathlib.Path) -> None:
  """Makes the sources importable."""
  sys.path.insert(0, str(source / 'src'))


class _Network(torch.nn.Module):
  """Takes packed numbers of examples; returns log-probabilities."""

  def __init__(self) -> None:
    super().__init__()
    self.base, self.head = torch_models.base_and_head()
    torch_models.fill(self)
    self.inputs = torch.zeros([0])

  def forward(self, packed: Any) -> torch.Tensor:
    x = self.inputs[packed.data]
    return torch.log_softmax(self.head(self.base(x)), -1)


def run(
  comparison: table.Comparison, left_in: Collection[str]
) -> problem.Arrays:
  """Trains as the reference does; see `one_reference`."""
  settings = comparison.settings
  update = importlib.import_module('Update')
  aggregate = importlib.import_module('agg.aggregate')
  options = types.SimpleNamespace(
    local_bs=settings.batch_size,
    local_ep=settings.epochs,
    lr=settings.rate,
    momentum=0.0,
    gpu=-1,
  )
  clients = problem.clients()
  network = _Network()
  weights = network.state_dict()
  # The norm of all elements is SciPy's default, for matrices as for vectors.
  order = 2 if table.SPECTRAL in left_in else None
  for number, cohort in enumerate(problem.ROUNDS):
    trained = []
    for name in cohort:
      x, y = torch_models.tensors(clients[name])
      sentences = [torch.stack(pair) for pair in enumerate_labels(y)]
      client = update.LocalUpdateLM(
        options, sentences, range(len(sentences)), number, name
      )
      client.data_loader = [
        sentences[start : start + settings.batch_size]
        for start in range(0, len(sentences), settings.batch_size)
      ]
      network.load_state_dict(weights)
      network.inputs = x
      trained.append(client.update_weights(copy.deepcopy(network))['params'])
    weights = aggregate.aggregate_att(
      trained, weights, settings.server_rate, order, 0.0
    )
  return problem.named(problem.SERVER, torch_models.arrays_of(weights))


def enumerate_labels(
  y: torch.Tensor,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
  """Returns the number of each example with its label."""
  return list(zip(torch.arange(len(y)), y, strict=True))
