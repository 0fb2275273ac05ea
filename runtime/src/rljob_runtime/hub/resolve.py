"""Finds a model on the Hub from the driver's machine: its commit, the files to download, and whether this token may read them.

Takes a handful of small requests and leaves configuration and tokenizer in the cache of this machine, where the driver needs them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rljob_runtime.errors import ModelError, RuntimeFault
from rljob_runtime.hub.download import fetch_files
from rljob_runtime.hub.source import INDEX, SINGLE, WEIGHTS, HubFile, HubModel, small_files

TIMEOUT_S = 10.0
"""Of one request to the Hub that lists files."""


def resolve(
    repo: str, revision: str | None, *, field: str, revision_field: str, weights: bool, code: bool, retries: bool = True
) -> tuple[HubModel, Path]:
    """What to download of ``repo``, and the folder on this machine that has all of it but the weights.

    Where the Hub does not answer, the cache of this machine does.

    Args:
        repo: ``owner/name``.
        revision: branch, tag or commit; None is the default branch.
        field: of the spec that names it, for messages.
        revision_field: of the spec that names ``revision``.
        weights: False for a repository of which only the tokenizer is used.
        code: whether its Python files are used, too.
        retries: whether a Hub that cannot be reached is asked again for about 25 s (the client's own waits), as where a network comes up
            after the process; else the first failed connection is the answer.

    Raises:
        ModelError: there is no such model or revision, this token may not read it, the Hub does not answer and the cache does not have it,
            or it has no safetensors weights.
    """
    from huggingface_hub import hf_hub_download

    first = "config.json" if weights else "tokenizer_config.json"
    with _explained(repo, field, f"{revision_field} {revision!r}"):
        if not retries:
            _require_connection(repo, first, revision)
        folder = Path(hf_hub_download(repo, first, revision=revision, etag_timeout=TIMEOUT_S)).parent
        sizes = _listing(repo, folder)
        wanted = small_files(sizes, code=code)
        if weights:
            wanted += _weights(repo, folder, sizes, field)
        model = HubModel(repo=repo, commit=folder.name, files=tuple(HubFile(path=p, size_bytes=sizes.get(p)) for p in sorted(set(wanted))))
        fetch_files(model.without_weights())
    return model, folder


def _require_connection(repo: str, file: str, revision: str | None) -> None:
    """Ask the Hub for a file that is not in the cache, once; whatever it answers, it is there.

    Raises:
        Exception: of the client's HTTP library, where no connection was made.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(try_to_load_from_cache(repo, file, revision=revision), str):
        return
    with contextlib.suppress(HfHubHTTPError):  # said better, or tried again, by the download
        get_hf_file_metadata(hf_hub_url(repo, file, revision=revision), timeout=TIMEOUT_S)


def _listing(repo: str, folder: Path) -> Mapping[str, int | None]:
    """Sizes of the repository's files by name; of those in the cache where the Hub does not answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = HfApi().model_info(repo, revision=folder.name, files_metadata=True, timeout=TIMEOUT_S)
    except Exception as error:  # no connection, in the words of whichever HTTP library the client carries
        if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
            raise
        return {str(file.relative_to(folder)): None for file in folder.rglob("*") if file.is_file()}
    return {sibling.rfilename: sibling.size for sibling in info.siblings or ()}


def _weights(repo: str, folder: Path, names: Mapping[str, int | None], field: str) -> list[str]:
    """The safetensors files that together have every weight once; some repositories also have all in one file of another layout.

    Raises:
        ModelError: there are none.
    """
    from huggingface_hub import hf_hub_download

    if INDEX in names:
        index: dict[str, Any] = json.loads(Path(hf_hub_download(repo, INDEX, revision=folder.name)).read_text(encoding="utf-8"))
        return sorted(set(index["weight_map"].values()))
    others = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", WEIGHTS))]
    if SINGLE in names or not others:  # a cache without weights does not say in what format they are
        return [SINGLE]
    raise ModelError(
        f"{field} {repo!r} has neither {SINGLE} nor {INDEX} but {', '.join(sorted(others)[:3])}; only safetensors weights are read: "
        "convert it with transformers' save_pretrained, or name a repository that has them"
    )


@contextlib.contextmanager
def _explained(repo: str, field: str, revision: str) -> Iterator[None]:
    """Errors of the Hub's client as what the user can do about them.

    Raises:
        ModelError: for any of them.
    """
    from huggingface_hub import errors, get_token

    try:
        yield
    except RuntimeFault:
        raise
    except errors.GatedRepoError as error:
        token = "the token given may not read it" if get_token() else "no token was given"
        raise ModelError(
            f"{field} {repo!r} is gated and {token}; accept its terms on the Hub and give a token of that account as HF_TOKEN: exported "
            "for rljob run, in spec.head.env and spec.nodeGroups[].env (valueFrom.secretKeyRef) on Kubernetes"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{revision}: {field} {repo!r} has no such revision; write a branch, a tag or a whole commit of it") from error
    except errors.RemoteEntryNotFoundError as error:
        raise ModelError(f"{field} {repo!r} is on the Hub but lacks a file that every model has ({_short(error)}); name another") from error
    except Exception as error:  # errors of whichever HTTP library the client carries come through; all mean: not to be had
        raise ModelError(
            f"{field} {repo!r}: no such folder in {Path.cwd()}, and the lookup on the Hub failed ({_cause(error)}); "
            "name a folder that exists; an example's first lines have the command that makes its model, such as `rljob model tiny "
            "--out models/tiny`"
        ) from error


def _cause(error: BaseException) -> str:
    """What went wrong, and with which Hub where that was chosen by the environment."""
    from huggingface_hub import errors

    root = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None else error
    if isinstance(root, errors.OfflineModeIsEnabled):
        return type(root).__name__
    if isinstance(root, errors.RepositoryNotFoundError):
        return "it has no such model, or not for this HF_TOKEN"
    endpoint = f" at HF_ENDPOINT={os.environ['HF_ENDPOINT']}" if os.environ.get("HF_ENDPOINT") else ""
    return f"{type(root).__name__}{endpoint}: {_short(root)}"


def _short(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no detail")[:200]
