"""Exact minimization over weights of a client, in place of steps."""

from tff_partial._environment import lazily as _lazily

__all__ = ['affine', 'exact', 'linear_systems', 'newton', 'triangles']

__getattr__ = _lazily.importer(__name__, __all__)
