"""Rules of a valid job that types cannot express, one module per subject.

Each module has ``RULES`` over the spec, some also ``PLAN_RULES`` over spec and plan; :mod:`rljob_api.validation` runs them all. A rule
yields the problems it finds and knows nothing of the others.
"""
