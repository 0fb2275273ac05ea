"""Jobs and worker groups from Python: what ``import rljob`` offers, for notebooks, tests and loops of one's own.

Users import :mod:`rljob`, whose names are stable; the modules here are not meant to be imported.
"""
