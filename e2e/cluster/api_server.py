"""An API server for as long as a block of code: what tests and benches use."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from e2e.cluster import build, cleanup, lifecycle, procfs
from e2e.cluster.crds import RLJOB_CRD, install
from e2e.cluster.errors import ClusterError
from e2e.cluster.kubectl import DEFAULT_TIMEOUT_S, Kubectl
from e2e.cluster.paths import state_folder
from e2e.cluster.state import StateFolder
from e2e.cluster.versions import KUBERAY_CRDS, Mode

_numbers = itertools.count(1)


class ApiServer:
    """etcd, kube-apiserver and kube-controller-manager on free loopback ports; several can run at once.

    A context manager. If its process dies without stopping it, the next one that starts for this user stops it.

    Args:
        folder: state folder that does not exist yet; one among this user's clusters when None.
        crd_files: CRDs to install; KubeRay's and RLJob's own when None.
    """

    def __init__(self, folder: Path | None = None, *, crd_files: Sequence[Path] | None = None) -> None:
        self._folder = StateFolder(path=folder or state_folder(f"session-{os.getpid()}-{next(_numbers)}"))
        self._crd_files = [*build.module_files(KUBERAY_CRDS), RLJOB_CRD] if crd_files is None else list(crd_files)
        self._kubectl = Kubectl(kubeconfig=self._folder.kubeconfig)

    @property
    def kubeconfig(self) -> Path:
        """Administrator's kubeconfig; there once it is started."""
        return self._folder.kubeconfig

    def log(self, program: str) -> Path:
        """Log file of ``etcd``, ``kube-apiserver`` or ``kube-controller-manager``."""
        return self._folder.log(program)

    def kubectl(self, *args: str | Path, input: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
        """Run ``kubectl ARGS`` as administrator and return what it printed.

        Args:
            args: arguments.
            input: standard input, for ``-f -``.
            timeout_s: deadline in seconds.

        Raises:
            CommandError: kubectl failed; the message holds what the server said.
        """
        return self._kubectl(*args, text_input=input, timeout_s=timeout_s)

    def start(self, say: build.Say = build.silent) -> ApiServer:
        """Start it and install the CRDs; programs that are not in the cache are built first, which takes minutes.

        Raises:
            ClusterError: it cannot be built or does not become ready; nothing of it is left running then.
        """
        build.build(Mode.API, say)
        cleanup.down_abandoned()
        try:
            lifecycle.api(self._folder, with_crds=False, holder=procfs.me(), say=say)
            if self._crd_files:
                install(self._kubectl, self._crd_files)
        except ClusterError:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop it and remove its state; does nothing the second time.

        Raises:
            ClusterError: a part of it cannot be stopped.
        """
        cleanup.down(self._folder)

    def __enter__(self) -> ApiServer:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


@contextmanager
def temporary_api_server(folder: Path, *, crds: bool) -> Iterator[Path]:
    """An API server whose state lies in ``folder``; yields its kubeconfig.

    Args:
        folder: state folder that does not exist yet.
        crds: install KubeRay's CRDs and RLJob's own.

    Raises:
        ClusterError: it cannot be built or does not become ready.
    """
    with ApiServer(folder, crd_files=None if crds else ()) as server:
        yield server.kubeconfig
