"""Public modules of a package, each imported when it is first asked for."""

from collections.abc import Callable, Sequence
import importlib
from typing import Any


def importer(package: str, modules: Sequence[str]) -> Callable[[str], Any]:
  """Return a package's `__getattr__`, which imports these of its modules.

  So `tff_partial.dp.clipping` can be written after `import tff_partial`, and
  what is heavy, such as the figures of `analysis`, costs nothing unused.

  Args:
    package: The name of the package.
    modules: The names of its public modules.
  """

  def imported(name: str) -> Any:
    if name not in modules:
      raise AttributeError(f'module {package!r} has no attribute {name!r}')
    return importlib.import_module(f'{package}.{name}')

  return imported
