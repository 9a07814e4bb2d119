"""Low-rank adapters of a trained model, and models of which a part is trained.

LoRA (Hu et al., ICLR 2022): a kernel `W` stays as it is, and the model reads
`W + (alpha / rank) A B`, of which `A [inputs, rank]` is drawn and `B [rank,
outputs]` starts from zero, so that the model's first predictions keep every
bit. What of `A` and `B` clients share is a choice of tiers, and any algorithm
takes the result:

    a         b         method, and the builder that trains it
    'global'  'local'   FedSA-LoRA (Guo et al., ICLR 2025): `build_fed_per`;
                        rebuilt from the support set: `build_fed_recon`
    'frozen'  'global'  FFA-LoRA (Sun et al., ICLR 2024), whose noise under
                        privacy enters no product: `build_fed_avg`
    'global'  'global'  FedIT (Zhang et al., ICASSP 2024): `build_fed_avg`
    'local'   'local'   adapters that stay with their client; beside shared
                        ones (a second call), two adapters as in FedDPA (Yang et
                        al., NeurIPS 2024), summed with equal weights

Variables, not layers, are adapted: of Keras 2 and 3, of any layer whose weights
multiply its inputs or are looked up. A step computes `A B` and the gradient of
`W`, as training of `W` does; what it saves is what clients send and keep. Of
embeddings it computes the whole table.

Deviation: FedDPA weighs its two adapters by each input; here both count fully.
"""

import itertools
import math
from typing import Any

import tensorflow as tf

from tff_partial import random_bits
from tff_partial import tiers
from tff_partial.arguments import checked_numbers
from tff_partial.model import models
from tff_partial.model import selectors
from tff_partial.model.keras_analysis import VariableSpec
from tff_partial.model.keras_variables import ModelError

FROZEN = 'frozen'
_HOLDERS = (tiers.GLOBAL, tiers.LOCAL, FROZEN)


def freeze(
  model: models.PartialModel, *, but: selectors.Selectors = None
) -> models.PartialModel:
  """Freeze the global variables, and train only some of them.

  Frozen variables keep their values: those of `from_keras(initial_weights=)`,
  or drawn ones. They are neither sent nor remembered. Local and group
  variables, and moving averages, are as before.

  Args:
    model: The model.
    but: Variables that are still trained, as for `from_keras(local=)`; for
      example `'.*bias'` for biases alone (BitFit, Zaken et al., ACL 2022).

  Raises:
    ModelError: If `but` matches nothing, or no variable would be trained.
  """
  models.check(model)
  kept = selectors.names_of(model.spec, but, 'but')
  variables = _frozen(model, kept)
  if not any(v.trainable for v in variables):
    raise ModelError(
      'Every variable would be frozen. Name those to train: '
      "`freeze(model, but='head')`."
    )
  return model.with_variables(
    variables, dict, model.tier_of, model.given_values
  )


def add_lora(
  model: models.PartialModel,
  rank: int,
  *,
  where: selectors.Selectors = '.*',
  alpha: float | None = None,
  a: str = tiers.GLOBAL,
  b: str = tiers.GLOBAL,
  train: selectors.Selectors = None,
  name: str = 'lora',
) -> models.PartialModel:
  """Freeze a trained model and add low-rank adapters to its kernels.

  Each adapted variable NAME gets two others, `lora_a/NAME` and `lora_b/NAME`.
  Its axes are divided into inputs and outputs where both together are smallest,
  as is right for `Dense`, `EinsumDense`, `Embedding` and `MultiHeadAttention`
  whose heads are not larger than its inputs. `to_keras` and `personalise` make
  the model without adapters, with the sums as kernels.

  Args:
    model: The model, usually with `initial_weights`.
    rank: Number of columns of A and of rows of B.
    where: Layers or variables to adapt, as for `from_keras(local=)`. All
      matching global variables with two axes or more but biases are adapted.
    alpha: Scale of the adapters, times the rank; by default the rank, for a
      scale of 1.
    a: Holder of A: 'global', 'local', or 'frozen' if it keeps its drawn values.
      It is drawn such that independent inputs of variance 1 keep that variance.
    b: Holder of B: 'global' or 'local'.
    train: Global variables that are trained besides, such as a head or biases.
    name: Prefix of the new names, so that a model can have several adapters.

  Example:
    >>> adapted = add_lora(whole, 2, where='items', b='local')

  Raises:
    ModelError: If a choice is impossible, nothing matches, the rank is too
      large for a kernel, or a variable already has adapters of this name.
  """
  models.check(model)
  _check_choices(rank, alpha, a, b)
  rank = int(rank)
  kept = selectors.names_of(model.spec, train, 'train')
  adapted = [
    _adapted(model, v, rank, name) for v in _kernels(model, where, kept)
  ]
  scale = 1.0 if alpha is None else alpha / rank
  variables = [*_frozen(model, kept)]
  places = itertools.count(len(variables))
  tier_of = dict(model.tier_of)
  for _, *factors in adapted:
    for holder, factor in zip((a, b), factors, strict=True):
      place = next(places)
      tier_of[factor.name] = tiers.GLOBAL if holder == FROZEN else holder
      variables.append(
        factor._replace(
          trainable=holder != FROZEN, position=place, request=place
        )
      )

  def summed(values: dict[str, Any]) -> dict[str, Any]:
    for kernel, factor_a, factor_b in adapted:
      product = tf.matmul(values.pop(factor_a.name), values.pop(factor_b.name))
      values[kernel.name] += tf.cast(scale, kernel.dtype) * tf.reshape(
        product, kernel.shape
      )
    return values

  return model.with_variables(variables, summed, tier_of, model.given_values)


def _check_choices(rank: int, alpha: float | None, a: str, b: str) -> None:
  """Refuse what is no adapter."""
  if checked_numbers.why_not_whole(rank, 1):
    raise ModelError(f'rank={rank!r}: give a whole number of at least 1.')
  if alpha is not None and not (alpha > 0 and math.isfinite(alpha)):
    raise ModelError(f'alpha={alpha!r}: give a number above 0.')
  for what, holder in (('a', a), ('b', b)):
    if holder not in _HOLDERS:
      raise ModelError(
        f'{what}={holder!r}: its holder is one of {", ".join(_HOLDERS)}.'
      )
  if b == FROZEN:
    raise ModelError(
      "b='frozen': B is zero at first, and would remain so. Freeze A: "
      "a='frozen', b='global'."
    )


def _kernels(
  model: models.PartialModel, where: selectors.Selectors, kept: set[str]
) -> list[VariableSpec]:
  """Return the variables to adapt."""
  matched = selectors.names_of(model.spec, where, 'where')
  found = [
    v
    for v in model.variables
    if v.name in matched
    and v.state is None
    and v.dtype.is_floating
    and len(v.shape) > 1
    and not v.name.endswith('bias')
    and model.tier_of[v.name] == tiers.GLOBAL
    and v.owners
  ]
  if not found:
    raise ModelError(
      f'where={where!r} matches no kernel and no embeddings that are global. '
      'Name a layer with such, or leave out what is local or of a group: '
      'these clients train themselves.'
    )
  both = sorted(kept & {v.name for v in found})
  if both:
    raise ModelError(
      f'train: {both} would be trained and have adapters. Name them in `train` '
      'or in `where`.'
    )
  return found


def _frozen(model: models.PartialModel, kept: set[str]) -> list[VariableSpec]:
  """Return all variables, of which global ones that layers own are frozen."""
  return [
    v._replace(
      trainable=v.trainable
      and (
        v.name in kept
        or v.state is not None
        or not v.owners
        or model.tier_of[v.name] != tiers.GLOBAL
      )
    )
    for v in model.variables
  ]


def _adapted(
  model: models.PartialModel, kernel: VariableSpec, rank: int, name: str
) -> tuple[VariableSpec, VariableSpec, VariableSpec]:
  """Return a variable with its two factors, which no layer owns."""
  sizes = [size or 0 for size in kernel.shape]  # None only of local tables.
  sides = [
    (math.prod(sizes[:axis]), math.prod(sizes[axis:]))
    for axis in range(1, len(sizes))
  ]
  inputs, outputs = min(sides, key=sum)
  if rank > min(inputs, outputs):
    raise ModelError(
      f'rank={rank}: {kernel.name!r} of the shape {sizes} has '
      f'rank {min(inputs, outputs)} at most. Give a smaller one, or leave it '
      'out of `where`.'
    )
  names = f'{name}_a/{kernel.name}', f'{name}_b/{kernel.name}'
  if names[0] in model.tier_of:
    raise ModelError(
      f'{kernel.name!r} already has adapters of the name {name!r}. Give others '
      "another one, such as name='own'."
    )
  # The input of a table that is looked up has a single 1.
  is_table = kernel.name.endswith('embeddings')
  deviation = 1.0 if is_table else inputs**-0.5
  shapes = (inputs, rank), (rank, outputs)
  factor = kernel._replace(
    owners=(), value=None, is_assigned=False, draw_rows=None
  )
  return (
    kernel,
    factor._replace(
      name=names[0],
      shape=shapes[0],
      initialize=lambda seed: random_bits.normal(
        seed, shapes[0], stddev=deviation, dtype=kernel.dtype
      ),
    ),
    factor._replace(
      name=names[1],
      shape=shapes[1],
      initialize=lambda seed: tf.zeros(shapes[1], kernel.dtype),
    ),
  )
