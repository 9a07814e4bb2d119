"""Variables that layers change in training: their treatment and tier.

Batch normalization is the usual case: it changes its moving averages, which
evaluation reads. No gradient moves them; a client's training does, as Keras's
`fit` would. Where they are kept is one of three things.

    'averaged'  at the server, like GLOBAL weights. A client changes a copy, and
                the server takes the mean, with the weights of the update. A
                moving mean becomes that of the pooled examples. A moving
                variance becomes the mean of clients' variances, and a share of
                that between their means: `1 - momentum**steps`, which the steps
                of a round replace; momentum 0 gives the pooled variance.
    'local'     with the client, like LOCAL weights (SiloBN; with scale and
                shift local, too, FedBN).
    'frozen'    nowhere: they keep their first values, and the layer normalizes
                by them in training, too, like a layer with `trainable=False`.
"""

from collections.abc import Collection, Mapping
from typing import TypeAlias

from tff_partial import tiers
from tff_partial.model import keras_analysis
from tff_partial.model import selectors
from tff_partial.model.keras_3_models import Keras3Functions
from tff_partial.model.keras_functions import Keras2Functions
from tff_partial.model.keras_refusals import refuse_updates
from tff_partial.model.keras_variables import ModelError

AVERAGED, LOCAL, FROZEN = 'averaged', 'local', 'frozen'
TREATMENTS = (AVERAGED, LOCAL, FROZEN)
# Keras's names of the two moving averages of batch normalization.
_MEAN, _VARIANCE = 'moving_mean', 'moving_variance'

# A Keras model as pure functions of its variables' values.
ModelFunctions: TypeAlias = Keras2Functions | Keras3Functions
# One treatment for all, or each treatment with what selects its variables.
State: TypeAlias = str | Mapping[str, selectors.Selectors] | None


def treat(
  functions: ModelFunctions, tier_of: Mapping[str, str], state: State
) -> tuple[ModelFunctions, dict[str, str]]:
  """Set the treatment of the variables that layers change in training.

  Args:
    functions: The model's functions.
    tier_of: Variable name to tier.
    state: The treatment, see `from_keras`. States of LOCAL layers are local
      where it says nothing.

  Returns:
    The functions with their new variables, and the tier of each variable.

  Raises:
    ModelError: If a treatment is missing, is none of them, or belongs to
      variables that no layer changes.
  """
  changed = functions.changed()
  chosen = _chosen(functions.spec, changed, state)
  for name in sorted(changed - set(chosen)):
    if tier_of[name] != tiers.LOCAL:
      refuse_updates(name)
    chosen[name] = LOCAL
  if not chosen:
    return functions, dict(tier_of)
  variables, found = [], dict(tier_of)
  for variable in functions.spec.variables:
    treatment = chosen.get(variable.name)
    if treatment in (AVERAGED, LOCAL) and not variable.dtype.is_floating:
      raise ModelError(
        f'state: {variable.name!r}, which a layer changes, is of '
        f"{variable.dtype.name}. Make it of float32, or keep it 'frozen'."
      )
    if treatment is not None:
      variable = variable._replace(
        state=treatment, trainable=treatment != FROZEN
      )
    if treatment == LOCAL:
      found[variable.name] = tiers.LOCAL
    elif treatment == AVERAGED and tier_of[variable.name] == tiers.LOCAL:
      found[variable.name] = tiers.GLOBAL
    variables.append(variable)
  return functions.with_variables(variables), found


def variances(
  names: Collection[str], tier_of: Mapping[str, str]
) -> dict[str, str]:
  """Return the name of each moving variance to that of its moving mean.

  A variance without a mean in the same tier is averaged like other states.

  Args:
    names: The states.
    tier_of: Variable name to tier.
  """
  means = {n: n.replace(_VARIANCE, _MEAN) for n in names if _VARIANCE in n}
  return {
    variance: mean
    for variance, mean in means.items()
    if mean in names and tier_of[variance] == tier_of[mean]
  }


def _chosen(
  spec: keras_analysis.KerasSpec, changed: frozenset[str], state: State
) -> dict[str, str]:
  """Return the treatment of each variable that `state` names."""
  if state is None:
    return {}
  if isinstance(state, str):
    state = {state: list(changed)}
    if not changed:
      raise ModelError(
        f'state={next(iter(state))!r}: no layer changes a variable in '
        'training. Leave it out.'
      )
  chosen: dict[str, str] = {}
  for treatment, given in state.items():
    if treatment not in TREATMENTS:
      raise ModelError(
        f'state={treatment!r}: the treatments are {", ".join(TREATMENTS)}.'
      )
    names = selectors.names_of(spec, given, f'state[{treatment!r}]')
    if not names & changed:
      raise ModelError(
        f'state[{treatment!r}]={given!r} matches no variable that a layer '
        f'changes in training, which are {sorted(changed)}.'
      )
    for name in names & changed:
      if chosen.setdefault(name, treatment) != treatment:
        raise ModelError(
          f'state: {name!r} is {chosen[name]} and {treatment}. Name it once.'
        )
  return chosen
