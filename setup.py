"""Builds the tff-partial wheel, which pyproject.toml describes."""

import setuptools

# `baselines` and `tasks` are too common names to be installed under.
_PROGRAMS = 'tff_partial_programs'
_INSIDE = setuptools.find_packages(
  include=['baselines', 'baselines.*', 'tasks', 'tasks.*']
)

setuptools.setup(
  packages=[
    *setuptools.find_packages(include=['tff_partial', 'tff_partial.*']),
    _PROGRAMS,
    *(f'{_PROGRAMS}.{name}' for name in _INSIDE),
  ],
  package_dir={
    f'{_PROGRAMS}.{name}': name.replace('.', '/') for name in _INSIDE
  },
  package_data={
    'tff_partial': ['py.typed'],
    f'{_PROGRAMS}.tasks': ['recipes/*.flags'],
  },
)
