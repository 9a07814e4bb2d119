"""Hierarchical Personalized Federated Learning (Wu et al., WWW 2021).

A client is a school or a region with its own users and items. Its model has
public components, GLOBAL variables whose rows belong to attributes that all
clients know, and private ones, LOCAL tables of its users and items, whose sizes
differ between clients. In a round (Algorithm 3) a client

1. updates its model by the server's (Algorithm 1): the public rows by Eq. 1,
   the private rows by Eq. 2; the more accurate it is on the attribute itself,
   the less;
2. trains the whole model on its records, and measures its accuracy on each
   attribute on held-out records;
3. sends its public components and drafts of its private ones.

The server (Algorithm 2) averages the public rows of an attribute over the
clients that are accurate enough on it, weighted by accuracy times records
(Eq. 3), and aggregates the drafts (see `drafts/`).

Interpretations of the paper: the number of iterations on an attribute is the
number of training records that have it. If a client holds out no record of an
attribute, its accuracy is that on all records, and zero if it holds out none at
all: then it shares no row, and Eqs. 1 and 2 keep nothing of its own. The
threshold p is a fraction of the mean accuracy on the attribute of all clients
that trained in the previous round. GLOBAL variables whose rows are not
attributes, such as HM, are averaged by accuracy times records, a record once
for each of its attributes, or stay with the clients. A client starts from the
server's public components and random private rows. Eq. 2 is as printed unless
`by_nearness`.

Deviations if sums are joined with the update, so that one clip and its noise
cover all that a client sends: records of Eq. 3 are shares of a client's own, so
that large clients count no more than small ones; rows and thresholds move by
means of moves (`drafts/row_means.py`), by less where data are few; and a
client that measured no accuracy on an attribute does not move its threshold.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
import functools
from typing import Any, NamedTuple

import tensorflow as tf

from tff_partial import client_state
from tff_partial import evaluation
from tff_partial import tiers
from tff_partial.arguments import checked_numbers
from tff_partial.client_statistics import Join
from tff_partial.client_statistics import Statistic
from tff_partial.composition import Aggregation
from tff_partial.composition import compose
from tff_partial.composition import with_equal_weights
from tff_partial.contexts import ClientContext
from tff_partial.contexts import Compute
from tff_partial.contexts import outcome_of
from tff_partial.contexts import OverwriteWeights
from tff_partial.data import splits
from tff_partial.drafts import centers as drafts_lib
from tff_partial.drafts.row_means import row_means
from tff_partial.errors import SettingError
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.phases import placed
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import LOCAL
from tff_partial.tiers import PERSONAL

_ACCURACY, _RECORDS, _THRESHOLD = 'accuracy', 'records', 'threshold'
_ON_EACH, _ON_ALL, _TRAINED = 'on_each', 'on_all', 'trained'
# The weight of a client for thresholds, if they are joined with the update:
# accuracies differ far more than public rows, and matter less.
_LOW = 0.1


class Attributes(NamedTuple):
  """Publicly known attributes of items.

  Attributes:
    number: The number of attributes, K of the paper.
    of: From inputs `[examples, ...]` to indicators of their attributes, float
      `[examples, number]`, zeros and ones.
    rows: The GLOBAL variables whose rows belong to attributes,
      `[number, ...]`.
    is_correct: (labels, predictions) -> True for correct predictions, bool
      `[examples]`.
  """

  number: int
  of: Callable[[Any], tf.Tensor]
  rows: Sequence[str]
  is_correct: Callable[[Any, Any], tf.Tensor]


def build_hpfl(
  model: models.PartialModel,
  *,
  attributes: Attributes,
  drafts: drafts_lib.ClientCenters | drafts_lib.Sums | None,
  tables: Sequence[str] = (),
  public: bool = True,
  training: Phase = Phase(),
  split: splits.Split | None = None,
  by_nearness: bool = False,
  threshold: float = 0.9,
  average_others: bool = True,
  join: Join = Join.SUM,
  aggregation: Aggregation = Aggregation(),
) -> PartialProcess:
  """Build HPFL: share public rows by attribute, and drafts of private tables.

  Args:
    model: The model: GLOBAL variables are its public components, LOCAL tables
      its private ones, which may be `client_sized`.
    attributes: Publicly known attributes of items.
    drafts: How private tables are drafted; None for HPFL-K, which shares only
      public components.
    tables: The local tables whose drafts are sent, `[rows, width]`. If the
      width is the number of attributes, Eq. 2 uses the accuracy on each,
      otherwise that on all records.
    public: True to share public components; False is HPFL-R.
    training: How a client trains: after what `Exact` solves for, if anything.
    split: The records that a client trains on, and those on which it measures
      its accuracy, 0 without any; the field `is_validation` by default.
    by_nearness: True if Eq. 2 weights centers by the inverse of their distance,
      instead of by their distance as printed.
    threshold: p of Eq. 3, as a fraction of the mean accuracy of all clients on
      an attribute in the previous round; clients above it share their row.
    average_others: True to average GLOBAL variables that have no row for each
      attribute; otherwise they stay with the clients.
    join: How sums of public rows and of accuracies are aggregated; WITH_UPDATE
      clips and noises them by `aggregation`. Use the same for
      `drafts.centers.Sums`.
    aggregation: How the server aggregates what is joined with the update.

  Example:
    >>> process = algorithms.build_hpfl(
    ...   factors, attributes=attributes, drafts=None
    ... )

  Raises:
    CompositionError, PhaseError, SettingError: If the arguments do not fit
      together.
  """
  tables = tables if drafts else ()
  if drafts and not tables:
    raise SettingError(
      f'drafts={drafts}: there is no table to draft. Name some in `tables`, or '
      'give drafts=None for HPFL-K.'
    )
  _check(model, attributes, tables, threshold)
  train_on, measure_on = splits.given_or(split, splits.by_mark('is_validation'))
  names = model.specs(GLOBAL) if public else ()
  shared = [n for n in names if average_others or n in attributes.rows]
  sharing = _Sharing(attributes, shared, tables, by_nearness, join)
  statistics = [*sharing.statistics(threshold)] if shared else []
  if drafts:
    statistics += [drafts.statistic(model, table) for table in tables]

  return compose(
    model,
    client_state=_memory(attributes.number),
    work=[
      OverwriteWeights(sharing.revised),
      *partial_training.exact_first(
        placed(training, train_on), train=(PERSONAL, LOCAL), measured=True
      ),
      Compute(_RECORDS, sharing.records, on=train_on),
      Compute(_ACCURACY, sharing.accuracy, on=measure_on),
    ],
    statistics=statistics,
    server_state=lambda model: _first_state(model, attributes, drafts, tables),
    aggregation=with_equal_weights(aggregation),
  )


def build_hpfl_eval(
  model: models.PartialModel,
  *,
  attributes: Attributes,
  personalise: Phase | None = None,
  split: splits.Split | None = None,
) -> evaluation.Evaluation:
  """Build an evaluation with the models that clients remember.

  Args:
    model: The model.
    attributes: As in training.
    personalise: How clients, such as new ones, personalise before they are
      measured; not at all by default.
    split: As for `evaluation.build_query_evaluation`.

  Example:
    >>> evaluation = algorithms.build_hpfl_eval(
    ...   factors, attributes=attributes
    ... )
  """
  return evaluation.build_query_evaluation(
    model,
    client_state=_memory(attributes.number),
    train=(PERSONAL, LOCAL),
    personalise=personalise,
    split=split,
  )


class _Sharing(NamedTuple):
  """Clients' computations of what they share.

  Attributes:
    attributes: Publicly known attributes of items.
    shared: The GLOBAL variables that are shared.
    tables: The local tables whose drafts are sent.
    by_nearness: True if Eq. 2 weights centers by the inverse of their distance.
    join: How sums are aggregated.
  """

  attributes: Attributes
  shared: Sequence[str]
  tables: Sequence[str]
  by_nearness: bool
  join: Join

  def revised(self, client: ClientContext) -> tiers.Weights:
    """Return a client's model after the update of Algorithm 1."""
    accuracy = client.remembered[_ACCURACY]
    has_trained = accuracy[_TRAINED]
    public = collections.OrderedDict()
    for name in self.shared:
      own = client.weight(PERSONAL, name)
      share = accuracy[_ON_ALL]
      if name in self.attributes.rows:
        ones = [1] * (own.shape.rank - 1)
        share = tf.reshape(accuracy[_ON_EACH], [-1, *ones])
      mixed = share * own + (1.0 - share) * client.weight(GLOBAL, name)
      public[name] = tf.where(has_trained, mixed, own)
    private = collections.OrderedDict()
    for table in self.tables:
      rows, is_real = drafts_lib.rows_of(client, table)
      share = accuracy[_ON_ALL]
      if rows.shape[1] == self.attributes.number:
        share = accuracy[_ON_EACH]
      moved = drafts_lib.toward_centers(
        rows,
        client.server[drafts_lib.CENTERS][table],
        share,
        by_nearness=self.by_nearness,
      )
      moves = tf.logical_and(has_trained, is_real)[:, None]
      private[table] = tf.where(moves, moved, rows)
    return collections.OrderedDict({PERSONAL: public, LOCAL: private})

  def records(self, client: ClientContext) -> tf.Tensor:
    """Count a client's records of each attribute, float `[number]`.

    Joined with the update they are shares, which add up to 1.
    """
    numbers = tf.reduce_sum(self._of_real(client), 0)
    if self.join is Join.WITH_UPDATE:
      return tf.math.divide_no_nan(numbers, tf.reduce_sum(numbers))
    return numbers

  def accuracy(self, client: ClientContext) -> Any:
    """Return a client's accuracy by attribute and on all records."""
    predictions = client.predict(tiers.personal_copy)
    is_correct = tf.cast(
      self.attributes.is_correct(client.examples['y'], predictions), tf.float32
    )
    real = tf.cast(client.counts, tf.float32)
    on_all = tf.math.divide_no_nan(
      tf.reduce_sum(is_correct * real), tf.reduce_sum(real)
    )
    of_real = self._of_real(client)
    numbers = tf.reduce_sum(of_real, 0)
    right = tf.reduce_sum(of_real * is_correct[:, None], 0)
    on_each = tf.where(
      numbers > 0.0, tf.math.divide_no_nan(right, numbers), on_all
    )
    return collections.OrderedDict(
      {
        _ON_EACH: on_each,
        _ON_ALL: on_all,
        _TRAINED: tf.constant(True),
        'measured': numbers > 0.0,
      }
    )

  def statistics(self, share: float) -> Iterator[Statistic]:
    """Yield Eq. 3, for variables with rows of attributes and for others, and p.

    Args:
      share: p, as a fraction of the mean accuracy of all clients.
    """
    number = self.attributes.number

    def of_rows(client: ClientContext) -> tf.Tensor:
      on_each = client.computed[_ACCURACY][_ON_EACH]
      weights = on_each * client.computed[_RECORDS]
      return tf.where(on_each > client.server[_THRESHOLD], weights, 0.0)

    def of_others(client: ClientContext) -> tf.Tensor:
      on_all = client.computed[_ACCURACY][_ON_ALL]
      # The norm of the rows' weights together, if these are equal.
      return on_all * tf.reduce_sum(client.computed[_RECORDS]) / number**0.5

    by_row = [name for name in self.shared if name in self.attributes.rows]
    others = [name for name in self.shared if name not in by_row]
    for name, variables, weight, usual in (
      ('public', by_row, of_rows, 1.0 / number),
      ('others', others, of_others, number**-0.5),
    ):
      if variables:
        values = functools.partial(_own, variables)
        yield row_means(name, values, weight, join=self.join, usual=usual)

    def thresholds(client: ClientContext) -> tiers.NamedTensors:
      accuracy = client.computed[_ACCURACY]
      own, before = share * accuracy[_ON_EACH], client.server[_THRESHOLD]
      found = tf.where(accuracy['measured'], own, before)
      return collections.OrderedDict({_THRESHOLD: found})

    def known(client: ClientContext) -> tf.Tensor:
      if self.join is Join.WITH_UPDATE:
        return tf.constant(_LOW)
      trains = outcome_of(client).num_examples > 0
      return tf.cast(client.computed[_ACCURACY]['measured'] & trains, 'float32')

    yield row_means(
      'accuracy', thresholds, known, join=self.join, usual=_LOW, in_state=True
    )

  def _of_real(self, client: ClientContext) -> tf.Tensor:
    """Return the attributes of a client's records; zeros for what is none."""
    found = self.attributes.of(client.examples['x'])
    return tf.where(client.counts[:, None], found, 0.0)


def _own(variables: Sequence[str], client: ClientContext) -> tiers.NamedTensors:
  """Return a client's own public components."""
  return collections.OrderedDict(
    (name, client.weight(PERSONAL, name)) for name in variables
  )


def _first_state(
  model: models.PartialModel,
  attributes: Attributes,
  drafts: drafts_lib.ClientCenters | drafts_lib.Sums | None,
  tables: Sequence[str],
) -> Any:
  """Return the server's first state: thresholds, and centers of drafts."""
  state = collections.OrderedDict({_THRESHOLD: tf.zeros([attributes.number])})
  if drafts:
    state[drafts_lib.CENTERS] = drafts_lib.first_centers(
      model, tables, drafts.num_centers
    )
  return state


def _memory(num_attributes: int) -> client_state.ClientState:
  """Return a state of the client's model and its accuracy on each attribute."""
  return client_state.persist_computed(
    client_state.persist_personal,
    _ACCURACY,
    lambda: collections.OrderedDict(
      {
        _ON_EACH: tf.zeros([num_attributes]),
        _ON_ALL: tf.constant(0.0),
        _TRAINED: tf.constant(False),
      }
    ),
  )


def _check(
  model: models.PartialModel,
  attributes: Attributes,
  tables: Sequence[str],
  threshold: float,
) -> None:
  """Check that the model has the named variables, and the threshold."""
  if wrong := checked_numbers.why_negative(threshold):
    raise SettingError(f'threshold: {wrong}.')
  public, private = model.specs(GLOBAL), model.specs(LOCAL)
  if not public:
    return  # Refused by `compose`.
  for name in attributes.rows:
    if name not in public or public[name].shape[:1] != [attributes.number]:
      raise SettingError(
        f'attributes.rows: {name!r} is no global variable with a row for each '
        f'of {attributes.number} attributes. The model has '
        f'{ {n: spec.shape.as_list() for n, spec in public.items()} }.'
      )
  for name in tables:
    if name not in private or private[name].shape.rank != 2:
      raise SettingError(
        f'tables: {name!r} is no local table of rows. The model has '
        f'{ {n: spec.shape.as_list() for n, spec in private.items()} }.'
      )
