"""From a spec with explicit placements to a :class:`~rljob_api.planning.plan.Plan`, and what follows from a plan.

::

    nodeGroups ─ nodes ─┐
    components ─ component ─┴─ explicit ─> plan.Plan ─┬─ environment   what a worker finds in its environment
                                                      ├─ standby       where a process waits to replace a lost engine
                                                      └─ sync_routes   which trainer rank feeds which engine shard

:mod:`rljob_api.planner` is the entry: it resolves ``mode: Auto`` first.
"""
