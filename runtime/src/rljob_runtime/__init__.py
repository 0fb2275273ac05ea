"""The in-pod half of RLJob: places workers on Ray, generates, rewards, trains and keeps weights in step.

Entry points: :mod:`rljob_runtime.commands.cli` (the ``rljob`` command) and :mod:`rljob_runtime.loop.driver` (the loop it wires).
Nothing here is imported by the operator; both sides meet in :mod:`rljob_api`.
"""
