"""Methods to compare with that need no partial model, one module per paper.

All functions called `build_...` in its modules are names of this package: a new
baseline is a new file, and no other place lists it.
"""

import importlib
import pkgutil

__all__: list[str] = []

for _found in pkgutil.iter_modules(__path__):
  _module = importlib.import_module(f'{__name__}.{_found.name}')
  for _name, _value in vars(_module).items():
    if _name.startswith('build_'):
      globals()[_name] = _value
      __all__.append(_name)
__all__.sort()
