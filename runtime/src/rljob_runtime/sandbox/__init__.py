"""Takes from a process what code that a user or a model wrote has no use for; without privileges, and irrevocably.

::

    Limits ──> confine() ──> capabilities dropped ─> rlimits ─> no_new_privs ─> Landlock (files) ─> seccomp (network, processes)
                                                                                     └── Active: what this kernel gave

Landlock says which files exist for the process and everything it starts, seccomp which system calls; each alone leaks (Landlock leaves
UDP and UNIX sockets, seccomp sees no paths). A kernel without Landlock leaves files as the user's rights have them, and ``Active`` says so.
"""

from rljob_runtime.sandbox.confine import RUN_MARKER, Active, Limits, confine

__all__ = ["RUN_MARKER", "Active", "Limits", "confine"]
