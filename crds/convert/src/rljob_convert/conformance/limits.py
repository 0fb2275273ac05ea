"""Bounds of RLinf configs and conformance cases, in one place: far above any real job, small enough for 2 s and 200 MB."""

from __future__ import annotations

MAX_CASE_CHARACTERS = 262_144
"""Characters of one case, all its texts together, and of one line."""
MAX_CASE_VALUES = 100_000
"""Maps, lists and single values of one case."""
MAX_DEPTH = 64
"""Levels of nesting of one case."""
MAX_NODES = 16_384
"""Machines of one cluster."""
MAX_ACCELERATORS_PER_NODE = 1_024
"""As in nodeGroups[].devicesPerNode of the manifest."""
MAX_UNITS = 262_144
"""Accelerators of one cluster."""
MAX_GROUP_NODES = 262_144
"""Nodes of all node groups together; a node counts in every group it is in."""
MAX_COMPONENTS = 256
"""Names in component_placement."""
MAX_PROCESSES = 16_384
"""Processes of all components of one case together."""
MAX_WORKERS = 4_096
"""Processes whose environment is written down."""
MAX_LISTED_DEVICES = 262_144
"""Devices that the placements of one case list, counted for every process that sees or owns them."""
