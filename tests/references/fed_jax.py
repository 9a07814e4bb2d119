"""Methods of FedJAX, by its own algorithms."""

from collections.abc import Callable, Collection, Iterator, Mapping
import importlib
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.references import problem
from tests.references import table

# What a gradient at a mixture is kept under, beside that by v.
_AT_MIXTURE = 'at the mixture'
_ALPHA = 'alpha'


def prepare(source: pathlib.Path) -> None:
  """Makes the sources importable."""
  sys.path.insert(0, str(source))
  importlib.import_module('fedjax')


class _InOrder:
  """A client's examples, which it takes in the same batches in each epoch."""

  def __init__(self, fields: Mapping[str, np.ndarray]):
    self._fields = fields

  def __len__(self) -> int:
    return len(self._fields['y'])

  def shuffle_repeat_batch(self, hparams: Any) -> Iterator[problem.Arrays]:
    for _ in range(hparams.num_epochs):
      yield from problem.batches(self._fields, hparams.batch_size)


def _losses(weights: Mapping[str, Any], batch: Any, rng: Any) -> jax.Array:
  """The cross-entropy of each example."""
  features = jnp.tanh(
    batch['x'] @ weights['base/kernel'] + weights['base/bias']
  )
  logits = features @ weights['head/kernel'] + weights['head/bias']
  likelihoods = jax.nn.log_softmax(logits)
  return -jnp.take_along_axis(likelihoods, batch['y'][:, None], 1)[:, 0]


_gradient = jax.grad(lambda *given: jnp.mean(_losses(*given)))


def run(
  comparison: table.Comparison, left_in: Collection[str]
) -> problem.Arrays:
  """Trains as the reference does; see `one_reference`."""
  import fedjax

  settings = comparison.settings
  hparams = fedjax.ShuffleRepeatBatchHParams(
    batch_size=settings.batch_size,
    num_epochs=settings.epochs,
    skip_shuffle=True,
  )
  over_epochs = table.OVER_EPOCHS in left_in
  of_client: Callable[[Any], Any] = (
    fedjax.ClientDataset if over_epochs else _InOrder
  )
  clients = {n: of_client(fields) for n, fields in problem.clients().items()}
  sgd = fedjax.optimizers.sgd
  if comparison.method == 'APFL':
    algorithm = _apfl(settings, hparams, left_in)
  elif comparison.method == 'FedProx':
    algorithm = fedjax.algorithms.fed_prox.fed_prox(
      _losses, sgd(settings.rate), sgd(1.0), hparams, settings.penalty
    )
  else:
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
      _gradient, sgd(settings.rate), sgd(1.0), hparams
    )
  state = algorithm.init(
    {name: jnp.array(v) for name, v in problem.first_weights().items()}
  )
  key = jax.random.PRNGKey(0)  # Nothing is drawn.
  for cohort in problem.ROUNDS:
    state, _ = algorithm.apply(state, [(n, clients[n], key) for n in cohort])
  found = problem.named(problem.SERVER, state.params)
  if comparison.method == 'APFL':
    for name, kept in state.client_states.items():
      found |= problem.named(name, kept.params)
      alphas = [
        float(alpha) for alpha in kept.interpolation_coefficients.values()
      ]
      # All the same, unless each variable has its own.
      found |= problem.named(name, {_ALPHA: np.float32(np.mean(alphas))})
  return found


def _apfl(
  settings: problem.Settings, hparams: Any, left_in: Collection[str]
) -> Any:
  import fedjax

  apfl = importlib.reload(importlib.import_module('fedjax.algorithms.apfl'))
  interpolate, slope = apfl.interpolate_params, apfl.interpolation_grad_fn

  def mixed(alphas: Any, own: Any, shared: Any) -> Any:
    return {**interpolate(alphas, own, shared), _ALPHA: alphas}

  def gradient(weights: Any, batch: Any, rng: Any) -> Any:
    alphas = weights.get(_ALPHA)
    found = _gradient(
      {n: v for n, v in weights.items() if n != _ALPHA}, batch, rng
    )
    if alphas is None:
      return found
    by_own = {name: alphas[name] * v for name, v in found.items()}
    whole = table.WHOLE_GRADIENT in left_in
    return {**(found if whole else by_own), _AT_MIXTURE: found}

  def slope_of_alphas(gradients: Any, own: Any, shared: Any) -> Any:
    found = slope(gradients[_AT_MIXTURE], own, shared)
    if table.ALPHA_BY_VARIABLE in left_in:
      return found
    total = sum(found.values())
    return dict.fromkeys(found, total)

  def step(gradients: Any, state: Any, weights: Any) -> Any:
    return state, {
      name: v - settings.rate * gradients[name] for name, v in weights.items()
    }

  apfl.interpolate_params = mixed
  apfl.interpolation_grad_fn = slope_of_alphas
  return apfl.adaptive_personalized_federated_learning(
    gradient,
    fedjax.optimizers.Optimizer(lambda weights: (), step),
    fedjax.optimizers.sgd(1.0),
    hparams,
    settings.mixture,
  )
