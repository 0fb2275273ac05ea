"""ROLL and RLinf: their configuration files to RLJob manifests, RLinf's placement classes, and conformance with RLinf's placement.

:func:`convert` and :func:`render` are ``rljob convert``; :mod:`~rljob_convert.conversion` has the rest of it,
:mod:`~rljob_convert.conformance` is ``rljob conformance``, :mod:`~rljob_convert.placement` is for Python programs that used RLinf's.
Depends on rljob_api; nothing of RLJob's own way depends on it.

What is wrong is raised as :mod:`rljob_api.errors`: a file that cannot be read or is no RL job is a wrong manifest, an impossible placement
a :class:`~rljob_api.errors.PlacementError`.
"""

from rljob_convert.conversion import Converted, convert, render

__all__ = ["Converted", "convert", "render"]
