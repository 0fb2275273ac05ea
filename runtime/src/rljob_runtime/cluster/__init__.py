"""Where workers live: the only package that imports ray.

``protocol`` is what the rest of the runtime sees; ``ray_cluster`` and ``embedded`` implement it on Ray; ``host`` is the process
around a worker; ``idle_agent`` replaces Ray's two agents on the nodes of ``embedded``.
"""
