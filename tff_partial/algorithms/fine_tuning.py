"""Local fine-tuning of a model that was trained for all.

Wang et al., 2019, "Federated evaluation of on-device personalization", and Yu
et al., 2020, "Salvaging federated learning by local adaptation": a client
continues to train the received model on its own examples. The model may be
trained by any method, usually FedAvg.
"""

from tff_partial import client_state
from tff_partial import evaluation
from tff_partial.data import splits
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import LOCAL


def build_fine_tuning_eval(
  model: models.PartialModel,
  *,
  personalise: Phase = Phase(),
  client_state: client_state.ClientState = client_state.stateless,
  split: splits.Split | None = None,
) -> evaluation.Evaluation:
  """Build an evaluation with the model, or a part of it, tuned by each client.

  Args:
    model: The model.
    personalise: How clients tune. For a part of the model name its variables,
      such as `variable_filter='head/.*'`.
    client_state: What clients remember from training, if the model has local
      variables, which are also tuned.
    split: As for `evaluation.build_query_evaluation`.

  Example:
    >>> evaluation = algorithms.build_fine_tuning_eval(
    ...   whole, personalise=Phase(epochs=5)
    ... )

  Raises:
    PhaseError: If its `variable_filter` names no variable.
  """
  return evaluation.build_query_evaluation(
    model,
    client_state=client_state,
    train=(GLOBAL, LOCAL),
    personalise=personalise,
    split=split,
  )
