"""Downloads a model into the Hub cache of the machine it runs on; as a worker, one per node.

The cache is huggingface_hub's own (``HF_HOME``), so that what is there already is not downloaded, files are locked against other processes
that download the same one, and each file appears when it is whole. A broken connection goes on where it broke; after a process that was
killed, files that were whole are kept.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from rljob_runtime.errors import DownloadError, ModelError
from rljob_runtime.hub.source import HubFile, HubModel

THREADS = 4
"""Files downloaded at the same time."""


class Downloader:
    """Downloads models, and says meanwhile how far it is; needs two threads."""

    def __init__(self, *, models: Sequence[HubModel]) -> None:
        """Download nothing yet."""
        self._models = models
        self._received = _Received()

    def fetch(self) -> dict[str, str]:
        """Folder of each model on this machine, by repository.

        Raises:
            ModelError: a file is not there any more, or this node's token may not read it, or the disk is too small.
            DownloadError: the connection failed, or the files are not whole.
        """
        return {model.repo: str(fetch_files(model, self._received)) for model in self._models}

    def received_bytes(self) -> int:
        """Bytes that came over the network so far."""
        return self._received.num_bytes


class _Received:
    """Counts bytes from several threads."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes


def fetch_files(model: HubModel, received: _Received | None = None) -> Path:
    """Download what is not in the cache; returns the folder that has all files of ``model``.

    Raises:
        ModelError: a file is not there any more, or this machine's token may not read it, or the disk is too small.
        DownloadError: the connection failed, or the files are not whole.
    """
    counter = received or _Received()
    _require_space(model)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="download") as pool:
        paths = list(pool.map(lambda file: _fetch(model, file, counter), model.files))
    for file, path in zip(model.files, paths, strict=True):
        found = path.stat().st_size
        if file.size_bytes is not None and found != file.size_bytes:
            raise DownloadError(
                f"{model.repo}: {path} has {found} bytes, the Hub says {file.size_bytes}; delete the file, so that it is downloaded again"
            )
    return paths[0].parents[model.files[0].path.count("/")]


def _fetch(model: HubModel, file: HubFile, received: _Received) -> Path:
    from huggingface_hub import errors, hf_hub_download

    where = f"{file.path} of {model.repo} (commit {model.commit[:12]})"
    try:
        return Path(hf_hub_download(model.repo, file.path, revision=model.commit, tqdm_class=_bar(received)))
    except (errors.RepositoryNotFoundError, errors.EntryNotFoundError, errors.RevisionNotFoundError) as error:
        root = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None else error
        refused = errors.RepositoryNotFoundError, errors.EntryNotFoundError, errors.RevisionNotFoundError, errors.OfflineModeIsEnabled
        if not isinstance(root, refused):
            raise DownloadError(f"{where} is not in the cache, and the Hub does not give it ({type(root).__name__}: {root})") from error
        raise ModelError(
            f"{where} cannot be read with this machine's environment ({type(root).__name__}); HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE "
            "must be on the nodes (spec.nodeGroups[].env) as they are for the driver (spec.head.env)"
        ) from error
    except Exception as error:  # errors of whichever HTTP library the client carries come through
        raise DownloadError(f"{where} could not be downloaded ({type(error).__name__}: {error})") from error


def _require_space(model: HubModel) -> None:
    """Compare what is missing with the disk before the first byte of it.

    Raises:
        ModelError: it does not fit.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    missing = sum(f.size_bytes or 0 for f in model.files if not try_to_load_from_cache(model.repo, f.path, revision=model.commit))
    cache = Path(constants.HF_HUB_CACHE)
    disk = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(disk).free
    if missing > free:
        raise ModelError(
            f"{model.repo} needs {missing / 2**30:.1f} GiB more in {cache}, free are {free / 2**30:.1f} GiB; "
            "set HF_HOME to a folder on a larger volume (spec.nodeGroups[].env)"
        )


def _bar(received: _Received) -> Any:
    """A class in place of huggingface_hub's progress bar that shows nothing and counts."""

    class Counting:
        def __init__(self, *args: Any, **settings: Any) -> None:
            self.total: float | None = settings.get("total")

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *error: object) -> None:
            self.close()

        def update(self, num_bytes: float | None = 1) -> None:
            received.add(int(num_bytes or 0))

        def close(self) -> None: ...

        def refresh(self) -> None: ...

        def set_postfix_str(self, *args: Any, **settings: Any) -> None: ...

        def update_transfer(self, num_bytes: float | None = 1) -> None: ...

        def set_transfer_postfix_str(self, *args: Any, **settings: Any) -> None: ...

    return Counting
