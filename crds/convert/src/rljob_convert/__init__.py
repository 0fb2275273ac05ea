"""ROLL and RLinf: their configuration files to RLJob manifests, RLinf's placement classes, and conformance with RLinf's placement.

:mod:`~rljob_convert.conversion` is ``rljob convert``, :mod:`~rljob_convert.conformance` is ``rljob conformance``,
:mod:`~rljob_convert.placement` is for Python programs that used RLinf's. Depends on rljob_api; nothing of RLJob's own way depends on it.

What is wrong is raised as :mod:`rljob_api.errors`: a file that cannot be read is a wrong manifest, an impossible placement a
:class:`~rljob_api.errors.PlacementError`.
"""
