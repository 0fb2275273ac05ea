"""From a spec and its plan to running, wired workers: roles, settings, launch, device sharing, assembly."""
