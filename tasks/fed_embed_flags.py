"""Flags of FedEmbed alone: how clients come to their sub-population."""

from typing import TypedDict

from absl import flags

from tasks import preference_models
from tff_partial import assignments
from tff_partial import phases

FLAGS = flags.FLAGS


class Centers(TypedDict):
  """How prototypes, nodes and centers move."""

  rate: float
  server_rate: float | None


class FedEmbedFlags:
  """How clients come to their sub-population, section 3.3 of the paper."""

  def __init__(self) -> None:
    """Defines the flags."""
    flags.DEFINE_integer(
      'triplet_steps',
      10,
      'Steps of the triplet loss with which clients draw their embedding to a '
      'prototype, each round; 0 to join the one that is nearest without.',
      lower_bound=0,
    )
    flags.DEFINE_float(
      'triplet_learning_rate', 0.1, 'Rate of these steps.', lower_bound=0.0
    )
    flags.DEFINE_float('triplet_margin', 1.0, 'alpha of Eq. 1.')
    flags.DEFINE_integer(
      'forming_steps',
      0,
      'Steps on all of its examples with which a client forms its embedding, '
      'through the heads that all share, before it joins a prototype or a node '
      'of the map.',
      lower_bound=0,
    )
    flags.DEFINE_float(
      'forming_learning_rate', 1.0, 'Rate of these steps.', lower_bound=0.0
    )
    flags.DEFINE_float(
      'map_rate',
      0.1,
      'Which share of the way clients would move nodes of the self-organizing '
      'map, prototypical users their prototype, and centers of PFedKM.',
      lower_bound=0.0,
    )
    flags.DEFINE_float(
      'map_server_rate',
      None,
      'By how many times the mean of these moves over all clients of a cohort '
      'the server moves them; of one node, most clients move nothing. By '
      "default the server's optimizer moves them, as all else.",
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
  def parts(self) -> assignments.Parts:
    """The parts of the model."""
    if FLAGS.preference_type_head:
      return preference_models.PARTS
    return preference_models.PARTS_WITHOUT_TYPES

  @property
  def centers(self) -> Centers:
    """How prototypes, nodes and centers move."""
    return {'rate': FLAGS.map_rate, 'server_rate': FLAGS.map_server_rate}

  def _forming(self) -> phases.Phase | None:
    """How clients form their embedding before they join, if they do."""
    steps = FLAGS.forming_steps
    if not steps:
      return None
    return phases.Phase(
      optimizer=phases.sgd(FLAGS.forming_learning_rate),
      batch_size=None,
      epochs=steps,
    )

  def by_type(self) -> assignments.Assignment:
    """Clients know their sub-population."""
    return assignments.by_type(self.parts)

  def by_prototype(self) -> assignments.Assignment:
    """Clients join the nearest prototype."""
    return assignments.by_prototype(
      self.parts,
      margin=FLAGS.triplet_margin,
      steps=FLAGS.triplet_steps,
      optimizer=phases.sgd(FLAGS.triplet_learning_rate),
      forming=self._forming(),
      **self.centers,
    )

  def by_map(self) -> assignments.Assignment:
    """Clients join the nearest node of a self-organizing map."""
    return assignments.by_map(
      self.parts,
      forming=self._forming(),
      radius=FLAGS.map_radius,
      rows=FLAGS.map_rows,
      **self.centers,
    )

  def personal(self) -> assignments.Assignment:
    """Each client has a head of its own."""
    return assignments.OWN_HEAD
