"""How a run begins and ends: on this machine, on a cluster's head pod, and what each reports outward."""
