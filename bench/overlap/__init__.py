"""How much generating ahead brings: the real scheduler in simulated time, and real jobs on this machine."""
