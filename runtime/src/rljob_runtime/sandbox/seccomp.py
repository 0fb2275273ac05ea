"""A seccomp filter: system calls that fail with EPERM from now on, in this thread and in all it starts.

Installed without libseccomp: the filter is a classic BPF program of about a hundred instructions (Linux, Documentation/userspace-api/
seccomp_filter.rst). It denies by name, because what CPython and its extension modules need changes with versions; what matters is that
no socket, no other process and no new namespace can be reached.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
from collections.abc import Iterable

from rljob_runtime.sandbox import kernel

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
_CLONE_THREAD = 0x00010000
_OFFSET_NR, _OFFSET_ARCH, _OFFSET_ARGUMENT, _OFFSET_SECOND, _OFFSET_THIRD, _OFFSET_FOURTH = 0, 4, 16, 24, 32, 40
_LOAD, _AND, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_BITS, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_SOCKET_TYPE, _MSG_FASTOPEN = 0xF, 0x20000000
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

_X86_64 = {
    "socket": 41, "fork": 57, "vfork": 58, "clone": 56, "clone3": 435, "execve": 59, "execveat": 322, "kill": 62, "tkill": 200,
    "tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "setpgid": 109, "setsid": 112, "ptrace": 101, "personality": 135,
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "init_module": 175, "finit_module": 313, "delete_module": 176,
    "kexec_load": 246, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "keyctl": 250, "add_key": 248, "request_key": 249,
    "unshare": 272, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "memfd_create": 319, "prlimit64": 302,
    "sched_setaffinity": 203, "sched_setscheduler": 144, "sched_setparam": 142, "sched_setattr": 314, "setpriority": 141,
    "ioprio_set": 251, "shmget": 29, "msgget": 68, "semget": 64, "mq_open": 240, "name_to_handle_at": 303, "open_by_handle_at": 304,
    "kcmp": 312, "fanotify_init": 300, "sendto": 44, "sendmsg": 46, "sendmmsg": 307,
}  # fmt: skip
_AARCH64 = {
    "socket": 198, "clone": 220, "clone3": 435, "execve": 221, "execveat": 281, "kill": 129, "tkill": 130, "tgkill": 131,
    "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "setpgid": 154, "setsid": 157, "ptrace": 117, "personality": 92, "mount": 40,
    "umount2": 39, "pivot_root": 41, "chroot": 51, "init_module": 105, "finit_module": 273, "delete_module": 106, "kexec_load": 104,
    "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "keyctl": 219, "add_key": 217, "request_key": 218, "unshare": 97,
    "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "memfd_create": 279, "prlimit64": 261, "sched_setaffinity": 122,
    "sched_setscheduler": 119, "sched_setparam": 118, "sched_setattr": 274, "setpriority": 140, "ioprio_set": 30, "shmget": 194,
    "msgget": 186, "semget": 190, "mq_open": 180, "name_to_handle_at": 264, "open_by_handle_at": 265, "kcmp": 272, "fanotify_init": 262,
    "sendto": 206, "sendmsg": 211, "sendmmsg": 269,
}  # fmt: skip
_COMMON = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_open": 434, "pidfd_getfd": 438,
    "process_madvise": 440, "mount_setattr": 442, "process_mrelease": 448,
}  # fmt: skip
_NUMBERS = {"x86_64": _X86_64 | _COMMON, "aarch64": _AARCH64 | _COMMON}

_NETWORK = ("socket",)
_FLAGS = {"sendto": _OFFSET_FOURTH, "sendmsg": _OFFSET_THIRD, "sendmmsg": _OFFSET_FOURTH}
"""Where the flags of each call that can connect by itself are."""
_PROCESSES = ("fork", "vfork", "execve", "execveat", "kill", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal")
_SPECIAL = ("clone", "clone3", "tgkill", "prlimit64", *_PROCESSES, *_NETWORK, *_FLAGS)
_ALWAYS = tuple(name for name in dict.fromkeys([*_X86_64, *_AARCH64, *_COMMON]) if name not in _SPECIAL)
"""setsid and setpgid are among them: all that the process starts stays in its group and dies with it."""


def deny(*, network: bool, processes: bool, streams: bool = False) -> None:
    """Install the filter for this thread and all it starts.

    Args:
        network: deny sockets of every family; a socketpair, which reaches no one else, stays.
        streams: TCP sockets stay, whose connections Landlock limits.
        processes: deny other processes: to start, to become, or to signal one. Threads stay.

    Raises:
        OSError: the kernel has no seccomp filters, or the filter is not written for this machine.
    """
    machine = platform.machine()
    if machine not in _NUMBERS:
        raise OSError(errno.ENOSYS, f"no seccomp filter is written for {machine}")
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    code = b"".join(_program(machine, network=network, processes=processes, streams=streams))
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    program = Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    kernel.prctl(kernel.PR_SET_SECCOMP, kernel.SECCOMP_MODE_FILTER, ctypes.byref(program))


def _program(machine: str, *, network: bool, processes: bool, streams: bool) -> Iterable[bytes]:
    numbers = _NUMBERS[machine]
    denied = [*_ALWAYS, *(_NETWORK if network and not streams else ()), *(_PROCESSES if processes else ())]
    yield from (_op(_LOAD, _OFFSET_ARCH), _op(_JUMP_EQUAL, _AUDIT_ARCH[machine], 1, 0), _op(_RETURN, _KILL_PROCESS))
    yield _op(_LOAD, _OFFSET_NR)
    if machine == "x86_64":  # the same calls under other numbers
        yield from (_op(_JUMP_AT_LEAST, _X32_BIT, 0, 1), _op(_RETURN, _ERRNO | errno.EPERM))
    for name in denied:
        if name in numbers:
            yield from (_op(_JUMP_EQUAL, numbers[name], 0, 1), _op(_RETURN, _ERRNO | errno.EPERM))
    # Its flags lie in memory, out of a filter's sight; libraries fall back to clone.
    yield from (_op(_JUMP_EQUAL, numbers["clone3"], 0, 1), _op(_RETURN, _ERRNO | errno.ENOSYS))
    yield from _argument(numbers["prlimit64"], _op(_JUMP_EQUAL, 0, 1, 0))
    if network and streams:
        yield from _tcp_only(numbers["socket"])
        for name, offset in _FLAGS.items():
            yield from _no_fast_open(numbers[name], offset)
    if processes:
        yield from _argument(numbers["clone"], _op(_JUMP_BITS, _CLONE_THREAD, 1, 0))
        yield from _argument(numbers["tgkill"], _op(_JUMP_EQUAL, os.getpid(), 1, 0))
    yield _op(_RETURN, _ALLOW)


def _argument(number: int, allowed: bytes) -> Iterable[bytes]:
    """Deny a call unless its first argument satisfies ``allowed``, which skips one instruction where it does."""
    yield _op(_JUMP_EQUAL, number, 0, 4)
    yield from (_op(_LOAD, _OFFSET_ARGUMENT), allowed, _op(_RETURN, _ERRNO | errno.EPERM), _op(_RETURN, _ALLOW))


def _tcp_only(number: int) -> Iterable[bytes]:
    """Deny sockets other than plain TCP over IPv4 and IPv6: Landlock limits no others, MPTCP's among them."""
    yield _op(_JUMP_EQUAL, number, 0, 11)
    yield from (_op(_LOAD, _OFFSET_ARGUMENT), _op(_JUMP_EQUAL, socket.AF_INET, 1, 0), _op(_JUMP_EQUAL, socket.AF_INET6, 0, 7))
    yield from (_op(_LOAD, _OFFSET_SECOND), _op(_AND, _SOCKET_TYPE), _op(_JUMP_EQUAL, socket.SOCK_STREAM, 0, 4))
    yield from (_op(_LOAD, _OFFSET_THIRD), _op(_JUMP_EQUAL, 0, 1, 0), _op(_JUMP_EQUAL, socket.IPPROTO_TCP, 0, 1))
    yield from (_op(_RETURN, _ALLOW), _op(_RETURN, _ERRNO | errno.EPERM))


def _no_fast_open(number: int, offset: int) -> Iterable[bytes]:
    """Deny a call whose flags, at ``offset``, ask for TCP Fast Open: it connects where Landlock does not look."""
    yield _op(_JUMP_EQUAL, number, 0, 4)
    yield from (_op(_LOAD, offset), _op(_JUMP_BITS, _MSG_FASTOPEN, 0, 1), _op(_RETURN, _ERRNO | errno.EPERM), _op(_RETURN, _ALLOW))


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
