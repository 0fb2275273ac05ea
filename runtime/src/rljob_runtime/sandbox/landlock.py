"""Landlock: only some folders and files exist for this thread and all it starts (Linux 5.13 and later).

Source: Linux, Documentation/userspace-api/landlock.rst. What a kernel's ABI does not know is left out of the request.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable

from rljob_runtime.sandbox import kernel

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH, _NET_PORT = 1, 1, 2
TCP_ABI = 4
"""The first one that knows of TCP."""
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL_DEV = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
_REFER = 1 << 13
_V1_RIGHTS = (1 << 13) - 1
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_TCP_BIND_CONNECT, _TCP_CONNECT = 0b11, 0b10
_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11


def abi() -> int:
    """Version that the kernel offers; 0 where it has none."""
    try:
        return kernel.syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)
    except OSError:
        return 0


def restrict(
    *, read: Iterable[str], write: Iterable[str], list_names: Iterable[str] = (), network: bool, connect_port: int | None = None
) -> int:
    """Leave the process these folders and files; returns the ABI, 0 where nothing was done because the kernel has no Landlock.

    Args:
        read: paths to read and execute, with what is below; those that do not exist are left out.
        write: paths to do anything in.
        list_names: folders whose names, and all below, can be listed.
        network: deny TCP as well, where the kernel can.
        connect_port: TCP connections to it stay.

    Raises:
        OSError: a path cannot be opened, or the kernel refused.
    """
    version = abi()
    if version == 0:
        return 0
    rights = _V1_RIGHTS | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0) | (_IOCTL_DEV if version >= 5 else 0)
    fields = [rights]
    if version >= TCP_ABI:
        fields.append(_TCP_BIND_CONNECT if network else 0)
    if version >= 6:
        fields.append(_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS)
    request = struct.pack(f"<{len(fields)}Q", *fields)
    ruleset = kernel.syscall(_CREATE_RULESET, request, len(request), 0)
    try:
        for path in dict.fromkeys(read):
            _allow(ruleset, path, rights & (_EXECUTE | _READ_FILE | _READ_DIR))
        for path in dict.fromkeys(list_names):
            _allow(ruleset, path, _READ_DIR)
        for path in dict.fromkeys(write):
            _allow(ruleset, path, rights)
        if network and connect_port is not None and version >= TCP_ABI:
            kernel.syscall(_ADD_RULE, ruleset, _NET_PORT, struct.pack("<QQ", _TCP_CONNECT, connect_port), 0)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return version


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        allowed = rights if stat.S_ISDIR(os.fstat(descriptor).st_mode) else rights & _FILE_RIGHTS
        kernel.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("<Qi", allowed, descriptor), 0)
    finally:
        os.close(descriptor)
