"""FedEmbed's users when tastes change, or new ones turn up, in mid-run.

python -m benchmarks.drift > docs/results/tables/preference_drift.csv

The setting of 1,800 users of docs/results/fed_embed.md, each method as tuned
there. After half of the rounds, either half of the users of each sub-population
like the next digit from then on, and have other images; or the users who like
an 8 or a 9, who took no part before, arrive. F1 is that of these users on test
images of what they like at the time: before the change, five rounds after it,
and at the end.
"""

from collections.abc import Sequence
import csv
import dataclasses
import sys

import numpy as np

from benchmarks import measuring
from benchmarks import recipe
from tasks import task as tasks_lib
from tasks.experiment.options.loop import Output
from tasks.experiment.runs import running
from tasks.experiment.trainable import Trainable
from tasks.preference import preferences
from tff_partial.data import cohorts
from tff_partial.training import callbacks

KINDS, ROUNDS, CHANGE, SOON = 10, 30, 15, 20
TASTES, ARRIVALS = 'tastes change', 'new users'
COMMON = (
  '--users=1800',
  '--clients_per_round=90',
  f'--rounds={ROUNDS}',
  '--evaluate_every=5',
)


# Of each method, its recipe and more flags.
METHODS: dict[str, tuple[str, ...]] = {
  'FedEmbed-Type': ('fed_embed_type',),
  'FedEmbed-Prototype': ('fed_embed_prototype',),
  'least loss, which the paper does not have': ('fed_embed_least_loss',),
  'the same with 20 heads': (
    'fed_embed_least_loss',
    '--set=preference_groups=20',
  ),
  'FedEmbed-SOM': ('fed_embed_som',),
  'FedEmbed-Personal': ('fed_embed_personal',),
  'FedRep': ('fed_rep',),
}


@dataclasses.dataclass
class Change:
  """What changes after some rounds.

  Attributes:
    name: TASTES or ARRIVALS.
    is_over: True after the change.
  """

  name: str
  is_over: bool = False

  def concerns(self, user: str) -> bool:
    """Return True if the user changes its taste, or arrives."""
    if self.name == ARRIVALS:
      return preferences.kind_liked_by(user) >= KINDS - 2
    return preferences.number_of(user) % 2 == 1

  def takes_part(self, user: str) -> bool:
    """Return True if the user can be in a cohort now."""
    return self.name == TASTES or self.is_over or not self.concerns(user)

  def images_of(self, user: str) -> str:
    """Return the user whose images the user has now."""
    if self.name == ARRIVALS or not self.is_over or not self.concerns(user):
      return user
    kind, number = user.split('-')
    return f'{(int(kind) + 1) % KINDS}-{number}'

  def __call__(self, result: callbacks.RoundResult) -> bool:
    """Change after the round that it is due."""
    self.is_over = result.round >= CHANGE
    return False


@dataclasses.dataclass(frozen=True)
class Changing(cohorts.SomeClients):
  """A source of users whose images change.

  Attributes:
    change: The change.
    is_measured: True if users that have yet to arrive count, too.
  """

  change: Change
  is_measured: bool

  def cohort(
    self, client_ids: Sequence[str], seeds: np.ndarray
  ) -> cohorts.Cohort:
    """Return what users have now."""
    there = [
      place
      for place, user in enumerate(client_ids)
      if self.is_measured or self.change.takes_part(user)
    ]
    users = [client_ids[place] for place in there]
    images = [self.change.images_of(user) for user in users]
    held = self.source.cohort(images, np.asarray(seeds)[there])
    return cohorts.Cohort(users, held.groups)


def curve(name: str, method: str, seed: int) -> list[float]:
  """Train; return F1 at the change, soon after, and at the end."""
  recipe_name, *flags = METHODS[method]
  config, task = recipe.load_task(
    *COMMON, *flags, f'--seed={seed}', name=f'mnist_preference_{recipe_name}'
  )
  change = Change(name)
  with running.executing(config.runtime):
    trainable = Trainable(config, task)
    tested = trainable.evaluation_set(task.tests[tasks_lib.SEEN])
    concerned = tuple(filter(change.concerns, tested.clients.client_ids))
    clients = trainable.clients()
    run = running.Prepared(
      trainable,
      Changing(clients, clients.client_ids, change, is_measured=False),
      dataclasses.replace(
        tested,
        clients=Changing(tested.clients, concerned, change, is_measured=True),
      ),
      callbacks=[change],
    ).train(config, Output())
  return [
    float(run.history[number - 1]['validation_f1'])
    for number in (CHANGE, SOON, ROUNDS)
  ]


def main() -> None:
  """Write a table, a row for each method."""
  parser = measuring.parser(__doc__)
  add = parser.add_argument
  add('--seeds', type=int, default=3, help='seeds of the runs, from 0')
  add('--methods', nargs='*', choices=[*METHODS], help='by default all')
  options = parser.parse_args()
  table = csv.writer(sys.stdout, lineterminator='\n')
  moments = ('before', f'{SOON - CHANGE} rounds', f'{ROUNDS - CHANGE} rounds')
  table.writerow(
    [
      'F1 ↑',
      *(
        f'{change}, {moment}{end}'
        for change in (TASTES, ARRIVALS)
        for moment in moments
        for end in ('', ' ±')
      ),
    ]
  )
  for method in options.methods or METHODS:
    row = [method]
    for change in (TASTES, ARRIVALS):
      runs = [curve(change, method, seed) for seed in range(options.seeds)]
      for of in zip(*runs, strict=True):
        row += [f'{np.mean(of):.3f}', f'{np.std(of, ddof=1):.3f}']
    table.writerow(row)
    sys.stdout.flush()


if __name__ == '__main__':
  main()
