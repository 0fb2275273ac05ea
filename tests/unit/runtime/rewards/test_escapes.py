"""What rewards, tools and code that a model wrote must not reach: Ray, the cloud's metadata, runs of others, the whole disk."""

import contextlib
import errno
import selectors
import socket
import threading
import time

import pytest

from rljob_runtime.environments.tool_pool import ToolPool
from rljob_runtime.environments.tool_work import CallFunction, RunProgram, Setup
from rljob_runtime.records import Prompt, RewardRequest
from rljob_runtime.report import FolderMode, RunFolder
from rljob_runtime.rewards import RewardConfig, RewardType
from rljob_runtime.rewards.pool import RewardPool
from tests.support.kernel import needs_landlock
from tests.support.pace import HANG_S

METADATA = (("169.254.169.254", 80), ("fd00:ec2::254", 80))
"""Where clouds say which identity a machine has; one that has none of it does not answer either, so that only the error tells."""
DASHBOARD, GCS = 8265, 6379
DISK_BYTES = 32 << 20

MODULE = f'''
import errno, os, socket, tempfile, threading

def reach(address):
    """The number of the error; 0 where a connection came about."""
    try:
        socket.create_connection(address, timeout=2).close()
    except OSError as error:
        return error.errno or -1
    return 0

def read(path):
    try:
        with open(path, "rb") as file:
            return len(file.read())
    except OSError:
        return 0

def put(path):
    try:
        with open(path, "x"):
            return 1
    except OSError:
        return 0

def many_files():
    for number in range(40):
        with open(str(number), "wb") as file:
            file.write(bytes(1 << 20))

def empty_files():
    for number in range({DISK_BYTES >> 12} + 10):
        os.mknod(str(number))

def nameless_file():
    file = tempfile.TemporaryFile()
    for _ in range(40):
        file.write(bytes(1 << 20))
    file.flush()
    return file

def fill(how):
    kept = globals()[how]()
    threading.Event().wait()

def score(prompt, response, answer, metadata):
    return {{"score": 0.0, "value": float(globals()[response](*metadata["what"]))}}

def tool(what, how):
    return globals()[what](*how)
'''


@pytest.fixture(scope="module")
def listening():
    """Addresses of this machine that take connections: where Ray's dashboard and GCS are, or others if those are in use here."""
    own, servers = "127.0.0.2", []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):  # a machine without a network
        probe.connect(("192.0.2.1", 9))  # sends nothing; it shows which address this machine has towards others
        own = probe.getsockname()[0]
    for address in (("127.0.0.1", DASHBOARD), ("127.0.0.1", GCS), ("127.0.0.1", 0), (own, 0)):
        try:
            servers.append(socket.create_server(address, backlog=64))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # then something listens there
                raise
    yield ("127.0.0.1", DASHBOARD), ("127.0.0.1", GCS), *(server.getsockname() for server in servers)
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    """A claim with runs of two namespaces, as jobs of a cluster share it."""
    root = tmp_path_factory.mktemp("storage")
    for run in ("team-a/mine", "team-b/theirs"):
        for folder in ("logs", "checkpoints/step-000010"):
            (root / run / folder).mkdir(parents=True)
        (root / run / "checkpoints/step-000010/model.pt").write_text("weights")
        (root / run / "metrics.jsonl").write_text("{}")
    return root


@pytest.fixture(scope="module")
def job_folder(tmp_path_factory):
    """As of a local job: its file and modules, and below them the runs."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "escapes.py").write_text(MODULE)
    (folder / "data").mkdir()
    (folder / "data" / "words.txt").write_text("words")
    for name in ("runs/earlier", "runs/team-b/theirs", "elsewhere"):
        RunFolder.open(folder / name, FolderMode.NEW).metrics_jsonl.write_text("{}")
    return folder


def reward_pool(job_folder, storage, **options):
    config = RewardConfig(name="try", type=RewardType.FUNCTION, function="escapes:score", timeout_s=HANG_S, **options)
    return RewardPool([config], log_file=storage / "team-a/mine/logs/rewards.log", folder=job_folder)


@pytest.fixture(scope="module")
def reward(job_folder, storage):
    with reward_pool(job_folder, storage, disk_bytes=DISK_BYTES) as pool:
        yield pool


def scored(pool, function, *what):
    prompt = Prompt(index=0, text="", token_ids=(1,), answer="", source="s", metadata={"what": list(what)})
    (result,) = pool.score([RewardRequest(sample_id="s", prompt=prompt, response_text=function, finish_reason="stop")])
    return result


def value(pool, function, *what):
    result = scored(pool, function, *what)
    assert result.error is None, result.error
    return result.parts["try/value"]


def worked(setup, work, log_file):
    """What processes of a conversation's tools answer."""
    answers, done = [], threading.Event()
    with selectors.DefaultSelector() as selector:
        pool = ToolPool(
            setup,
            name="try",
            log_file=log_file,
            max_processes=1,
            startup_timeout_s=HANG_S,
            selector=selector,
            deliver=lambda _, answer: (answers.append(answer), done.set()),
        )
        try:
            pool.submit("ticket", work, HANG_S)
            while not done.is_set():
                for key, _ in selector.select(max(0.0, (pool.next_deadline() or 0.0) - time.monotonic())):
                    pool.read(key.data[1])
                pool.check_deadlines(time.monotonic())
        finally:
            pool.close()
    return answers[0]


def called(setup, log_file, what, *how):
    return worked(setup, CallFunction(name="tool", arguments={"what": what, "how": how}), log_file)


def test_a_reward_reaches_neither_ray_nor_metadata(reward, listening, job_folder, storage):
    for address in listening:
        socket.create_connection(address, timeout=HANG_S).close()
    assert {address: value(reward, "reach", address) for address in (*listening, *METADATA)} == dict.fromkeys(
        (*listening, *METADATA), errno.EPERM
    )


def test_a_tool_reaches_neither_ray_nor_metadata(listening, job_folder, tmp_path):
    setup = Setup(folder=str(job_folder), functions={"tool": ("escapes:tool", ("what", "how"))})
    addresses = (*listening, *METADATA)
    assert called(setup, tmp_path / "log", "reach", addresses[0]).value == {"text": str(errno.EPERM), "failed": False}
    code = f"import socket\nfor a in {addresses!r}:\n try: socket.create_connection(a, 2)\n except OSError as e: print(e.errno)"
    answer = worked(Setup(folder=None, runs_code=True), RunProgram(code=code, timeout_s=HANG_S, memory_bytes=1 << 30), tmp_path / "log")
    assert answer.value == {"text": "\n".join([str(errno.EPERM)] * len(addresses)), "failed": False}


@needs_landlock
def test_runs_on_shared_storage_are_out_of_reach(reward, storage):
    for run in ("team-a/mine", "team-b/theirs"):
        for file in ("metrics.jsonl", "checkpoints/step-000010/model.pt"):
            assert value(reward, "read", str(storage / run / file)) == 0, file
        assert value(reward, "put", str(storage / run / "checkpoints/owner")) == 0
        assert not (storage / run / "checkpoints/owner").exists()


@needs_landlock
def test_runs_below_the_job_folder_are_out_of_reach_and_the_rest_is_not(reward, job_folder, tmp_path):
    runs = ("runs/earlier", "runs/team-b/theirs", "elsewhere")
    assert [value(reward, "read", str(job_folder / run / "metrics.jsonl")) for run in runs] == [0, 0, 0]
    assert value(reward, "read", str(job_folder / "data/words.txt")) == len("words")
    later = RunFolder.open(job_folder / "later", FolderMode.NEW)
    later.metrics_jsonl.write_text("{}")
    assert value(reward, "read", str(later.metrics_jsonl)) == 0
    setup = Setup(folder=str(job_folder), functions={"tool": ("escapes:tool", ("what", "how"))})
    assert called(setup, tmp_path / "log", "read", str(job_folder / runs[0] / "metrics.jsonl")).value["text"] == "0"


@pytest.mark.parametrize("how", ["many_files", "empty_files", "nameless_file"])
def test_a_reward_that_fills_the_disk_is_killed(reward, how):
    result = scored(reward, "fill", how)
    assert f"more than the {DISK_BYTES} of diskBytes" in str(result.error)
    assert value(reward, "put", "small") == 1


def test_model_written_code_that_fills_the_disk_is_killed(tmp_path):
    code = "import threading\nfor n in range(5): open(str(n), 'wb').write(bytes(15 << 20))\nthreading.Event().wait()"
    answer = worked(Setup(folder=None, runs_code=True), RunProgram(code=code, timeout_s=HANG_S, memory_bytes=1 << 30), tmp_path / "log")
    assert answer.value == {"text": f"Error: wrote more than {64 << 20} bytes", "failed": True}
