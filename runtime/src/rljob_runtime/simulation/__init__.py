"""A job in virtual time: the scheduler's own code over engines and a trainer that only take time.

::

    spec, plan ─┬─ layout.py    devices, engines, nodes
    device type ┤  devices.py   arithmetic, memory, links of a kind of device, with sources
    lengths ────┤  lengths.py   how long responses are
                └─ costs.py ───> World ─┐  seconds of everything (or measured.py: those of an earlier run)
                                        │
    running.py: RolloutScheduler, gate and buffer as in a job + engine.py ─> Outcome ─> findings.py: what limits, what would help

The event loop's clock jumps to the next timer (``virtual_time.py``). A run takes O(steps x (groups x samples x log(slots) + engines))
processor time and the memory of the batches in flight: devices count only as engines, and lengths of responses not at all.
"""
