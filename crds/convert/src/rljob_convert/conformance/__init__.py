"""RLinf 0.3.0's configurations, as they are written, on RLJob's placement: read, checked, planned and compared.

::

    config.cluster, machines ── cluster ──> Topology ─┐
    config                   ── sizes ────────────────┴─> rljob_api.placement ── outcome ──> conformance results
"""
