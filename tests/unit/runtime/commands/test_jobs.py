"""``rljob top``, ``describe``, ``logs`` and ``open``, on local runs and on a cluster through kubectl; a script plays kubectl's part."""

import json
import stat
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rljob_api.vocabulary import Reason
from rljob_runtime.commands import jobs
from rljob_runtime.commands.advice import ADVICE
from rljob_runtime.commands.cli import app
from rljob_runtime.commands.kubectl import reason
from rljob_runtime.report import FolderMode, Reporter, RunFolder, RunStatus
from tests.layout.tree import ROOT
from tests.support.report_fakes import INFO, FakeClock, make_record
from tests.unit.api.manifests import manifest
from tests.unit.runtime.report.test_timeline import Quiet

HEALTHY = {Reason.SPEC_VALID, Reason.NOT_SUSPENDED, Reason.RUNNING, Reason.COMPLETED, Reason.NODES_READY}
WAITING = {Reason.PENDING, Reason.SUSPENDED, Reason.QUEUED, Reason.STARTING, Reason.RESTARTING}

KUBECTL = """#!{python}
import json, sys
args = sys.argv[1:]
world = json.load(open({world!r}))
namespace = None
if args[:1] == ["--namespace"]:
    namespace, args = args[1], args[2:]
if args[:2] == ["get", "rljobs.rljob.dev"] and args[-2:] == ["--output", "json"]:
    rest = args[2:-2]
    items = [j for j in world["jobs"] if namespace is None or j["metadata"]["namespace"] == namespace]
    if rest in ([], ["--all-namespaces"]):
        print(json.dumps({{"items": items}}))
    else:
        found = [j for j in items if [j["metadata"]["name"]] == rest]
        if not found:
            sys.exit('Error from server (NotFound): rljobs.rljob.dev "' + rest[0] + '" not found')
        print(json.dumps(found[0]))
elif args[:3] == ["get", "pods", "--selector"] and args[-2:] == ["--output", "json"]:
    wanted = dict(pair.split("=") for pair in args[3].split(","))
    print(json.dumps({{"items": [p for p in world["pods"] if wanted.items() <= p["metadata"]["labels"].items()]}}))
elif args[:1] == ["logs"] and args[2:4] == ["--container", "ray"]:
    sys.stdout.write(world["logs"][args[1]])
elif args[:1] == ["port-forward"]:
    print("Forwarding", *args[1:])
else:
    sys.exit("unknown command: " + " ".join(args))
"""


def pod(name: str, attempt: int, kind: str) -> dict[str, Any]:
    labels = {"rljob.dev/job": "math", "rljob.dev/attempt": str(attempt), "ray.io/node-type": kind, "ray.io/cluster": "math-a2-x"}
    return {"metadata": {"name": name, "labels": labels}, "spec": {"nodeName": "node-1"}, "status": {"phase": "Running"}}


def job(**status: Any) -> dict[str, Any]:
    document = manifest()
    document["metadata"] = {"name": "math", "namespace": "team", "creationTimestamp": "2026-01-02T03:04:05Z"}
    return {**document, "status": status}


CONDITION = {"type": "Succeeded", "status": "Unknown", "reason": "Restarting", "message": "Attempt 2 follows."}
STATUS = {
    "attempt": 2,
    "nodes": "1/1",
    "conditions": [CONDITION],
    "nodeGroups": [{"name": "local", "desired": 1, "ready": 1, "rankRange": "0"}],
    "progress": {"attempt": 2, "step": 7, "totalSteps": 30, "weightVersion": 7, "reward": "0.5000", "tokensPerSecond": "120.0"},
    "lastFailure": {"reason": "OutOfMemory", "message": "ray-worker was killed", "podName": "math-a1-w", "attempt": 1},
}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What kubectl knows; written when the test calls ``write``."""
    world = {
        "jobs": [job(**STATUS)],
        "pods": [pod("math-a2-worker", 2, "worker"), pod("math-a2-head", 2, "head"), pod("math-a1-head", 1, "head")],
        "logs": {
            "math-a2-head": "[driver] step 7\nray: noise\n",
            "math-a2-worker": "[actor_train-0] loaded\n[actor_train-1] other\n[actor_train-0] trains\n",
        },
    }
    script, file = tmp_path / "bin" / "kubectl", tmp_path / "world.json"
    script.parent.mkdir()
    script.write_text(KUBECTL.format(python=sys.executable, world=str(file)))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    file.write_text(json.dumps(world))
    monkeypatch.setenv("PATH", str(script.parent), prepend=":")
    monkeypatch.setenv("COLUMNS", "200")
    return {"world": world, "write": lambda: file.write_text(json.dumps(world))}


def rljob(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_top_lists_the_jobs_of_the_cluster(cluster: dict[str, Any]) -> None:
    code, text = rljob("top", "-A")
    head, row = text.splitlines()
    assert code == 0
    assert head.split() == ["NAMESPACE", "NAME", "STATUS", "STEP", "REWARD", "TOKENS/S", "NODES", "ATTEMPT", "AGE"]
    assert row.split()[:8] == ["team", "math", "Restarting", "7/30", "0.5000", "120.0", "1/1", "2"]
    cluster["world"]["jobs"][0]["metadata"]["namespace"] = "local"
    cluster["write"]()
    assert rljob("top", "-A")[1].split()[:9] == head.split()
    cluster["world"]["jobs"] = []
    cluster["write"]()
    assert rljob("top") == (0, "no RLJobs\n")


def test_a_job_without_a_status_yet_is_listed_too() -> None:
    (row,) = jobs.top_rows([job()], datetime(2026, 1, 2, 5, 4, 5, tzinfo=UTC))
    assert row == ("team", "math", "-", "-", "-", "-", "-", "-", "2h")


def test_describe_has_conditions_progress_failure_advice_and_placement(cluster: dict[str, Any]) -> None:
    code, text = rljob("describe", "math", "--namespace", "team")
    assert code == 0
    assert "Unknown, Restarting: Attempt 2 follows." in text
    assert "local: 1 of 1 ready, ranks 0" in text
    assert "math-a2-head: Running on node-1" in text
    assert "math-a1-head" not in text
    assert "step 7 of 30, weights v7, reward 0.5000, 120.0 tokens/s" in text
    assert "attempt 1: OutOfMemory (math-a1-w): ray-worker was killed" in text
    assert ADVICE["OutOfMemory"] in text
    assert "actor_train  Trainer" in text


def test_describe_shows_where_the_time_of_a_job_goes_and_what_would_help(cluster: dict[str, Any]) -> None:
    """The same figures as of the local run below, and the same advice."""
    measured = {"step": 10_000, "generate": 5_800, "reward": 400, "score": 0, "train": 2_700, "sync": 900, "stall": 0, "offload": 0}
    (listed,) = cluster["world"]["jobs"]
    listed["status"] = STATUS | {"progress": {**STATUS["progress"], "stepMilliseconds": measured}}
    cluster["write"]()
    code, text = rljob("describe", "math", "--namespace", "team")
    assert code == 0
    assert "10 s a step: generate 58%, reward 4%, train 27%, sync 9%, rest 2%" in text
    assert "overlap.asyncGenerationRatio 1: a step of 6.4 s if cores are left for it, 9.6 s or more" in text
    assert "now 10 s (36% less at best)" in " ".join(text.split())


@pytest.mark.parametrize("measured", [None, {"step": 0}, {"step": 10, "newer": 1}, {"step": 10_000}])
def test_describe_without_times_or_without_something_to_gain_gives_no_advice(cluster: dict[str, Any], measured: Any) -> None:
    (listed,) = cluster["world"]["jobs"]
    listed["status"] = STATUS | {"progress": {**STATUS["progress"], "stepMilliseconds": measured}}
    cluster["write"]()
    code, text = rljob("describe", "math", "--namespace", "team")
    assert (code, "faster" in text) == (0, False)
    assert "actor_train  Trainer" in text


def test_what_kubectl_says_is_what_the_user_reads(cluster: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = rljob("describe", "other")
    assert (code, 'rljobs.rljob.dev "other" not found' in text) == (2, True)
    monkeypatch.setenv("PATH", "")
    code, text = rljob("top")
    assert (code, "kubectl is not on the PATH" in text) == (2, True)


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        (
            'E1126 00:28:20.312502   31573 memcache.go:265] "Unhandled Error"\nThe connection to the server localhost:8080 was refused\n',
            "The connection to the server localhost:8080 was refused; check the kubeconfig and its context",
        ),
        ('Error from server (NotFound): rljobs.rljob.dev "a" not found', '"a" not found; rljob top -A lists the jobs'),
        ('error: the server doesn\'t have a resource type "rljobs"', "RLJob is not installed on this cluster"),
        ("E1126 00:28:20.312502   31573 a.go:1] only this", "only this"),
        ("", ""),
    ],
)
def test_kubectls_reason_comes_without_its_log_and_with_a_remedy(stderr: str, said: str) -> None:
    found = reason(stderr)
    assert said in found
    assert "memcache" not in found


def test_logs_are_the_drivers_or_a_workers_of_the_current_attempt(cluster: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    assert rljob("logs", "math") == (0, "step 7\n")
    assert rljob("logs", "math", "--worker", "actor_train-0") == (0, "loaded\ntrains\n")
    cluster["world"]["pods"] = []
    cluster["write"]()
    code, text = rljob("logs", "math")
    assert (code, "the pods of its last attempt are gone" in text) == (2, True)
    assert rljob("logs", "math", "-f", "--worker", "actor_train-0")[0] == 2


def test_the_dashboard_is_forwarded_from_the_head(cluster: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    code, text = rljob("open", "math", "--port", "9000")
    assert code == 0
    assert "http://127.0.0.1:9000" in text
    assert "kubectl get secret math-a2-x" in text
    assert "Forwarding pod/math-a2-head 9000:8265" in capfd.readouterr().out
    assert rljob("open", "math", "--what", "report")[0] == 2


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "200")
    document = manifest()
    document["spec"]["training"] = {"steps": 30}
    info = type(INFO)(**{**{f: getattr(INFO, f) for f in INFO.__dataclass_fields__}, "spec_yaml": yaml.safe_dump(document)})
    folder = RunFolder.open(tmp_path / "run", FolderMode.NEW)
    with Reporter(folder, info, Quiet(), clock=FakeClock(), packages={}, ticker=False) as writing:
        (folder.logs / "actor_train-0.log").write_text("loaded\n")
        for step in (2, 3, 4):
            writing.record(make_record(step))
        writing.event("starting")
        writing.finish(RunStatus.FAILED, "EngineLostError: engine 0 ended")
    return folder.path


def test_a_local_run_is_listed_described_and_its_logs_are_shown(run: Path) -> None:
    code, text = rljob("top", str(run))
    assert (code, text.splitlines()[0].split()) == (0, ["NAME", "STATUS", "STEP", "REWARD", "TOKENS/S"]), "what a local run has"
    assert text.splitlines()[1].split()[1:3] == ["failed", "4/30"]
    code, text = rljob("describe", str(run))
    assert code == 0
    assert "step 4 of 30, reward 0.190, 6.4k tokens/s" in text
    assert "a step, mean of recent steps: generate 58%" in text
    assert "overlap.asyncGenerationRatio 1: a step of 0.06 s if cores are left for it, 0.10 s or more" in text
    assert "now 0.10 s (36% less at best)" in " ".join(text.split())
    assert "EngineLostError: engine 0 ended" in text
    assert ADVICE["WorkerLost"] in text
    assert rljob("logs", str(run), "--worker", "actor_train-0") == (0, "loaded\n")
    assert "starting" in rljob("logs", str(run))[1]
    code, text = rljob("logs", str(run), "--worker", "nobody")
    assert (code, "there are actor_train-0" in text) == (2, True)


def test_the_report_of_a_local_run_is_opened(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    code, text = rljob("open", str(run))
    assert (code, text.strip()) == (0, opened[0])
    assert opened == [(run / "report.html").resolve().as_uri()]
    assert rljob("open", str(run), "--what", "dashboard")[0] == 2


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    code, text = rljob("describe", str(tmp_path))
    assert (code, f"{tmp_path}: is not a run folder" in text) == (2, True)


def test_every_reason_that_somebody_has_to_act_on_has_advice() -> None:
    assert ADVICE.keys() == {reason.value for reason in Reason} - {reason.value for reason in HEALTHY | WAITING}
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert [reason for reason in ADVICE if f"`{reason}`" not in page] == []


@pytest.mark.parametrize("command", ["top", "describe", "logs", "open"])
def test_the_plugin_of_kubectl_has_the_same_commands(command: str) -> None:
    code = "import sys; from rljob_runtime.commands.cli_jobs import kubectl_plugin; sys.argv[0] = 'kubectl-rlj'; kubectl_plugin()"
    done = subprocess.run([sys.executable, "-c", code, command, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, f"kubectl-rlj {command}" in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize("command", ["describe", "logs", "open"])
def test_a_path_that_is_no_run_folder_is_not_looked_up_on_a_cluster(cluster: dict[str, Any], command: str) -> None:
    code, text = rljob(command, "runs/missing")
    assert code == 2
    assert "runs/missing" in text
    assert "kubectl" not in text
