"""Who may import whom: the three floors, and TFF's public names only."""

import ast
import collections
from collections.abc import Callable, Collection, Iterator
import functools
import graphlib
import importlib.metadata
import itertools
import pathlib
import re
import sys
import tomllib
from typing import NamedTuple

from packaging import requirements
import pytest

from tests.support.sources import dotted_names
from tests.support.sources import files_of
from tests.support.sources import parsed
from tests.support.sources import ROOT

# A module of a floor may import those of its own floor and of the floors below.
# A name that ends in `.*` places all modules of a folder, with its `__init__`.
FLOORS = {
  'ground': """
    _environment.* arguments.* client.client_batches client.client_metrics
    client.client_steps client.descent client.exact_solves client.local_training
    client.optimizer_slots client.work clustering.* contexts data.* errors
    groups layers model.* phases random_bits solvers.* sparse.*
    templates.implicit_factors templates.private_items
    templates.rating_posteriors templates.server_optimizers terms tiers
  """.split(),
  'first': """
    aggregators assignments client.client_work client_state
    client_statistics composition dp.* drafts.* evaluation exchange.* joins.*
    learning_process processes runtimes.*
    templates.assigned_training templates.partial_training
    templates.private_ratings templates.rating_intervals templates.ranking
  """.split(),
  'top': """
    __init__ algorithms.* analysis.* checks.* exporting.* training.*
  """.split(),
}
HEIGHTS = {floor: height for height, floor in enumerate(FLOORS)}

# The ground floor runs eagerly on TensorFlow. Of TFF it takes these only.
TFF_ON_THE_GROUND = (
  'tff.learning.metrics',
  'tff.learning.models',
  'tff.learning.optimizers',
  'tff.simulation.datasets',
)


class Import(NamedTuple):
  """One imported module, and where."""

  line: int
  module: str
  # Whether it is imported together with the module it stands in, so not by a
  # function when that is called.
  at_load: bool


def find_modules(*packages: str) -> dict[str, pathlib.Path]:
  """The modules of the packages that exist, by their dotted names."""
  modules = {}
  for path in files_of(*packages):
    parts = path.relative_to(ROOT).with_suffix('').parts
    if parts[-1] == '__init__':
      parts = parts[:-1]
    modules['.'.join(parts)] = path
  return modules


LIBRARY = find_modules('tff_partial')
MODULES = find_modules('tff_partial', 'baselines', 'tasks', 'tests')


def imports_of(tree: ast.Module, modules: Collection[str]) -> set[Import]:
  """What a module imports, anywhere in it.

  `from package import name` imports `package.name` if that is one of `modules`,
  and `package` otherwise.
  """
  found = set()

  def visit(node: ast.AST, at_load: bool) -> None:
    if isinstance(node, ast.Import):
      for alias in node.names:
        found.add(Import(node.lineno, alias.name, at_load))
    elif isinstance(node, ast.ImportFrom):
      for alias in node.names:
        name = f'{node.module}.{alias.name}'
        name = name if name in modules else str(node.module)
        found.add(Import(node.lineno, name, at_load))
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
      at_load = False
    elif isinstance(node, ast.If) and 'TYPE_CHECKING' in ast.dump(node.test):
      at_load = False
    for child in ast.iter_child_nodes(node):
      visit(child, at_load)

  visit(tree, at_load=True)
  return found


def floor_of(module: str) -> str | None:
  """The floor of a module of the library, or None if it has no place."""
  name = module.removeprefix('tff_partial').removeprefix('.') or '__init__'
  folder = name.split('.')[0]
  for floor, places in FLOORS.items():
    if name in places or f'{folder}.*' in places:
      return floor
  # The `__init__` of a folder whose modules are on two floors: it is a title.
  if any(
    place.startswith(f'{name}.')
    for places in FLOORS.values()
    for place in places
  ):
    return 'ground'
  return None


def is_below(module: str, package: str) -> bool:
  return module == package or module.startswith(f'{package}.')


def complain(offences: list[str]) -> None:
  assert not offences, '\n'.join(['', *offences])


def test_every_module_has_a_floor():
  placeless = [module for module in LIBRARY if floor_of(module) is None]
  assert not placeless, f'Place {placeless} in FLOORS of {__file__}.'


def test_imports_go_downward():
  offences = []
  for module, path in LIBRARY.items():
    floor = floor_of(module)
    for line, imported, _ in imports_of(parsed(path), LIBRARY):
      if not is_below(imported, 'tff_partial'):
        continue
      below = floor_of(imported)
      if floor and below and HEIGHTS[below] > HEIGHTS[floor]:
        offences.append(
          f'{path}:{line}: {module} ({floor} floor) imports {imported} '
          f'({below} floor): imports go downward only.'
        )
  complain(offences)


def test_library_imports_its_modules_and_nothing_beside_them():
  complain(
    [
      f'{path}:{line}: a module of the library imports the one that is meant, '
      f'and not {imported}.'
      for path in LIBRARY.values()
      for line, imported, _ in imports_of(parsed(path), MODULES)
      # The `__init__` of the library imports every module.
      if imported == 'tff_partial'
      or imported.split('.')[0] in ('baselines', 'tasks', 'tests')
    ]
  )


def test_algorithms_import_no_other_algorithm():
  folders = ('tff_partial.algorithms', 'baselines')
  complain(
    [
      f'{path}:{line}: {module} imports {imported}: algorithms share parts, '
      'not one another.'
      for module, path in MODULES.items()
      if module.startswith(tuple(f'{folder}.' for folder in folders))
      for line, imported, _ in imports_of(parsed(path), MODULES)
      if any(is_below(imported, folder) for folder in folders)
      and imported != 'baselines.memories'  # A part, of two of them.
    ]
  )


@functools.cache
def room_of(module: str) -> str:
  """The folder of a module; a module next to folders is a room of its own."""
  folder = MODULES[module].parent
  has_rooms = any(path.parent.parent == folder for path in MODULES.values())
  return module if has_rooms else str(folder.relative_to(ROOT))


def arrows_of(
  name: Callable[[str], str], *packages: str
) -> dict[str, set[str]]:
  """Which modules, or rooms, import which others, lazy imports included."""
  arrows = collections.defaultdict(set)
  for module in find_modules(*packages):
    if MODULES[module].name == '__init__.py':
      continue
    for _, imported, _ in imports_of(parsed(MODULES[module]), MODULES):
      if imported in MODULES and MODULES[imported].name != '__init__.py':
        arrows[name(module)].add(name(imported))
  return arrows


PRODUCT = ('baselines', 'tasks', 'tff_partial')


@pytest.mark.parametrize('name', [str, room_of], ids=['modules', 'rooms'])
def test_imports_make_no_circle(name):
  arrows = arrows_of(name, *PRODUCT)
  if name is room_of:  # Modules of a room may import one another.
    arrows = {room: below - {room} for room, below in arrows.items()}
  # Raises an error that names the circle.
  graphlib.TopologicalSorter(arrows).prepare()


def test_ground_floor_takes_little_of_tff():
  offences = []
  for module, path in LIBRARY.items():
    if floor_of(module) != 'ground':
      continue
    for line, name in dotted_names(parsed(path)):
      if name.startswith('tff.') and not any(
        is_below(name, allowed) for allowed in TFF_ON_THE_GROUND
      ):
        offences.append(
          f'{path}:{line}: {name} is above the ground floor, which takes '
          f'{", ".join(TFF_ON_THE_GROUND)} of TFF and no more.'
        )
  complain(offences)


def private_tff(tree: ast.Module) -> Iterator[tuple[int, str]]:
  """Uses of TFF's private package, with their lines."""
  private = 'tensorflow_federated.python'
  for line, imported, _ in imports_of(tree, [private]):
    if is_below(imported, private):
      yield line, imported
  for line, name in dotted_names(tree):
    if re.match(r'(tff|tensorflow_federated)\.python\b', name):
      yield line, name


@pytest.mark.slow
def test_only_public_names_of_tff_are_used():
  complain(
    [
      f'{path}:{line}: {name} is private to TFF.'
      for path in MODULES.values()
      for line, name in private_tff(parsed(path))
    ]
  )


def normalised(distribution: str) -> str:
  return re.sub(r'[-_.]+', '-', distribution).lower()


def declared() -> tuple[set[str], set[str]]:
  """The distributions that the wheel requires, and those of its extras."""
  text = (ROOT / 'pyproject.toml').read_text('utf-8')
  project = tomllib.loads(text)['project']
  extras = itertools.chain(*project['optional-dependencies'].values())
  always, extra = (
    {normalised(requirements.Requirement(line).name) for line in lines}
    for lines in (project['dependencies'], extras)
  )
  return always, extra


def probes(tree: ast.Module) -> set[int]:
  """The lines of a `try` that goes on if what it imports is not there."""
  return {
    statement.lineno
    for node in ast.walk(tree)
    if isinstance(node, ast.Try)
    and any('ImportError' in ast.dump(handler) for handler in node.handlers)
    and not any(isinstance(x, ast.Raise) for x in ast.walk(node))
    for statement in node.body
  }


def test_wheel_declares_what_it_imports():
  # What comes with TFF is declared too where it is imported by its name: the
  # wheels of TFF that pip can install ask for other versions than TFF does.
  always, extra = declared()
  owners = importlib.metadata.packages_distributions()
  in_wheel = find_modules(
    'tff_partial', 'tff_partial_programs', 'baselines', 'tasks'
  )
  ours = {module.split('.')[0] for module in in_wheel}
  offences, used = [], set()
  for path in in_wheel.values():
    probed = probes(parsed(path))
    for line, imported, at_load in imports_of(parsed(path), in_wheel):
      top = imported.split('.')[0]
      if top in sys.stdlib_module_names or top in ours or line in probed:
        continue
      owned_by = {normalised(owner) for owner in owners.get(top, [top])}
      used |= owned_by
      if not owned_by & (always if at_load else always | extra):
        offences.append(
          f'{path}:{line}: {imported} is not among the dependencies of '
          'pyproject.toml.'
        )
  unused = (always | extra) - used
  complain([*offences, *(f'no module imports {name}.' for name in unused)])


def test_nothing_loads_the_analysis_unasked():
  # It asks for matplotlib and scikit-learn. Its `__init__` is a title.
  complain(
    [
      f'{path}:{line}: loads {imported} unasked.'
      for module, path in LIBRARY.items()
      if not is_below(module, 'tff_partial.analysis')
      for line, imported, at_load in imports_of(parsed(path), LIBRARY)
      if at_load and imported.startswith('tff_partial.analysis.')
    ]
  )


def test_imports_are_found_wherever_they_are():
  tree = ast.parse("""
from typing import TYPE_CHECKING
from tff_partial import groups, train
if TYPE_CHECKING:
  import tff_partial.phases
def load():
  from tff_partial.algorithms import fed_recon
""")
  modules = ['tff_partial.groups', 'tff_partial.algorithms.fed_recon']
  assert imports_of(tree, modules) == {
    Import(2, 'typing', True),
    Import(3, 'tff_partial.groups', True),
    Import(3, 'tff_partial', True),
    Import(5, 'tff_partial.phases', False),
    Import(7, 'tff_partial.algorithms.fed_recon', False),
  }


@pytest.mark.parametrize(
  ('code', 'is_private'),
  [
    ('import tensorflow_federated.python.learning', True),
    ('from tensorflow_federated import python', True),
    ('from tensorflow_federated.python import learning', True),
    ('from tensorflow_federated.python.core.impl import types as t', True),
    ('import tensorflow_federated as tff\ntff.python.core', True),
    ('import tensorflow_federated as tff\ntff.learning.python_', False),
  ],
)
def test_private_names_of_tff_are_found(code, is_private):
  assert bool(list(private_tff(ast.parse(code)))) == is_private
