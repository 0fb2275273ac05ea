"""Writes ``.status.progress`` of the job's own RLJob, by server-side apply with the pod's ServiceAccount; best effort.

::

    Reporter -> ProgressDisplay.step  -> latest value -> own thread, at most every 5 s -> PATCH .../rljobs/<name>/status

Training never waits for it: a write that fails or is slow is logged once, counted, and tried again later with the newest value. A cluster
whose CRD is older than this image refuses the whole write for a field that it does not know; then the field is left out.
"""

from __future__ import annotations

import http.client
import json
import math
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rljob_api.naming import PROGRESS_FIELD_MANAGER
from rljob_api.v1alpha1.rljob import API_VERSION, KIND
from rljob_api.v1alpha1.status import Progress
from rljob_runtime.addresses import host_and_port
from rljob_runtime.records import StepRecord
from rljob_runtime.report import Level, PhaseView, RunInfo, RunSummary
from rljob_runtime.report.faster import SKIPPED_STEPS, to_milliseconds, typical_of
from rljob_runtime.report.prometheus import Deadline

ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
EVERY_S = 5.0
MAX_EVERY_S = 60.0
"""Longest wait between writes after failures, each of which doubles it."""
REQUEST_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 10.0
"""Longest that the end of a run waits for the last write."""
MAX_ANSWER_BYTES = 1 << 16
MAX_JOB_BYTES = 1 << 22
"""More than etcd takes for an object."""
TYPICAL_OF_STEPS = 32
"""Steps whose medians are written: enough that one checkpoint or validation does not count, and recent."""
STEP_MILLISECONDS = "stepMilliseconds"
"""The newest field, which an older CRD lacks."""

Send = Callable[[Progress], str | None]
"""Writes a value; returns None, or why it was not written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServer:
    """How to reach the API server as this pod."""

    url: str
    """Without a slash at its end."""
    token_file: Path
    """Read for every request: the kubelet renews it."""
    ca_file: Path | None
    """Read for every request, too; None uses the system's certificates."""


def api_server(environment: Mapping[str, str], account: Path = ACCOUNT_FOLDER) -> ApiServer | None:
    """The API server of the cluster this process runs in; None outside of pods and in pods without a ServiceAccount token."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (account / "token").is_file():
        return None
    return ApiServer(url=f"https://{host_and_port(host, port)}", token_file=account / "token", ca_file=account / "ca.crt")


def apply_progress(server: ApiServer, namespace: str, name: str, progress: Progress, deadline: Deadline | None = None) -> str | None:
    """Apply the value; returns None, or why that failed. ``deadline`` is set to that of the RLJob in the answer."""
    path = f"/apis/{API_VERSION}/namespaces/{namespace}/rljobs/{name}/status?fieldManager={PROGRESS_FIELD_MANAGER}&force=true"
    status = {"progress": progress.model_dump(mode="json", by_alias=True, exclude_none=True)}
    body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name, "namespace": namespace}, "status": status}
    try:
        request = urllib.request.Request(
            server.url + path,
            data=json.dumps(body).encode(),
            method="PATCH",
            headers={"Content-Type": "application/apply-patch+yaml", "Authorization": f"Bearer {server.token_file.read_text().strip()}"},
        )
        context = ssl.create_default_context(cafile=server.ca_file)
        # No proxy: the API server is inside the cluster, proxies of the environment are not.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
        with opener.open(request, timeout=REQUEST_TIMEOUT_S) as answer:
            job = answer.read(MAX_JOB_BYTES)
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.reason}{_message(error)}"
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    if deadline is not None:
        deadline.at_s = _deadline_of(job)
    return None


def _deadline_of(job: bytes) -> float | None:
    """When the operator ends a job, in Unix time: ``activeDeadlineSeconds`` after its start; None without one, and before its start."""
    try:
        found = json.loads(job)
        started = datetime.fromisoformat(found["status"]["startTime"])
        return started.timestamp() + int(found["spec"]["activeDeadlineSeconds"])
    except (ValueError, KeyError, TypeError):
        return None


def _message(error: urllib.error.HTTPError) -> str:
    """The API server's answer in words."""
    try:
        return f": {json.loads(error.read(MAX_ANSWER_BYTES))['message']}"
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return ""


class ProgressDisplay:
    """Implements :class:`rljob_runtime.report.Display` on the RLJob's status; every method returns at once, ``finished`` within seconds."""

    def __init__(
        self,
        send: Send,
        *,
        attempt: int,
        notify: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        thread: bool = True,
    ) -> None:
        """Make it; the thread starts with the run.

        Args:
            send: writes one value.
            attempt: of the job, counted from 1.
            notify: called with the reason when writes fail.
            clock: monotonic seconds.
            now: the time that is written.
            thread: whether writes happen in a thread of their own; tests call ``write_due`` themselves.
        """
        self._send = send
        self._attempt = attempt
        self._notify = notify
        self._clock = clock
        self._now = now
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._latest: Progress | None = None
        """Not written yet."""
        self._next_write_s = -math.inf
        self._total_steps = 0
        self._num_steps = 0
        self._recent: deque[StepRecord] = deque(maxlen=TYPICAL_OF_STEPS)
        self._knows_milliseconds = True
        """Whether the cluster's CRD has them, as far as is known."""
        self._failures_in_row = 0
        self._said: set[str] = set()
        self.writes = 0
        """Attempted so far."""
        self.failures = 0
        """How many of them failed."""
        self._thread = threading.Thread(target=self._run, name="rljob-progress", daemon=True) if thread else None

    def started(self, info: RunInfo, folder: Path, resumed_step: int | None) -> None:
        """The attempt and where it begins are written first."""
        self._total_steps = info.total_steps
        self._offer(step=resumed_step or 0, weightVersion=resumed_step or 0)
        if self._thread is not None:
            self._thread.start()

    def step(self, record: StepRecord) -> None:
        """The newest step replaces what is not written yet; without steps to train its scores are those of the validation."""
        scores = "reward" if self._total_steps else "validation"
        self._num_steps += 1
        if self._num_steps > SKIPPED_STEPS:
            self._recent.append(record)
        times = typical_of(self._recent)
        self._offer(
            step=record.step,
            weightVersion=record.version,
            reward=_number(record.metrics.get(f"{scores}/mean")),
            passRate=_number(record.metrics.get(f"{scores}/pass_rate")),
            tokensPerSecond=_number(record.metrics.get("rollout/tokens_per_s"), digits=1),
            stepMilliseconds=to_milliseconds(times).model_dump(by_alias=True) if times is not None else None,
        )

    def finished(self, summary: RunSummary, report: Path | None) -> None:
        """The last value is written now, whenever the one before it was."""
        self.close()

    def close(self) -> None:
        """Write what is left, within :data:`CLOSE_TIMEOUT_S`; safe to call twice."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._wake.set()
        if self._thread is None:
            self.write_due()
        elif self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)
        if self.failures:
            self._notify(f"progress in the RLJob's status: {self.failures} of {self.writes} writes failed")

    def history(self, records: Sequence[StepRecord]) -> None:
        """Only the present is written."""

    def phase_started(self, name: str) -> None:
        """Phases are the log's."""

    def phase_ended(self, phase: PhaseView, *, failed: bool) -> None:
        """Phases are the log's."""

    def event(self, text: str, level: Level) -> None:
        """Events are the log's."""

    def tick(self, running: Sequence[PhaseView]) -> None:
        """The thread has its own clock."""

    def write_due(self) -> float | None:
        """Write the latest value if it is time, at once when closing; returns the seconds until the next write, None when nothing waits."""
        with self._lock:
            latest, wait_s = self._latest, self._next_write_s - self._clock()
            if latest is None:
                return None
            if wait_s > 0 and not self._closing:
                return wait_s
            self._latest = None
        changed: dict[str, object] = {"last_update_time": self._now().strftime("%Y-%m-%dT%H:%M:%SZ")}
        if not self._knows_milliseconds:
            changed["step_milliseconds"] = None
        reason = self._send(latest.model_copy(update=changed))
        self.writes += 1
        with self._lock:
            self._failures_in_row = 0 if reason is None else self._failures_in_row + 1
            self._next_write_s = self._clock() + min(EVERY_S * 2**self._failures_in_row, MAX_EVERY_S)
            if reason is not None:
                self.failures += 1
                self._latest = self._latest or latest  # not lost, unless there is a newer one
        if reason is not None and self._knows_milliseconds and STEP_MILLISECONDS in reason:
            self._knows_milliseconds = False
            self._notify(
                f"the cluster's CRD has no {STEP_MILLISECONDS} in progress, which is written without it from now on: "
                f"apply the CRD of this version of RLJob; the API server said: {reason}"
            )
        elif reason is not None and reason not in self._said:
            self._said.add(reason)
            self._notify(f"progress cannot be written to the RLJob's status, training goes on: {reason}")
        return None if self._closing else 0.0

    def _offer(self, **values: int | str | Mapping[str, int] | None) -> None:
        progress = Progress.model_validate({"attempt": self._attempt, "totalSteps": self._total_steps, **values})
        with self._lock:
            self._latest = progress
        self._wake.set()

    def _run(self) -> None:
        while not self._closing:
            wait_s = self.write_due()
            if wait_s is None:
                self._wake.wait()
            else:
                self._pause(wait_s)
            self._wake.clear()
        self.write_due()

    def _pause(self, wait_s: float) -> None:
        """Wait until a value is due; only closing ends it early, newer values do not."""
        until = self._clock() + wait_s
        while not self._closing and (left_s := until - self._clock()) > 0:
            self._wake.wait(left_s)
            if not self._closing:
                self._wake.clear()


def _number(value: float | None, digits: int = 4) -> str | None:
    """A decimal number as text; None for what is no number, or too large to be worth writing."""
    if value is None or not math.isfinite(value) or abs(value) >= 1e20:
        return None
    return f"{value:.{digits}f}"
