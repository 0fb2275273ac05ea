"""Progress against a local HTTP server in the API server's place: what is sent, how often, and that nothing it does hurts."""

import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rljob_api.v1alpha1.status import Progress
from rljob_runtime.entry import kubernetes, progress
from rljob_runtime.entry.progress import EVERY_S, TYPICAL_OF_STEPS, ApiServer, ProgressDisplay, api_server, apply_progress
from rljob_runtime.records import StepRecord
from rljob_runtime.report.prometheus import Deadline
from tests.support.pace import HANG_S
from tests.support.report_fakes import INFO, FakeClock, make_record

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


class Server(ThreadingHTTPServer):
    """Answers every PATCH with ``status`` and remembers it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status = 200
        self.answer: dict[str, Any] = {"kind": "Status", "message": "rljobs is forbidden to everybody"}
        self.seen: list[dict[str, Any]] = []
        self.release = threading.Event()
        self.release.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append({"path": self.path, "body": body, "headers": dict(self.headers)})
        self.server.release.wait(30)
        answer = json.dumps(self.server.answer).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.release.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def here(server: Server, tmp_path: Path) -> ApiServer:
    (tmp_path / "token").write_text("first\n")
    return ApiServer(url=server.url, token_file=tmp_path / "token", ca_file=None)


def test_a_write_is_a_server_side_apply_of_progress_alone_with_the_present_token(server: Server, here: ApiServer) -> None:
    written = {"attempt": 2, "step": 3, "totalSteps": 9, "weightVersion": 3, "reward": "0.5000", "lastUpdateTime": "2026-01-02T03:04:05Z"}
    value = Progress.model_validate(written)
    assert apply_progress(here, "team", "math", value) is None
    here.token_file.write_text("renewed\n")
    assert apply_progress(here, "team", "math", value) is None
    first, second = server.seen
    assert first["path"] == "/apis/rljob.dev/v1alpha1/namespaces/team/rljobs/math/status?fieldManager=rljob-runtime&force=true"
    assert first["headers"]["Content-Type"] == "application/apply-patch+yaml"
    assert [r["headers"]["Authorization"] for r in server.seen] == ["Bearer first", "Bearer renewed"]
    assert second["body"] == {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "math", "namespace": "team"},
        "status": {"progress": written},
    }


@pytest.mark.parametrize(
    ("spec", "status", "at_s"),
    [
        ({"activeDeadlineSeconds": 60}, {"startTime": "1970-01-01T00:01:40Z"}, 160.0),
        ({}, {"startTime": "1970-01-01T00:01:40Z"}, None),
        ({"activeDeadlineSeconds": 60}, {}, None),
    ],
)
def test_the_answer_gives_the_deadline_that_the_operator_keeps(
    server: Server, here: ApiServer, spec: dict[str, Any], status: dict[str, Any], at_s: float | None
) -> None:
    """It may be raised, or removed, while the job runs."""
    server.answer = {"kind": "RLJob", "spec": spec, "status": status}
    deadline = Deadline(at_s=1.0)
    assert apply_progress(here, "team", "math", Progress(), deadline) is None
    assert deadline.at_s == at_s


@pytest.mark.parametrize(("status", "reason"), [(403, "403 Forbidden: rljobs is forbidden"), (500, "500 Internal Server Error: rljobs is")])
def test_a_refusal_is_reported_in_the_servers_words(server: Server, here: ApiServer, status: int, reason: str) -> None:
    server.status = status
    said = apply_progress(here, "team", "math", Progress())
    assert said is not None
    assert said.startswith(reason)


def test_an_absent_server_a_missing_token_and_a_slow_answer_are_reasons_too(
    server: Server, here: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = ApiServer(url=f"http://127.0.0.1:{free.getsockname()[1]}", token_file=here.token_file, ca_file=None)
        assert "refused" in (apply_progress(nobody, "team", "math", Progress()) or "")
    monkeypatch.setattr(progress, "REQUEST_TIMEOUT_S", 0.1)
    server.release.clear()
    assert "timed out" in (apply_progress(here, "team", "math", Progress()) or "")
    here.token_file.unlink()
    assert "FileNotFoundError" in (apply_progress(here, "team", "math", Progress()) or "")


def test_the_servers_certificate_is_checked_against_the_accounts_own_authority(server: Server, here: ApiServer, tmp_path: Path) -> None:
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*make.split(), "-keyout", tmp_path / "key", "-out", tmp_path / "ca.crt"], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ca.crt", tmp_path / "key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    secure = ApiServer(url=server.url.replace("http:", "https:"), token_file=here.token_file, ca_file=tmp_path / "ca.crt")
    assert apply_progress(secure, "team", "math", Progress()) is None
    distrusting = ApiServer(url=secure.url, token_file=here.token_file, ca_file=None)
    assert "CERTIFICATE_VERIFY_FAILED" in (apply_progress(distrusting, "team", "math", Progress()) or "")
    assert len(server.seen) == 1


def test_the_server_is_found_from_the_environment_of_a_pod_only(tmp_path: Path) -> None:
    pod = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert api_server(pod, tmp_path) is None
    (tmp_path / "token").write_text("t")
    assert api_server({}, tmp_path) is None
    assert api_server(pod, tmp_path) == ApiServer(url="https://[fd00::1]:6443", token_file=tmp_path / "token", ca_file=tmp_path / "ca.crt")


class Recorder:
    """A ``send`` that answers ``answer``, and the display over it without a thread."""

    def __init__(self, *, thread: bool = False) -> None:
        self.sent: list[Progress] = []
        self.said: list[str] = []
        self.answer: str | None = None
        self.clock = FakeClock()
        self.display = ProgressDisplay(
            self.send, attempt=2, notify=self.said.append, clock=time.monotonic if thread else self.clock, now=lambda: NOW, thread=thread
        )

    def send(self, value: Progress) -> str | None:
        self.sent.append(value)
        return self.answer

    def steps(self) -> list[int]:
        return [p.step for p in self.sent]


def test_at_most_one_write_in_five_seconds_with_the_newest_step_and_the_last_one_at_the_end(tmp_path: Path) -> None:
    run = Recorder()
    run.display.started(INFO, tmp_path, 3)
    run.display.write_due()
    for step in range(4, 24):
        run.clock.advance(1.0)
        run.display.step(make_record(step))
        run.display.write_due()
    assert run.steps() == [3, 8, 13, 18, 23]
    run.display.write_due()
    assert run.steps() == [3, 8, 13, 18, 23], "nothing new, nothing written"
    run.display.step(make_record(24))
    run.display.close()
    run.display.close()
    assert run.steps() == [3, 8, 13, 18, 23, 24]
    assert run.said == []
    last = run.sent[-1]
    assert (last.attempt, last.total_steps, last.weight_version, last.last_update_time) == (2, INFO.total_steps, 24, "2026-01-02T03:04:05Z")
    assert (last.reward, last.pass_rate, last.tokens_per_second) == ("0.8200", "0.7200", "6400.0")


def test_failures_are_logged_once_counted_and_tried_ever_more_rarely(tmp_path: Path) -> None:
    run = Recorder()
    run.answer = "403 Forbidden"
    run.display.started(INFO, tmp_path, None)
    waits = []
    for _ in range(6):
        before = run.clock.now_s
        while not run.steps() or len(run.sent) == len(waits):
            run.clock.advance(run.display.write_due() or 0.0)
        waits.append(run.clock.now_s - before)
    assert waits == [0.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    assert run.said == ["progress cannot be written to the RLJob's status, training goes on: 403 Forbidden"]
    run.answer = None
    run.display.close()
    assert run.said[1:] == ["progress in the RLJob's status: 6 of 7 writes failed"]


def test_where_a_step_s_time_goes_is_the_median_of_recent_steps_without_the_attempt_s_first(tmp_path: Path) -> None:
    run = Recorder()
    run.display.started(INFO, tmp_path, 3)
    run.display.step(make_record(4, time__step_s=9.0))
    run.display.write_due()
    assert run.sent[-1].step_milliseconds is None
    for step, step_s in enumerate((2.0, 1.0, 60.0, 1.5004, 1.5), start=5):
        run.display.step(make_record(step, time__step_s=step_s, time__offload_s=0.25, time__load_s=0.125, sync__stall_s=0.002))
    run.clock.advance(EVERY_S)
    run.display.write_due()
    written = run.sent[-1].step_milliseconds
    assert written is not None
    assert written.model_dump() == {
        **{"step": 1500, "generate": 58, "reward": 4, "score": 0, "train": 27, "sync": 9, "stall": 2, "offload": 375},
    }
    for step in range(10, 10 + TYPICAL_OF_STEPS):
        run.display.step(make_record(step, time__step_s=0.75))
    run.display.close()
    body = run.sent[-1]
    assert body.step_milliseconds is not None
    assert body.step_milliseconds.step == 750, "steps of long ago do not count"
    assert len(body.model_dump_json(by_alias=True)) < 500


@pytest.mark.parametrize("steps", [0, 2])
def test_without_times_or_finite_ones_none_are_written(tmp_path: Path, steps: int) -> None:
    run = Recorder()
    run.display.started(INFO, tmp_path, None)
    for step in range(steps):
        run.display.step(make_record(step, time__step_s=float("nan")))
    run.display.close()
    assert [progress.step_milliseconds for progress in run.sent] == [None]


def test_a_crd_without_the_milliseconds_gets_the_rest_of_the_progress(tmp_path: Path) -> None:
    """What kube-apiserver answers to a field that a CRD does not declare: all of the write is refused."""
    run, said = Recorder(), "500 Internal Server Error: failed to create typed patch object: .status.progress.stepMilliseconds: field not"
    received: list[Progress] = []

    def older(value: Progress) -> str | None:
        if value.step_milliseconds is not None:
            return said
        received.append(value)
        return None

    display = ProgressDisplay(older, attempt=1, notify=run.said.append, clock=run.clock, thread=False)
    display.started(INFO, tmp_path, None)
    for step in range(1, 9):
        display.step(make_record(step))
        display.write_due()
        run.clock.advance(60.0)
    display.close()
    assert [progress.step for progress in received] == [1, 3, 4, 5, 6, 7, 8]
    assert display.failures == 1
    assert run.said == [
        "the cluster's CRD has no stepMilliseconds in progress, which is written without it from now on: apply the CRD of this version of "
        f"RLJob; the API server said: {said}",
        "progress in the RLJob's status: 1 of 8 writes failed",
    ]


def test_numbers_that_are_none_are_left_out(tmp_path: Path) -> None:
    run = Recorder()
    run.display.started(INFO, tmp_path, None)
    run.display.step(make_record(1, reward__mean=float("nan"), rollout__tokens_per_s=float("inf"), reward__pass_rate=1e300))
    run.display.write_due()
    assert (run.sent[0].reward, run.sent[0].tokens_per_second, run.sent[0].pass_rate) == (None, None, None)


def test_a_server_that_hangs_never_holds_up_a_step_and_the_end_only_for_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "CLOSE_TIMEOUT_S", 0.2)
    run = Recorder(thread=True)
    entered, release, answered = threading.Event(), threading.Event(), threading.Event()

    def hang(value: Progress) -> str | None:
        entered.set()
        release.wait(HANG_S)
        answered.set()
        return None

    display = ProgressDisplay(hang, attempt=1, notify=run.said.append)
    display.started(INFO, tmp_path, None)
    assert entered.wait(HANG_S)
    for step in range(1000):
        display.step(make_record(step))
    display.close()
    assert not answered.is_set()
    release.set()


def test_the_thread_writes_the_first_and_the_last_value(tmp_path: Path) -> None:
    run = Recorder(thread=True)
    run.display.started(INFO, tmp_path, None)
    run.display.step(make_record(1))
    run.display.step(make_record(2))
    run.display.close()
    assert run.steps()[-1] == 2
    assert len(run.sent) <= 3


def test_a_driver_in_a_pod_reports_to_its_own_rljob_and_one_without_a_token_says_so(
    server: Server, here: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pod = kubernetes.PodContext(namespace="team", job="math", attempt=4, run_folder=tmp_path, has_storage=True)
    monkeypatch.setattr(progress, "api_server", lambda environment: here)
    display = kubernetes.display_of(pod, Deadline())
    display.started(INFO, tmp_path, None)
    display.step(make_record(1))
    display.close()
    assert {r["path"].split("?")[0] for r in server.seen} == {"/apis/rljob.dev/v1alpha1/namespaces/team/rljobs/math/status"}
    last = server.seen[-1]["body"]["status"]["progress"]
    assert (last["attempt"], last["step"]) == (4, 1)
    monkeypatch.setattr(progress, "api_server", lambda environment: None)
    kubernetes.display_of(pod, Deadline())
    assert "progress is not written" in capsys.readouterr().out


def test_a_server_that_refuses_every_write_holds_up_neither_steps_nor_the_end(
    server: Server, here: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status = 500
    pod = kubernetes.PodContext(namespace="team", job="math", attempt=1, run_folder=tmp_path, has_storage=True)
    monkeypatch.setattr(progress, "api_server", lambda environment: here)
    display = kubernetes.display_of(pod, Deadline())
    display.started(INFO, tmp_path, None)
    server.release.clear()
    for step in range(1, 501):
        display.step(make_record(step))
    assert len(server.seen) < 50, "steps do not wait for answers, of which none has come"
    server.release.set()
    display.close()
    assert server.seen[-1]["body"]["status"]["progress"]["step"] == 500
    said = capsys.readouterr().out
    assert said.count("training goes on: 500 Internal Server Error: rljobs is forbidden to everybody") == 1
    assert f"{len(server.seen)} of {len(server.seen)} writes failed" in said


def test_without_steps_to_train_the_scores_are_those_of_the_validation(tmp_path: Path) -> None:
    run = Recorder()
    run.display.started(replace(INFO, total_steps=0), tmp_path, None)
    run.display.step(StepRecord(step=0, version=0, metrics={"validation/mean": 0.25, "validation/pass_rate": 0.125}))
    run.display.close()
    last = run.sent[-1]
    assert (last.step, last.total_steps, last.reward, last.pass_rate) == (0, 0, "0.2500", "0.1250")
