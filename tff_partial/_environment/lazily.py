"""Modules and names of a package, each imported when it is first asked for."""

import atexit
from collections.abc import Callable, Iterable, Mapping, Sequence
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pkgutil
import sys
import types
from typing import Any

_NEEDED = ('tensorflow', 'tensorflow_federated')


def importer(
  package: str,
  names: Iterable[str],
  homes: Mapping[str, Iterable[str]] | None = None,
) -> Callable[[str], Any]:
  """Return a package's `__getattr__`, which imports what it is asked for.

  So `tff_partial.dp.clipping` can be written after `import tff_partial`, and
  what is heavy, such as the figures of `analysis`, costs nothing unused.

  Args:
    package: The name of the package.
    names: Its public names, which are modules unless they are in `homes`.
    homes: Modules below the package to names of theirs, `name` or `name as
      public_name`.
  """
  places = {name: name for name in names}
  for module, theirs in (homes or {}).items():
    for text in theirs:
      name, _, public = text.partition(' as ')
      places[public or name] = f'{module}:{name}'

  def imported(name: str) -> Any:
    if name not in places:
      raise AttributeError(f'module {package!r} has no attribute {name!r}')
    found = pkgutil.resolve_name(f'{package}.{places[name]}')
    setattr(sys.modules[package], name, found)
    return found

  return imported


class _CallbackFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """A finder by which TensorFlow's first import is that of `require_tff`."""

  def find_spec(
    self,
    fullname: str,
    path: Sequence[str] | None,
    target: types.ModuleType | None = None,
  ) -> importlib.machinery.ModuleSpec | None:
    del path, target
    if fullname not in _NEEDED:
      return None
    sys.meta_path.remove(self)
    try:
      _require_tff()
    except BaseException:
      sys.meta_path.insert(0, self)
      raise
    # The import goes on with the module's spec, which would execute it again.
    module = sys.modules[fullname]
    self._own_spec = module.__spec__
    module.__spec__ = importlib.machinery.ModuleSpec(fullname, self)
    return module.__spec__

  def create_module(
    self, spec: importlib.machinery.ModuleSpec
  ) -> types.ModuleType:
    return sys.modules[spec.name]

  def exec_module(self, module: types.ModuleType) -> None:
    module.__spec__ = self._own_spec


def _require_tff() -> None:
  importlib.import_module('tff_partial._environment.require_tff')
  federated = sys.modules['tensorflow_federated']
  # A default context complains if it still exists at interpreter shutdown.
  atexit.register(federated.test.set_no_default_context)
  # Keras can load saved models with these layers.
  importlib.import_module('tff_partial.layers')
  # Our runtime takes the place of TFF's default.
  importlib.import_module('tff_partial.runtimes')


def require_tff_when_needed() -> None:
  """Import TensorFlow as `require_tff` does, once any module asks for it.

  If TFF is missing, or TensorFlow was imported already, this imports it now.
  """
  is_missing = importlib.util.find_spec('tensorflow_federated') is None
  if is_missing or 'tensorflow' in sys.modules:
    _require_tff()
  else:
    sys.meta_path.insert(0, _CallbackFinder())
