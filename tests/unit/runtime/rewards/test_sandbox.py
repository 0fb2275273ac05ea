"""Escapes that scoring processes, and the runs of model-written code below them, must not manage."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from rljob_runtime.records import Prompt, RewardRequest
from rljob_runtime.rewards import RewardConfig, RewardType
from rljob_runtime.rewards.pool import RewardPool
from rljob_runtime.sandbox import Active, landlock, seccomp
from tests.support.kernel import needs_landlock
from tests.support.pace import HANG_S

MODULE = '''
import ctypes, os, resource, signal, socket, subprocess, sys, threading

def score(prompt, response, answer, metadata):
    """1 where what the response names was possible; what stopped it is printed."""
    try:
        return {"score": 1.0, "value": float(ESCAPES[response](answer) or 0)}
    except (OSError, MemoryError, ValueError) as error:
        print(f"stopped: {type(error).__name__}", flush=True)
        return 0.0

def connect(port):
    socket.create_connection(("127.0.0.1", int(port)), timeout=2).close()

def datagram(port):
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", int(port)))

def unix(path):
    socket.socket(socket.AF_UNIX).connect(path)

def raw_socket(_):
    if ctypes.CDLL(None, use_errno=True).socket(socket.AF_INET, socket.SOCK_STREAM, 0) < 0:
        raise OSError("denied")

def read(path):
    with open(path, "rb") as file:
        return len(file.read())

def write(path):
    with open(path, "w") as file:
        file.write("x")

def secrets(_):
    return sum("SECRET" in name or "TOKEN" in name for name in os.environ)

def own_environ(_):
    return read("/proc/self/environ") and float(b"s3cret" in open("/proc/self/environ", "rb").read())

def fork(_):
    if os.fork() == 0:
        os._exit(0)

def program(_):
    subprocess.run(["/bin/true"], check=True)

def become(_):
    os.execv("/bin/true", ["true"])

def leave(_):
    os.setsid()

def kill(pid):
    os.kill(int(pid), 0)

def limits_of(pid):
    resource.prlimit(int(pid), resource.RLIMIT_CORE)

def memory(size):
    return len(bytearray(int(size)))

def big_file(size):
    with open("big", "wb") as file:
        file.seek(int(size))
        file.write(b"x")

def threads(_):
    thread = threading.Thread(target=print, args=("a thread",))
    thread.start()
    thread.join()

def pair(_):
    socket.socketpair()

def raise_limit(_):
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

def files(_):
    return len([os.open("/dev/null", os.O_RDONLY) for _ in range(2000)])

def folder(_):
    write("mine")
    return len(os.listdir("."))

ESCAPES = {name: value for name, value in globals().items() if callable(value) and name != "score"}
'''


@pytest.fixture(scope="module")
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    (folder / "escapes.py").write_text(MODULE)
    pools = {}

    def pool(**options):
        key = tuple(sorted(options.items()))
        if key not in pools:
            config = RewardConfig(name="try", type=RewardType.FUNCTION, function="escapes:score", timeout_s=20.0, **options)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("HF_TOKEN", "s3cret")
                patch.setenv("RAY_AUTH_TOKEN", "s3cret")
                patch.setenv("MY_SECRET", "s3cret")
                pools[key] = RewardPool([config], log_file=folder / "rewards.log", folder=folder)
        return pools[key]

    yield pool
    for each in pools.values():
        each.close()


def attempt(pool, name, answer=""):
    prompt = Prompt(index=0, text="", token_ids=(1,), answer=str(answer), source="s")
    (result,) = pool.score([RewardRequest(sample_id="s", prompt=prompt, response_text=name, finish_reason="stop")])
    assert result.error is None, result.error
    return result


def test_the_network_is_out_of_reach(make, listener, tmp_path):
    pool = make()
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        attempts = {"connect": listener, "datagram": listener, "unix": path, "raw_socket": ""}
        assert {name: attempt(pool, name, value).score for name, value in attempts.items()} == dict.fromkeys(attempts, 0.0)


def test_the_network_can_be_asked_for(make, listener):
    assert attempt(make(network=True), "connect", listener).score == 1.0


def test_no_secret_is_inherited(make):
    assert attempt(make(), "secrets").parts["try/value"] == 0
    assert attempt(make(), "own_environ").parts["try/value"] == 0


@needs_landlock
def test_files_outside_are_not_there(make, tmp_path):
    token = tmp_path / "token"
    token.write_text("s3cret")
    parent = os.getpid()
    for path in (token, f"/proc/{parent}/environ", f"/proc/{parent}/mem", "/etc/hostname", "/proc/1/environ"):
        assert attempt(make(), "read", path).score == 0.0, path
    for path in (tmp_path / "new", Path(sys.prefix) / "new"):
        assert attempt(make(), "write", path).score == 0.0, path
        assert not path.exists()


@needs_landlock
def test_read_paths_are_there_to_read_only(make, tmp_path_factory):
    data = tmp_path_factory.mktemp("data")
    (data / "tests.json").write_text("[1]")
    pool = make(read_paths=(str(data),))
    assert attempt(pool, "read", data / "tests.json").parts["try/value"] == 3
    assert attempt(pool, "write", data / "tests.json").score == 0.0


def test_other_processes_cannot_be_started_or_touched(make):
    attempts = {"fork": "", "program": "", "become": "", "leave": "", "kill": os.getpid(), "limits_of": os.getpid()}
    assert {name: attempt(make(), name, value).score for name, value in attempts.items()} == dict.fromkeys(attempts, 0.0)


def test_processes_can_be_asked_for_but_not_leave_the_group(make):
    pool = make(processes=True)
    assert attempt(pool, "program").score == 1.0
    assert attempt(pool, "leave").score == 0.0


def test_limits_hold_and_cannot_be_raised(make):
    pool = make(memory_bytes=2 << 30)
    attempts = {"memory": 3 << 30, "big_file": 2 << 30, "raise_limit": "", "files": ""}
    assert {name: attempt(pool, name, value).score for name, value in attempts.items()} == dict.fromkeys(attempts, 0.0)


def test_what_functions_need_is_left(make):
    assert {name: attempt(make(), name).score for name in ("threads", "pair", "folder")} == {"threads": 1.0, "pair": 1.0, "folder": 1.0}


def test_the_folder_goes_with_the_process(tmp_path):
    (tmp_path / "escapes.py").write_text(MODULE + "\ndef where(_):\n    print(os.getcwd(), flush=True)\nESCAPES['where'] = where\n")
    config = RewardConfig(name="try", type=RewardType.FUNCTION, function="escapes:score")
    with RewardPool([config], log_file=tmp_path / "rewards.log", folder=tmp_path) as pool:
        attempt(pool, "where")
        folder = Path((tmp_path / "rewards.log").read_text().strip())
        assert folder.is_dir()
    assert not folder.exists()


def test_a_process_says_what_keeps_it_in(make, monkeypatch):
    assert make().describe_sandbox() == f"scoring processes are sandboxed by {Active(landlock_abi=landlock.abi())}"
    assert "NO Landlock" in str(Active(landlock_abi=0))


def test_without_a_filter_for_the_machine_nothing_is_installed(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(OSError, match="no seccomp filter is written for riscv64"):
        seccomp.deny(network=True, processes=True)


@pytest.fixture(scope="module")
def code_pool(tmp_path_factory):
    config = RewardConfig(name="code", type=RewardType.CODE, timeout_s=30.0, params={"case_timeout_s": 3.0, "memory_bytes": 512 << 20})
    with RewardPool([config], log_file=tmp_path_factory.mktemp("code") / "rewards.log") as pool:
        yield pool


def solve(pool, code, *, expected="yes", stdin=""):
    """Score of code that prints yes where it got what it tried."""
    metadata = {"test_cases": [{"stdin": stdin, "expected_stdout": expected}]}
    prompt = Prompt(index=0, text="", token_ids=(1,), answer="", source="s", metadata=metadata)
    (result,) = pool.score([RewardRequest(sample_id="s", prompt=prompt, response_text=f"```python\n{code}\n```", finish_reason="stop")])
    assert result.error is None, result.error
    return result.score


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.socket(); print('yes')",
        "import socket; socket.create_connection(('127.0.0.1', PORT)); print('yes')",
        "import os; os.fork(); print('yes')",
        "import os; os.setsid(); print('yes')",
        "import subprocess; subprocess.run(['/bin/true']); print('yes')",
        "x = bytearray(600 << 20); print('yes')",
        "f = open('f', 'wb'); f.seek(20 << 20); f.write(b'x'); f.flush(); print('yes')",
        "fs = [open('/dev/null') for _ in range(100)]; print('yes')",
        "import os; os.kill(os.getppid(), 0); print('yes')",
        "import threading\nwait = threading.Event().wait\nfor _ in range(500): threading.Thread(target=wait).start()\nprint('yes')",
        "while True: pass",
        "import threading; threading.Event().wait()",
        "while True: print('yes' * 1000)",
        "import os; print('yes'); os._exit(0)",
        "import os, signal; print('yes'); os.abort()",
    ],
)
def test_model_written_code_cannot(code_pool, listener, code):
    assert solve(code_pool, code.replace("PORT", str(listener))) == 0.0
    assert solve(code_pool, "print('yes')") == 1.0


@needs_landlock
def test_model_written_code_sees_no_file(code_pool, tmp_path):
    (tmp_path / "token").write_text("s3cret")
    assert solve(code_pool, f"open({str(tmp_path / 'token')!r}); print('yes')") == 0.0
    assert solve(code_pool, f"open('/proc/{os.getpid()}/environ'); print('yes')") == 0.0
    assert solve(code_pool, "import os; open(f'/proc/{os.getppid()}/mem', 'rb'); print('yes')") == 0.0
    assert solve(code_pool, "open('../x', 'w'); print('yes')") == 0.0
    assert solve(code_pool, "open('x', 'w'); print('yes')") == 1.0


def test_model_written_code_finds_no_expected_output(code_pool):
    search = """
import gc, sys
def texts(values):
    return [v for v in values if isinstance(v, str) and v[::-1].endswith("-detcepxe")]
found, frame = [], sys._getframe()
for o in gc.get_objects():
    found += texts(list(o.values())) if isinstance(o, dict) else texts(o) if isinstance(o, (list, tuple)) else []
while frame:
    found, frame = found + texts(frame.f_locals.values()), frame.f_back
print(found[0] if found else "nothing")
"""
    assert solve(code_pool, search, expected="expected-5309") == 0.0
    assert solve(code_pool, search, expected="nothing") == 1.0


def test_no_environment_and_no_memory_of_other_runs(code_pool):
    assert solve(code_pool, "import os; print(len(os.environ))", expected="0") == 1.0
    assert solve(code_pool, "import builtins; builtins.left = 1; print('yes')") == 1.0
    assert solve(code_pool, "print(left)", expected="1") == 0.0


def test_runs_end_with_the_parent(tmp_path):
    (tmp_path / "parent.py").write_text(
        "import sys, threading\nfrom pathlib import Path\n"
        "from rljob_runtime.records import Prompt, RewardRequest\nfrom rljob_runtime.rewards import RewardConfig, RewardType\n"
        "from rljob_runtime.rewards.pool import RewardPool\n"
        "config = RewardConfig(name='c', type=RewardType.CODE, timeout_s=60.0, params={'case_timeout_s': 50.0})\n"
        "pool = RewardPool([config], log_file=Path(sys.argv[1]) / 'log')\n"
        "prompt = Prompt(index=0, text='', token_ids=(1,), answer='', source='s', metadata="
        "{'test_cases': [{'stdin': '', 'expected_stdout': ''}]})\n"
        "print('ready', flush=True)\n"
        "pool.score([RewardRequest(sample_id='s', prompt=prompt, response_text='while True: pass', finish_reason='stop')])\n"
    )
    with subprocess.Popen([sys.executable, tmp_path / "parent.py", tmp_path], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        own = psutil.Process(parent.pid)
        below = waiting_for(lambda: own.children(recursive=True), 3)
        parent.send_signal(signal.SIGKILL)
        parent.wait(HANG_S)
        gone, alive = psutil.wait_procs(below, timeout=HANG_S)
        assert len(gone) == 3
        assert alive == []


def waiting_for(found, count, timeout_s=HANG_S):
    """Processes below another one, once there are so many."""
    pause = threading.Event()
    for _ in range(int(timeout_s / 0.05)):
        if len(processes := found()) >= count:
            return processes
        pause.wait(0.05)
    raise AssertionError(json.dumps([p.cmdline() for p in found()]))
