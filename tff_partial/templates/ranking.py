"""Evaluations by ranking: of all items that a client has not seen.

`build_ranking_eval` takes the evaluation of any algorithm whose model predicts
a number for an item, and returns one with the same personalisation that ranks
each of the client's new items, those in its query set that are not in its
support set, among the items of the catalogue that are not in its support set.

To train such a model by gradients, `NegativeItems` draws items beside each
example's, and `loss_with_negatives` compares their scores.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from typing import Any, NamedTuple

import tensorflow as tf

from tff_partial import evaluation as evaluations
from tff_partial import phases
from tff_partial import tiers
from tff_partial.arguments import checked_numbers
from tff_partial.contexts import batch_of
from tff_partial.contexts import ClientContext
from tff_partial.contexts import Compute
from tff_partial.contexts import weights_of_examples
from tff_partial.data import splits
from tff_partial.errors import SettingError
from tff_partial.model import models
from tff_partial.model import ranking_metrics

# Names of the outputs of a model with drawn negatives.
SCORE, NEGATIVES = 'score', 'negatives'
# Losses with negatives: binary cross-entropy (He et al., "Neural collaborative
# filtering", 2017), Bayesian personalized ranking (Rendle et al., 2009), and
# softmax cross-entropy over the item and its negatives.
BINARY, BPR, SOFTMAX = 'binary', 'bpr', 'softmax'
LOSSES = (BINARY, BPR, SOFTMAX)

_SEEN, _HELD_OUT = 'ranking_seen', 'ranking_held_out'
_SCORES = 'ranking_scores'
_PREDICTION = 'prediction'

Metrics = Callable[[], Sequence[tf.keras.metrics.Metric]]


def build_ranking_eval(
  evaluation: evaluations.Evaluation,
  num_items: int,
  *,
  split: splits.Split,
  item: str | None = None,
  output: str | None = None,
  metrics: Metrics | None = None,
  num_top: int = 10,
  batch_size: int = 8,
) -> evaluations.Evaluation:
  """Build an evaluation that ranks the query items of each client.

  Among drawn negatives, the other query items of the client are not drawn.

  Args:
    evaluation: How clients personalise, from an algorithm's builder.
    num_items: Number of items of the catalogue; their ids are from 0.
    split: Support set, whose items are seen and never ranked, and query set. An
      item that is in the query set several times counts once.
    item: The name of the item id among the model's inputs; None if it is the
      only one. Other inputs are those of the client's first query example.
    output: The name of the scores among the model's outputs; None if they are
      the only one.
    metrics: Makes metrics of `ranks_spec`; `ranking_metrics()` by
      default.
    num_top: Number of first items for `CatalogueCoverage`.
    batch_size: Query items ranked at a time; does not change the result.

  Example:
    >>> split = tff_partial.splits.by_mark()
    >>> evaluation = algorithms.build_fed_recon_eval(model, split=split)
    >>> ranking = templates.ranking.build_ranking_eval(
    ...   evaluation, 1_000, split=split
    ... )

  Raises:
    SettingError: If the model does not predict one number for an item, has no
      such input or fewer items, or the evaluation replaces its predictions.
  """
  model = evaluation.model
  *before, last = evaluation.parts.work
  if not isinstance(last, phases.Phase) or last.predict_fn is not None:
    raise SettingError(
      'build_ranking_eval: the evaluation replaces the predictions of its '
      "model, such as by a memory. Rank by the model's own scores."
    )
  scores = model.prediction_spec
  if isinstance(scores, Mapping) and output in scores:
    scores = scores[output]
  if not isinstance(scores, tf.TensorSpec) or scores.shape.num_elements() != 1:
    raise SettingError(
      f'build_ranking_eval: the model predicts {model.prediction_spec}, of '
      f'which output={output!r} is no number for an item.'
    )
  _check_items(model, num_items, item, num_top)
  catalogue = _Catalogue(num_items, item, output, last.read, num_top)
  new = catalogue.new_items(split)
  ranked = model.with_replaced_predictions(
    {_PREDICTION: model.prediction_spec, **ranking_metrics.ranks_spec(num_top)},
    lambda ranks: ranks[_PREDICTION],
    metrics or ranking_metrics.ranking_metrics(),
  )
  return evaluations.build_evaluation(
    ranked,
    work=[
      *before,
      Compute(_SEEN, catalogue.items_of, on=split.support),
      Compute(_HELD_OUT, catalogue.items_of, on=new),
      Compute(_SCORES, catalogue.scores, on=new),
      dataclasses.replace(
        last, on=new, batch_size=batch_size, predict_fn=catalogue.rank
      ),
    ],
    client_state=evaluation.parts.client_state,
    server_state=evaluation.parts.server_state,
  )


def _check_items(
  model: models.PartialModel, num_items: int, item: str | None, num_top: int
) -> None:
  """Refuse a catalogue that a model cannot score, or too many first items."""
  inputs = model.example_spec['x']
  names = list(inputs) if isinstance(inputs, Mapping) else [None]
  if item not in names:
    raise SettingError(
      f'build_ranking_eval: item={item!r} is no input of the model, which are '
      f'{names}.'
    )
  path = 'x' if item is None else f'x.{item}'
  for limits in model.example_spec.ids.get(path, ()):
    if limits.size is not None and num_items > limits.size:
      raise SettingError(
        f'build_ranking_eval: num_items={num_items}, but {limits.what}.'
      )
  if not 1 <= num_top <= num_items:
    raise SettingError(
      f'build_ranking_eval: num_top={num_top}: expected from 1 to '
      f'num_items={num_items}.'
    )


class _Catalogue(NamedTuple):
  """All items, and how a model scores them.

  Attributes are as for `build_ranking_eval`; `read` gives the weights that the
  model reads.
  """

  num_items: int
  item: str | None
  output: str | None
  read: tiers.WeightsFn
  num_top: int

  def _ids(self, x: Any) -> tf.Tensor:
    return x if self.item is None else x[self.item]

  def new_items(self, split: splits.Split) -> splits.Part:
    """Select the first query example of each item without a support example."""

    def choose(
      examples: Mapping[str, Any], count: tf.Tensor, seed: tf.Tensor
    ) -> splits.Chosen:
      has_weight = weights_of_examples(examples['weight']) > 0
      of_example = self._ids(examples['x'])
      place = tf.range(tf.size(of_example))
      order, ids, counts = [], [], []
      for part in split:
        chosen = part.choose(examples, count, seed)
        order.append(chosen.order)
        ids.append(tf.gather(of_example, chosen.order))
        counts.append(place < chosen.count)
        counts[-1] &= tf.gather(has_weight, chosen.order)
      seen = tf.math.unsorted_segment_max(
        tf.cast(counts[0], tf.int32), ids[0], self.num_items
      )
      first = tf.math.unsorted_segment_min(
        tf.where(counts[1], place, place.dtype.max), ids[1], self.num_items
      )
      is_first = tf.equal(tf.gather(first, ids[1]), place)
      is_new = counts[1] & is_first & (tf.gather(seen, ids[1]) < 1)
      new = splits.chosen_by(is_new)
      return splits.Chosen(tf.gather(order[1], new.order), new.count)

    return splits.Part(
      f'{split.query.name}, each new item once',
      choose,
      splits.example_fields(*split),
    )

  def items_of(self, client: ClientContext) -> tf.Tensor:
    """Return which items are among the client's examples, bool `[items]`."""
    counts = tf.cast(client.counts, tf.int32)
    ids = self._ids(client.examples['x'])
    number = tf.math.unsorted_segment_sum(counts, ids, self.num_items)
    return number > 0

  def scores(self, client: ClientContext) -> tf.Tensor:
    """Return the scores of all items, `[items]`."""
    x = client.examples['x']
    inputs: Any = tf.cast(tf.range(self.num_items), self._ids(x).dtype)
    if self.item is not None:
      others = {
        name: tf.repeat(values[:1], self.num_items, 0)
        for name, values in x.items()
      }
      inputs = {**others, self.item: inputs}
    of_all = client._replace(
      examples={'x': inputs, 'weight': tf.ones([self.num_items])},
      count=tf.constant(self.num_items),
    )
    found = of_all.predict(self.read)
    found = found if self.output is None else found[self.output]
    return tf.cast(tf.reshape(found, [-1]), tf.float32)

  def rank(self, client: ClientContext) -> Any:
    """Return the ranks of the batch's items, as in `ranks_spec`."""
    batch, unseen = batch_of(client), ~client.computed[_SEEN]
    held_out = client.computed[_HELD_OUT]
    ids, scores = self._ids(batch.x), client.computed[_SCORES]
    of_item = tf.gather(scores, ids)[:, None]
    is_other = ~tf.one_hot(ids, self.num_items, True, False, dtype=tf.bool)

    def counts(among: tf.Tensor) -> Mapping[str, tf.Tensor]:
      comparisons = {
        'above': ~(scores <= of_item),  # NaN, too, which must not help.
        'tied': tf.equal(scores, of_item),
        'others': True,
      }
      return {
        name: tf.reduce_sum(tf.cast(is_so & among & is_other, tf.float32), 1)
        for name, is_so in comparisons.items()
      }

    shown = tf.where(unseen, scores, -math.inf)
    _, top = tf.math.top_k(shown, self.num_top)
    top = tf.where(tf.gather(unseen, top), top, -1)  # No more are unseen.
    number = tf.reduce_sum(tf.cast(held_out, tf.float32))
    return {
      _PREDICTION: batch.predictions,
      'all': counts(unseen),
      'drawn': counts(unseen & ~held_out),
      'held_out': tf.fill(tf.shape(ids), number),
      'top': tf.repeat(top[None], tf.size(ids), 0),
    }


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class NegativeItems(tf.keras.__internal__.layers.BaseRandomLayer):
  """Each item id with ids that are drawn uniformly from the catalogue.

  Maps integers `[batch]` to `[batch, 1 + number]`, the given item first. Items
  are drawn again in each step. One that the client has interacted with may be
  among them, so that nothing depends on which items are held out.
  """

  def __init__(self, num_items: int, number: int, **kwargs: Any):
    """Initialize the layer.

    Args:
      num_items: Number of items of the catalogue.
      number: Number of drawn items for each given one.
      **kwargs: Arguments of all layers, such as the name.

    Raises:
      SettingError: If there is no item, or none is drawn.
    """
    own = 'NegativeItems: '
    sizes = {f'{own}num_items': num_items, f'{own}number': number}
    checked_numbers.check_whole(SettingError, 1, **sizes)
    super().__init__(**kwargs)
    self.num_items = num_items
    self.number = number

  def call(self, items: tf.Tensor) -> tf.Tensor:
    """Return the items with the drawn ones."""
    shape = [tf.shape(items)[0], self.number]
    # The generator is replaced by one that draws from the seed of each step. An
    # initializer made here would draw the same in all steps.
    drawn = self._random_generator.random_uniform(
      shape, 0.0, float(self.num_items)
    )
    drawn = tf.minimum(tf.cast(drawn, items.dtype), self.num_items - 1)
    return tf.concat([items[:, None], drawn], 1)

  def get_config(self) -> dict[str, Any]:
    """Return the layer's configuration."""
    return {
      **super().get_config(),
      'num_items': self.num_items,
      'number': self.number,
    }


def loss_with_negatives(kind: str) -> Callable[[Any, Any], tf.Tensor]:
  """Return a loss of the outputs SCORE, `[batch]`, and NEGATIVES.

  Labels are not read: each example is an interaction.

  Args:
    kind: BINARY, BPR or SOFTMAX.

  Raises:
    SettingError: If it is another.
  """
  if kind not in LOSSES:
    raise SettingError(
      f'loss_with_negatives: kind={kind!r}: choose one of {LOSSES}.'
    )

  def loss(labels: tf.Tensor, outputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
    del labels
    score, negatives = outputs[SCORE], outputs[NEGATIVES]
    if kind == BINARY:
      of_negatives = tf.reduce_sum(tf.nn.softplus(negatives), 1)
      return tf.nn.softplus(-score) + of_negatives
    if kind == BPR:
      return tf.reduce_mean(tf.nn.softplus(negatives - score[:, None]), 1)
    everything = tf.concat([score[:, None], negatives], 1)
    return tf.reduce_logsumexp(everything, 1) - score

  return loss
