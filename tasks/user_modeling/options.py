"""Options of the user models of HPFL."""

import dataclasses
from typing import ClassVar

from tasks import shared_options as shared
from tasks.options import detail
from tasks.options import option
from tasks.shared_options import TaskOptions
from tasks.task import OWN

PUBLIC = 'public'
ITEMS = (OWN, PUBLIC)
GUM, NCD, NCF, BIAS = 'gum', 'ncd', 'ncf', 'bias'
MODELS = (GUM, NCD, NCF, BIAS)


@dataclasses.dataclass(frozen=True)
class UserModelingOptions(TaskOptions):
  """Options of such a task; the defaults are the paper's."""

  title: ClassVar[str] = 'Tasks assist and movielens_hpfl'
  flag_prefix: ClassVar[str] = 'user_model_'

  model: str = shared.model(GUM, choices=MODELS)
  biases: bool = shared.biases(False)
  biases_in_attributes: bool = detail(
    False, 'With --biases, also add biases of each user in each attribute.'
  )
  identity_relation: bool = detail(
    False, "Begin GUM's RM at the identity, as the code of HPFL's authors does."
  )
  items: str = option(
    OWN,
    "Whether items are each client's own, or public: one table of all items, "
    "whose rows clients share by the items' ids.",
    choices=ITEMS,
  )
  linear: bool = detail(
    False,
    'Predict the score itself, around the middle of the scale and without '
    'bounds; by default a sigmoid keeps predictions within the scale.',
  )
  repeat: int = option(
    0, 'Number of the random division of the records; the paper has five.'
  )


@dataclasses.dataclass(frozen=True)
class AssistOptions(UserModelingOptions):
  """Options of ASSISTments; the defaults are the paper's."""

  name: ClassVar[str] = 'assist'
  loader: ClassVar[str] = 'tasks.user_modeling.task:load_assist'


@dataclasses.dataclass(frozen=True)
class MovielensOptions(UserModelingOptions):
  """Options of MovieLens; the defaults are the paper's."""

  name: ClassVar[str] = 'movielens_hpfl'
  loader: ClassVar[str] = 'tasks.user_modeling.task:load_movielens'
