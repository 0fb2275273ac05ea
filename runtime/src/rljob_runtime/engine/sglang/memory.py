"""What SGLang's server holds on its devices, by kind.

On CPU the stand-in for torch_memory_saver keeps a ledger of what it holds. On accelerators the server says what its start took; whether
that is still there follows from what it was asked to do.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from rljob_runtime.offload.states import StateKind

Bytes = dict[StateKind, int]

TAG_OF: Mapping[StateKind, str] = {StateKind.KV_CACHE: "kv_cache", StateKind.PARAMS: "weights"}
"""SGLang's names, in the order in which memory is given back."""
_REPORTED_AS: Mapping[StateKind, str] = {StateKind.KV_CACHE: "kvcache", StateKind.PARAMS: "weight"}
_GIB = 2**30


def tags(kinds: Collection[StateKind]) -> list[str]:
    """Kinds by SGLang's names."""
    return [tag for kind, tag in TAG_OF.items() if kind in kinds]


class ServerMemory(Protocol):
    """Of one server."""

    def held(self, away: Collection[StateKind]) -> Bytes:
        """Bytes on the device by kind; ``away`` are those that were asked to leave."""


class LedgerMemory:
    """CPU: counted where it is freed."""

    def __init__(self, ledger: Path) -> None:
        """Read from a file that the server writes."""
        self._ledger = ledger

    def held(self, away: Collection[StateKind]) -> Bytes:
        """See ``ServerMemory``; what did not leave is counted, whatever was asked."""
        del away
        held = json.loads(self._ledger.read_text())
        return {kind: int(held.get(tag, 0)) for kind, tag in TAG_OF.items()}


class ReportedMemory:
    """Accelerators: what the start took on all ranks."""

    def __init__(self, server_info: Mapping[str, Any]) -> None:
        """Read the server's answer to ``/server_info``, which has GiB of its first rank."""
        usage = server_info["internal_states"][0]["memory_usage"]
        self._full = {kind: int(float(usage[name]) * _GIB) * int(server_info["tp_size"]) for kind, name in _REPORTED_AS.items()}

    def held(self, away: Collection[StateKind]) -> Bytes:
        """See ``ServerMemory``."""
        return {kind: 0 if kind in away else size for kind, size in self._full.items()}
