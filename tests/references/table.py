"""What is compared, and what was taken out of each reference to do so.

A reference may depart from the paper of a method. Each departure has a name
here; its adapter takes it out, and can leave it in to show what it does.
"""

import dataclasses

from tests.references.problem import Settings

# By how much two results in float32 may differ after five rounds.
TOLERANCE = 3e-7

FED_ATT, FED_JAX, PFLLIB, TFF = 'fed-att', 'fedjax', 'PFLlib', 'TFF'
FL_PARTIAL = 'FL_partial_personalization'


@dataclasses.dataclass(frozen=True)
class Reference:
  """An implementation that others wrote.

  Attributes:
    module: The adapter, in this folder.
    source: Where its sources are; also the name of the checkout's folder.
    licence: Its licence, under which figures that it computed are recorded.
    packages: What its adapter imports beside NumPy.
  """

  module: str
  source: str
  licence: str
  packages: tuple[str, ...]


REFERENCES = {
  PFLLIB: Reference(
    'pfllib',
    'github.com/TsingZ0/PFLlib',
    'Apache-2.0',
    ('torch', 'h5py', 'sklearn'),
  ),
  FL_PARTIAL: Reference(
    'fl_partial',
    'github.com/facebookresearch/FL_partial_personalization',
    'MIT',
    ('torch',),
  ),
  FED_ATT: Reference(
    'fed_att', 'github.com/shaoxiongji/fed-att', 'MIT', ('torch', 'scipy')
  ),
  FED_JAX: Reference(
    'fed_jax',
    'github.com/google/fedjax',
    'Apache-2.0',
    ('jax', 'haiku', 'optax', 'msgpack'),
  ),
  TFF: Reference(
    'tff_own',
    'the installed package tensorflow-federated',
    'Apache-2.0',
    ('tensorflow_federated',),
  ),
}

DROPS = 'drops small batches'
BY_BATCHES = 'counts batches'
OVER_EPOCHS = 'fills batches over the ends of epochs'
FIRST_OF_SERVER = "begins v with the server's first weights"
DECAYS = 'decays theta'
MET_IN_TRAINING = 'takes prototypes while it trains'
ALIKE = 'counts prototypes alike'
FORGETS = 'forgets classes'
NO_PULL = 'does not pull theta'
BEGINS_ANEW = 'begins theta anew'
SPECTRAL = 'takes spectral norms'
WHOLE_GRADIENT = 'moves v by the whole gradient'
ALPHA_BY_VARIABLE = 'has an alpha for each variable'

DEPARTURES = {
  DROPS: "An epoch's last batch is left out where it is smaller.",
  BY_BATCHES: 'Clients count by their batches instead of their examples.',
  OVER_EPOCHS: (
    'A batch may hold the end of an epoch and the beginning of the next.'
  ),
  FIRST_OF_SERVER: (
    "A personal model begins with the server's first weights; ours, with those "
    'that the client first receives. The paper leaves it open.'
  ),
  DECAYS: "The minimum theta has a weight decay of 0.001, which the paper's "
  'has not.',
  MET_IN_TRAINING: (
    "A client's prototypes are the means of the features that it met in its "
    'steps; in the paper, of those of the model that it trained.'
  ),
  ALIKE: (
    'The server averages prototypes of clients alike; in the paper, by their '
    'examples of the class.'
  ),
  FORGETS: (
    'A class that a round lacks has no prototype after it; ours keeps the last '
    'one. The paper has all clients in each round.'
  ),
  NO_PULL: (
    'The penalty is cut off from the gradient, so that it pulls nothing.'
  ),
  BEGINS_ANEW: (
    'theta begins as w on each batch; ours goes on, as in the code of the '
    "paper's authors. The paper leaves it open."
  ),
  SPECTRAL: (
    'Distances of matrices are their largest singular values; in the paper, '
    'norms over all elements.'
  ),
  WHOLE_GRADIENT: (
    'v moves along the gradient of the mixture, which lacks the factor alpha '
    'of the gradient by v.'
  ),
  ALPHA_BY_VARIABLE: (
    'Each variable learns an alpha; in the paper, a client has one.'
  ),
}


@dataclasses.dataclass(frozen=True)
class Comparison:
  """A method as a reference has it, against ours.

  Attributes:
    method: What papers call it.
    reference: A key of `REFERENCES`.
    taken_out: Keys of `DEPARTURES`.
    tolerance: By how much any number may differ.
  """

  method: str
  reference: str
  taken_out: tuple[str, ...] = ()
  settings: Settings = Settings()
  tolerance: float = TOLERANCE

  @property
  def name(self) -> str:
    """The name of both together, which is that of the results."""
    return f'{self.method} of {self.reference}'


COMPARISONS = (
  *(
    Comparison(method, PFLLIB, (DROPS,))
    for method in (
      'FedAvg FedPer FedRep FedBABU LG-FedAvg FedProx SCAFFOLD'.split()
    )
  ),
  Comparison('Ditto', PFLLIB, (DROPS, FIRST_OF_SERVER)),
  Comparison('pFedMe', PFLLIB, (DROPS, DECAYS)),
  Comparison('FedProto', PFLLIB, (DROPS, MET_IN_TRAINING, ALIKE, FORGETS)),
  *(
    Comparison(method, FL_PARTIAL, (BY_BATCHES,))
    for method in ('FedAvg', 'FedAlt', 'FedSim')
  ),
  # It has one rate for both, and the server takes the mean.
  Comparison(
    'pFedMe',
    FL_PARTIAL,
    (BY_BATCHES, NO_PULL, BEGINS_ANEW),
    Settings(personal_rate=Settings.rate, server_rate=1.0),
  ),
  Comparison('FedAtt', FED_ATT, (SPECTRAL,)),
  *(
    Comparison(method, FED_JAX, (OVER_EPOCHS,))
    for method in ('FedAvg', 'FedProx')
  ),
  Comparison('APFL', FED_JAX, (OVER_EPOCHS, WHOLE_GRADIENT, ALPHA_BY_VARIABLE)),
  Comparison('FedAvg', TFF),
  Comparison('FedRecon', TFF),
)

# What cannot be compared, since little of it would be left.
LEFT_OUT = {
  f'APFL of {PFLLIB}': (
    "v takes the gradient of its own loss and not of the mixture's, is then "
    'replaced by the mixture, and alpha has a gradient of its own making.'
  ),
  f'FedProx of {TFF}': (
    'The proximal term of 0.87 has the opposite sign, inside its optimizer.'
  ),
}


def result_name(comparison: Comparison, left_in: str | None = None) -> str:
  """Returns the name of a result, with one departure left in or none."""
  return f'{comparison.name} but it {left_in}' if left_in else comparison.name
