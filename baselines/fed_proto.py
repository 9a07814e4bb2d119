"""FedProto (Tan et al., AAAI 2022), Algorithm 1: only prototypes are shared.

Each client trains its own model. It sends, for each class, the mean of its
features of that class, the prototype (Eq. 3), and its number of examples, where
each counts by its weight; the server averages prototypes of a class by these
numbers (Eq. 6). The loss keeps
the features of each example near the prototype of its class (Eqs. 7 and 8). No
weights and no gradients are sent.

Deviations: all clients' models have the same shape and initial weights. As in
the authors' code, the second loss compares the features of single examples and
not their mean, by the mean of squares over all features. Eq. 6 is read as a
mean weighted by numbers of examples, without its factor 1 / |N_j|. Classes
without examples in a cohort keep their prototype, and have no loss before they
have one.
"""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tff_partial import client_state
from tff_partial import evaluation
from tff_partial import groups
from tff_partial import tiers
from tff_partial.client_statistics import of_computed
from tff_partial.client_statistics import Server
from tff_partial.composition import compose
from tff_partial.composition import ServerState
from tff_partial.contexts import batch_of
from tff_partial.contexts import ClientContext
from tff_partial.contexts import Compute
from tff_partial.contexts import weights_of_examples
from tff_partial.data import splits
from tff_partial.errors import SettingError
from tff_partial.model import models
from tff_partial.model import outputs as outputs_lib
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training
from tff_partial.tiers import LOCAL
from tff_partial.tiers import PERSONAL


def build_fed_proto(
  model: models.PartialModel,
  *,
  num_classes: int,
  features: Callable[[Any], tf.Tensor],
  classes: Callable[[Any], tf.Tensor] = lambda labels: labels,
  penalty: float = 1.0,
  training: Phase = Phase(),
) -> PartialProcess:
  """Build FedProto: train personal models, tied by class prototypes.

  Args:
    model: The model.
    num_classes: The number of classes.
    features: (a batch of the model's outputs) -> float features
      `[batch, size]`.
    classes: (a batch of labels) -> integers `[batch]` from 0 on.
    penalty: lambda of Eq. 8; 0 for purely local training.
    training: How a client trains: optimizer, batches, epochs.

  Example:
    >>> process = baselines.build_fed_proto(
    ...   model, num_classes=2, features=lambda logits: logits
    ... )

  Raises:
    CompositionError, PhaseError, SettingError: If the arguments do not fit
      together.
  """
  if not 0.0 <= penalty < float('inf') or num_classes < 1:
    raise SettingError(
      f'penalty={penalty}, num_classes={num_classes}: the penalty must be a '
      'finite number of 0 or more, and there must be a class.'
    )
  features = _in_float32(features)
  first_prototypes = _first_prototypes(model, num_classes, features)

  def held_near(client: ClientContext) -> tf.Tensor:
    batch = batch_of(client)
    of = tf.cast(classes(batch.y), tf.int32)
    distances = tf.reduce_mean(
      tf.math.squared_difference(
        features(batch.predictions), tf.gather(client.server['prototypes'], of)
      ),
      -1,
    )
    is_known = tf.gather(client.server['is_known'], of)
    return penalty * batch.mean(tf.where(is_known, distances, 0.0))

  def prototypes(client: ClientContext) -> Any:
    found = features(client.predict(tiers.personal_copy, by_own_moments=True))
    of = tf.cast(classes(client.examples['y']), tf.int32)
    weights = weights_of_examples(client.example_weights)
    members = tf.one_hot(of, num_classes) * weights[:, tf.newaxis]
    return collections.OrderedDict(
      sums=tf.matmul(members, found, transpose_a=True),
      counts=tf.reduce_sum(members, 0),
    )

  return compose(
    model,
    client_state=client_state.persist_personal,
    work=[
      partial_training.trained(training, held_near, train=(PERSONAL, LOCAL)),
      Compute('prototypes', prototypes, training.on),
    ],
    statistics=[of_computed('prototypes', _averaged)],
    server_state=first_prototypes,
  )


def _averaged(server: Server, joined: Any) -> Server:
  """Return the server with the mean prototypes of a cohort, by class."""
  counts = joined['counts'][:, tf.newaxis]
  return server._replace(
    state=collections.OrderedDict(
      prototypes=tf.where(
        counts > 0,
        tf.math.divide_no_nan(joined['sums'], counts),
        server.state['prototypes'],
      ),
      is_known=tf.logical_or(server.state['is_known'], joined['counts'] > 0),
    )
  )


build_fed_proto_eval = partial_training.build_personal_evaluation


def build_fed_proto_nearest_eval(
  model: models.PartialModel,
  *,
  num_classes: int,
  features: Callable[[Any], tf.Tensor],
  logits: str | None = None,
  personalise: Phase | None = None,
  split: splits.Split | None = None,
) -> evaluation.Evaluation:
  """Build an evaluation by the nearest prototype instead of the client's head.

  The paper's prediction (section 3.3): the class whose prototype at the server
  is nearest to the client's features of an example, by Euclidean distance.
  Logits are negative squared distances, whose softmax is that of prototypical
  networks (Snell et al., 2017, Eq. 2). Classes without a prototype yet count as
  farther than all others; if none has one, the head predicts.

  Args:
    model: The model.
    num_classes: As in training.
    features: As in training.
    logits: Name of the logits among the model's outputs; None if they are its
      only output.
    personalise: How clients, such as new ones, train their models before, only
      by the model's loss; not at all by default.
    split: As for `evaluation.build_query_evaluation`.

  Example:
    >>> evaluation = baselines.build_fed_proto_nearest_eval(
    ...   model, num_classes=2, features=lambda logits: logits
    ... )

  Raises:
    CompositionError, PhaseError, SettingError: If the arguments do not fit
      together.
  """
  features = _in_float32(features)
  first_prototypes = _first_prototypes(model, num_classes, features)
  found = model.prediction_spec
  if logits is not None:
    found = found.get(logits) if isinstance(found, Mapping) else None
  if not isinstance(found, tf.TensorSpec) or found.shape != [num_classes]:
    raise SettingError(
      f'logits={logits!r}: the model predicts {model.prediction_spec}, where '
      f'it should have the logits of {num_classes} classes. Name one of '
      'several outputs; None is for the only one.'
    )

  def by_nearest(client: ClientContext) -> Any:
    outputs = batch_of(client).predictions
    said = outputs if logits is None else outputs[logits]
    is_known = client.server['is_known']
    distances = groups.squared_distances(
      features(outputs), client.server['prototypes']
    )
    farthest = tf.reduce_max(
      tf.where(is_known, distances, 0.0), -1, keepdims=True
    )
    distances = tf.where(is_known, distances, farthest + 1.0)
    chosen = tf.where(
      tf.reduce_any(is_known), -tf.cast(distances, said.dtype), said
    )
    return chosen if logits is None else {**outputs, logits: chosen}

  return evaluation.build_query_evaluation(
    model,
    client_state=client_state.persist_personal,
    train=(PERSONAL, LOCAL),
    predict_fn=by_nearest,
    server_state=first_prototypes,
    personalise=personalise,
    split=split,
  )


def _in_float32(
  features: Callable[[Any], tf.Tensor],
) -> Callable[[Any], tf.Tensor]:
  """Return features in the precision of prototypes, whatever the model's."""
  return lambda outputs: tf.cast(features(outputs), tf.float32)


def _first_prototypes(
  model: models.PartialModel,
  num_classes: int,
  features: Callable[[Any], tf.Tensor],
) -> ServerState:
  """Return the function to the server's first state: no prototypes."""
  size = outputs_lib.num_features(model.prediction_spec, features)
  return lambda model: collections.OrderedDict(
    prototypes=tf.zeros([num_classes, size]),
    is_known=tf.fill([num_classes], False),
  )
