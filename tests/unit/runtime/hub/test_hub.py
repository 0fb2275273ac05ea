"""Finding and downloading models from a fake Hub on loopback: what is fetched, what is not, and what is said when it cannot be had."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http

from rljob_runtime.entry.local_run import run_job
from rljob_runtime.errors import DownloadError, ModelError
from rljob_runtime.exit_codes import ExitCode
from rljob_runtime.hub.download import Downloader, fetch_files
from rljob_runtime.hub.resolve import resolve
from rljob_runtime.hub.source import HubFile, HubModel, is_hub_id, small_files
from tests.integration.jobs import job
from tests.support.fake_hub import TOKEN, FakeHub, serving

REPO = "team/tiny"
WEIGHT_BYTES = 50_000
NOWHERE = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
"""A Hub that cannot be reached."""
CONFIG = {"model_type": "qwen2", "hidden_size": 8}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The client asks the fake, has an empty cache, and does not sleep between two tries."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serving() as fake:
        monkeypatch.setattr(constants, "ENDPOINT", fake.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", fake.url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1024)
        for module in (file_download, _http):
            monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda s: None, time=lambda: 0.0, monotonic=lambda: 0.0))
        use_cache(monkeypatch, tmp_path / "cache")
        yield fake


def use_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """What a model's repository has, and more than is needed."""
    folder = tmp_path / "repository"
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    texts = {"config.json": json.dumps(CONFIG), "tokenizer_config.json": "{}", "model.safetensors.index.json": json.dumps(index)}
    texts |= {"README.md": "no", "modeling_tiny.py": "x = 1", "onnx/config.json": "{}", "pytorch_model.bin.index.json": "{}"}
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for number, name in enumerate([*index["weight_map"].values(), "consolidated.safetensors", "pytorch_model.bin"]):
        (folder / name).write_bytes(bytes([number]) * WEIGHT_BYTES)
    return folder


def find(revision: str | None = None, **settings: bool) -> tuple[HubModel, Path]:
    return resolve(
        REPO, revision, field="spec.model.path", revision_field="spec.model.revision", **{"weights": True, "code": False} | settings
    )


NEEDED = {
    "config.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
}


def test_a_cold_cache_gets_the_needed_files_of_one_commit_and_no_others(hub: FakeHub, repository: Path) -> None:
    commit = hub.add(REPO, repository).commit
    model, here = find()
    assert {file.path for file in model.files} == NEEDED
    assert model.commit == commit == here.name
    assert hub.downloads() == [], "the driver needs no weights"
    worker = Downloader(models=[model])
    folder = Path(worker.fetch()[REPO])
    assert {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} == NEEDED
    assert all((folder / name).read_bytes() == (repository / name).read_bytes() for name in NEEDED)
    assert worker.received_bytes() == 2 * WEIGHT_BYTES
    assert model.size_bytes == sum((repository / name).stat().st_size for name in NEEDED)


def test_what_is_there_already_is_not_asked_for_again(hub: FakeHub, repository: Path) -> None:
    hub.add(REPO, repository)
    model, _ = find()
    fetch_files(model)
    asked = len(hub.requests)
    fetch_files(model)
    assert len(hub.requests) == asked
    hub.down = True  # and a Hub that is down is none that is needed
    again, _ = find()
    assert {f.path for f in again.files} == NEEDED
    assert fetch_files(again).name == model.commit


def test_a_broken_connection_goes_on_where_it_broke(hub: FakeHub, repository: Path) -> None:
    first = hub.add(REPO, repository).etag("model-00001-of-00002.safetensors")
    hub.break_after_bytes[first] = 20_000
    model, _ = find()
    folder = fetch_files(model)
    assert (folder / "model-00001-of-00002.safetensors").read_bytes() == bytes([0]) * WEIGHT_BYTES
    whole, rest = (r for r in hub.downloads() if r.path.endswith(first))
    assert (whole.range, whole.sent_bytes) == (None, 20_000)
    resumed_at = int(str(rest.range).removeprefix("bytes=").removesuffix("-"))
    assert 0 < resumed_at <= 20_000
    assert (rest.status, rest.sent_bytes) == (206, WEIGHT_BYTES - resumed_at)


def test_files_that_were_whole_before_an_interruption_are_kept(hub: FakeHub, repository: Path) -> None:
    hub.add(REPO, repository)
    model, _ = find()
    one = [file for file in model.files if "00001" in file.path]
    fetch_files(HubModel(repo=REPO, commit=model.commit, files=tuple(one)))
    fetch_files(model)
    assert len(hub.downloads()) == 2


def test_processes_of_one_node_share_a_download_and_nodes_do_not(
    hub: FakeHub, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REPO, repository)
    model, _ = find()
    for node, expected in (("a", 2), ("b", 4)):
        use_cache(monkeypatch, tmp_path / node)
        together = threading.Barrier(3)

        def fetch(barrier: threading.Barrier = together) -> Path:
            barrier.wait(10.0)
            return fetch_files(model)

        with ThreadPoolExecutor(3) as pool:
            assert len({call.result() for call in [pool.submit(fetch) for _ in range(3)]}) == 1
        assert len(hub.downloads()) == expected


@pytest.mark.parametrize(("token", "said"), [(None, "no token was given"), ("hf_wrong", "the token given may not read it")])
def test_a_gated_model_says_so_before_anything_starts(
    hub: FakeHub, repository: Path, monkeypatch: pytest.MonkeyPatch, token: str | None, said: str
) -> None:
    hub.add(REPO, repository, gated=True)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ModelError, match=f"spec.model.path 'team/tiny' is gated and {said}; accept its terms .* HF_TOKEN"):
        find()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetch_files(find()[0]).is_dir()


def test_a_missing_model_a_wrong_revision_and_a_hub_that_is_not_there_have_errors_of_their_own(hub: FakeHub, repository: Path) -> None:
    with pytest.raises(ModelError, match=r"'team/tiny': no such folder in .*it has no such model, or not for this HF_TOKEN"):
        find()
    hub.add(REPO, repository, revisions=("main", "v1"))
    assert find("v1") == find()
    with pytest.raises(ModelError, match=r"spec.model.revision 'v2': spec.model.path 'team/tiny' has no such revision"):
        find("v2")
    hub.down = True
    with pytest.raises(ModelError, match=r"lookup on the Hub failed \(HfHubHTTPError: .*503"):
        resolve("team/other", None, field="spec.model.path", revision_field="spec.model.revision", weights=True, code=False)


def test_a_hub_that_cannot_be_reached(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", NOWHERE)
    with pytest.raises(ModelError, match=r"lookup on the Hub failed \(ConnectError"):
        find()


def test_a_user_hears_of_a_hub_that_cannot_be_reached_after_one_request(
    hub: FakeHub, repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REPO, repository)
    reachable = constants.HUGGINGFACE_CO_URL_TEMPLATE
    waits: list[float] = []
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=waits.append, time=lambda: 0.0, monotonic=lambda: 0.0))
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", NOWHERE)
    said = run_text(tmp_path, capsys)
    assert "'team/tiny': no such folder in" in said
    assert "lookup on the Hub failed (ConnectError" in said
    assert "name a folder that exists" in said
    assert waits == []
    with pytest.raises(ModelError):
        find()
    assert waits, "on a cluster the network may come up late"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", reachable)
    found = find(retries=False)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", NOWHERE)
    assert find(retries=False) == found, "the cache has it"


def test_a_model_without_safetensors_is_refused_with_what_it_has(hub: FakeHub, repository: Path) -> None:
    for path in (*repository.glob("*.safetensors"), repository / "model.safetensors.index.json"):
        path.unlink()
    hub.add(REPO, repository)
    with pytest.raises(ModelError, match=r"has neither model.safetensors nor .* but pytorch_model.bin; only safetensors"):
        find()


def test_no_config_is_no_model(hub: FakeHub, repository: Path) -> None:
    (repository / "config.json").unlink()
    hub.add(REPO, repository)
    with pytest.raises(ModelError, match="lacks a file that every model has"):
        find()


def test_a_tokenizer_alone_needs_no_weights_and_code_only_where_it_is_trusted(hub: FakeHub, repository: Path) -> None:
    hub.add(REPO, repository)
    tokenizer, _ = find(weights=False, code=True)
    assert {f.path for f in tokenizer.files} == {n for n in NEEDED if n.endswith(".json")} | {"modeling_tiny.py"}


def test_a_node_that_may_not_read_what_the_driver_could(
    hub: FakeHub, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REPO, repository, gated=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    model, _ = find()
    monkeypatch.delenv("HF_TOKEN")
    use_cache(monkeypatch, tmp_path / "node")
    with pytest.raises(ModelError, match=r"cannot be read with this machine's environment \(GatedRepoError\); HF_TOKEN"):
        fetch_files(model)


def test_a_hub_that_goes_away_meanwhile_is_worth_another_attempt(hub: FakeHub, repository: Path) -> None:
    hub.add(REPO, repository)
    model, _ = find()
    hub.down = True
    with pytest.raises(DownloadError) as caught:
        fetch_files(model)
    assert caught.value.retryable


def test_too_small_a_disk_is_reported_before_the_first_byte(hub: FakeHub, repository: Path) -> None:
    hub.add(REPO, repository)
    model, _ = find()
    huge = HubModel(repo=REPO, commit=model.commit, files=(HubFile(path="model.safetensors", size_bytes=2**60),))
    asked = len(hub.requests)
    with pytest.raises(ModelError, match=r"needs 1073741824\.0 GiB more in .*; set HF_HOME to a folder on a larger volume"):
        fetch_files(huge)
    assert len(hub.requests) == asked


def run_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a run of a job with the model says that is refused."""
    code = run_job(yaml.safe_dump(job(Path(REPO), steps=1)), tmp_path / "job.yaml", tmp_path / "run", overwrite=False, resume=False)
    assert code == ExitCode.INVALID
    assert not (tmp_path / "run").exists()
    return capsys.readouterr().err


def test_a_run_ends_before_anything_starts_when_the_model_is_gated_or_of_a_kind_that_cannot_be_trained(
    hub: FakeHub, repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "it has no such model" in run_text(tmp_path, capsys)
    hub.add(REPO, repository, gated=True)
    assert "spec.model.path 'team/tiny' is gated and no token was given" in run_text(tmp_path, capsys)
    (repository / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "num_local_experts": 8}))
    hub.add(REPO, repository)
    said = 'spec.model.path: "team/tiny": config.json has model_type gpt_oss and num_local_experts 8: of mixtures of experts'
    assert said in run_text(tmp_path, capsys)
    assert hub.downloads() == []


def test_what_is_a_hub_id(tmp_path: Path) -> None:
    assert all(is_hub_id(path) for path in ("team/tiny", "gpt2"))
    assert not any(is_hub_id(path) for path in (str(tmp_path), "/models/none", "./none", "a/b/c"))


def test_which_small_files_are_needed() -> None:
    names = [
        "a.json",
        "vocab.txt",
        "chat_template.jinja",
        "additional_chat_templates/tool.jinja",
        "spiece.model",
        "m.py",
        "x/a.json",
        "a.md",
    ]
    assert small_files(names, code=False) == names[:5]
    assert small_files(names, code=True) == names[:6]
