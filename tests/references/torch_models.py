"""The problem's model in PyTorch, for the references that are written in it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tests.references import problem

# What PyTorch calls the weights.
NAMES = {
  'base.0.weight': 'base/kernel',
  'base.0.bias': 'base/bias',
  'head.weight': 'head/kernel',
  'head.bias': 'head/bias',
}


def fill(module: torch.nn.Module) -> None:
  """Sets the weights of a module, which has a base and a head, to the first."""
  first = problem.first_weights()
  with torch.no_grad():
    for name, parameter in module.named_parameters():
      # PyTorch has outputs first.
      parameter.copy_(torch.from_numpy(first[NAMES[name]].T.copy()))


def base_and_head() -> tuple[torch.nn.Module, torch.nn.Module]:
  """Makes the two parts."""
  base = torch.nn.Sequential(
    torch.nn.Linear(problem.NUM_INPUTS, problem.NUM_FEATURES), torch.nn.Tanh()
  )
  return base, torch.nn.Linear(problem.NUM_FEATURES, problem.NUM_CLASSES)


def arrays_of(named: Mapping[str, Any]) -> problem.Arrays:
  """Returns weights as NumPy arrays under the problem's names."""
  return {
    NAMES[name]: np.array(tensor.detach().numpy().T)
    for name, tensor in named.items()
  }


def examples(fields: Mapping[str, np.ndarray]) -> Any:
  """Returns examples as pairs of tensors."""
  return list(zip(*tensors(fields), strict=True))


def tensors(
  fields: Mapping[str, np.ndarray],
) -> tuple[torch.Tensor, torch.Tensor]:
  """Returns x and y."""
  x, y = torch.from_numpy(fields['x']), torch.from_numpy(fields['y'])
  return x, y.to(torch.int64)
