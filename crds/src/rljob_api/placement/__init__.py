"""Where processes run: devices and nodes, the two grammars that choose some of them, and who gets which.

::

    nodes, groups -> topology() -> Topology ── select(groups) ─> Selection ── ranks, device_mapping ─> units of every process
                                                                                       └── assignment ─> node and devices of each
"""
