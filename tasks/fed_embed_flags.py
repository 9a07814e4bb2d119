"""Flags of FedEmbed alone: how clients come to their sub-population."""

from absl import flags

from tasks.preference_models import PARTS
from tff_partial import assignments
from tff_partial import phases

FLAGS = flags.FLAGS


class FedEmbedFlags:
  """How clients come to their sub-population, section 3.3 of the paper."""

  def __init__(self) -> None:
    """Defines the flags."""
    flags.DEFINE_integer(
      'triplet_steps',
      10,
      'Steps of the triplet loss with which clients draw their embedding to a '
      'prototype, each round.',
      lower_bound=0,
    )
    flags.DEFINE_float(
      'triplet_learning_rate', 0.1, 'Rate of these steps.', lower_bound=0.0
    )
    flags.DEFINE_float('triplet_margin', 1.0, 'alpha of Eq. 1.')
    flags.DEFINE_bool(
      'move_prototypes', True, 'Whether prototypes learn from the triplet loss.'
    )
    flags.DEFINE_float(
      'map_rate',
      0.1,
      'Which share of the way nodes of the self-organizing map go, and centers '
      'of PFedKM.',
      lower_bound=0.0,
    )
    flags.DEFINE_float(
      'map_radius',
      1.0,
      "Standard deviation of a map's neighbourhood, in nodes; 0 moves the "
      'nearest node only.',
      lower_bound=0.0,
    )
    flags.DEFINE_integer(
      'map_rows', 2, 'Rows of the lattice of a map.', lower_bound=1
    )

  @property
  def map_rate(self) -> float:
    """Which share of the way nodes and centers go."""
    return float(FLAGS.map_rate)

  def by_type(self) -> assignments.Assignment:
    """Clients know their sub-population."""
    return assignments.by_type(PARTS)

  def by_prototype(self) -> assignments.Assignment:
    """Clients join the nearest prototype."""
    return assignments.by_prototype(
      PARTS,
      margin=FLAGS.triplet_margin,
      steps=FLAGS.triplet_steps,
      optimizer=phases.sgd(FLAGS.triplet_learning_rate),
      move_prototypes=FLAGS.move_prototypes,
    )

  def by_map(self) -> assignments.Assignment:
    """Clients join the nearest node of a self-organizing map."""
    return assignments.by_map(
      PARTS,
      rate=self.map_rate,
      radius=FLAGS.map_radius,
      rows=FLAGS.map_rows,
    )

  def personal(self) -> assignments.Assignment:
    """Each client has a head of its own."""
    return assignments.OWN_HEAD
