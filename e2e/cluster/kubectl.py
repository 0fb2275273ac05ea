"""kubectl on one cluster, whatever the user's own KUBECONFIG says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster import shell
from e2e.cluster.build import binary

_NO_PROXY = {name: "" for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")}
DEFAULT_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubectl:
    """Runs kubectl as the cluster's administrator."""

    kubeconfig: Path

    def __call__(self, *args: str | Path, text_input: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
        """Run ``kubectl ARGS`` and return what it printed.

        Args:
            args: arguments.
            text_input: standard input, for ``-f -``.
            timeout_s: deadline in seconds.

        Raises:
            CommandError: kubectl failed; the message holds what the server said.
        """
        argv = [binary("kubectl"), "--kubeconfig", self.kubeconfig, *args]
        return shell.run(argv, text_input=text_input, timeout_s=timeout_s, env=_NO_PROXY)

    def json(self, *args: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """Run ``kubectl ARGS -o json`` and return the decoded answer.

        Raises:
            CommandError: kubectl failed.
        """
        return json.loads(self(*args, "-o", "json", timeout_s=timeout_s))

    def apply(self, *files: Path) -> list[str]:
        """Server-side apply (CRDs are too large for an annotation); returns the objects' names as ``kind.group/name``.

        Raises:
            CommandError: kubectl failed.
        """
        flags = [argument for file in files for argument in ("-f", str(file))]
        return self("apply", "--server-side", "--force-conflicts", "-o", "name", *flags).split()
