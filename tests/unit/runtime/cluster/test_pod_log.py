"""Copies of logs to the pod's output: complete lines with a prefix, never at the writer's cost."""

import io
import os
from pathlib import Path

from rljob_runtime.cluster.pod_log import Follower, PodOutput, Tee


def test_a_followed_log_arrives_line_by_line_with_its_prefix(tmp_path: Path) -> None:
    log, pod = tmp_path / "w.log", tmp_path / "pod"
    log.write_text("of an earlier attempt\n")
    pod.touch()
    follower = Follower(log, PodOutput(pod, "[w-0] "), every_s=0.01)
    with log.open("a") as file:
        file.write("one\ntwo")
    follower.close()
    assert pod.read_text() == "[w-0] one\n[w-0] two\n"


def test_a_pipe_that_nobody_reads_blocks_nothing_and_one_that_is_gone_neither(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    output = PodOutput(fifo, "")
    assert output.is_open
    for _ in range(100):
        output.write(b"x" * 4000 + b"\n")
    assert len(os.read(reader, 1 << 20)) >= 4096
    os.close(reader)
    output.write(b"nobody is there\n")
    assert not output.is_open
    output.write(b"still nobody\n")
    output.close()


def test_an_output_that_cannot_be_opened_takes_everything_and_shows_nothing(tmp_path: Path) -> None:
    output = PodOutput(tmp_path / "none" / "fd", "")
    output.write(b"lost\n")
    output.close()
    assert not output.is_open


def test_a_copy_that_fails_is_given_up_with_one_line(tmp_path: Path) -> None:
    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

    main, good = io.StringIO(), io.BytesIO()
    tee = Tee(main, [Full(), good])
    tee.write("one\n")
    tee.write("two\n")
    assert main.getvalue() == "one\na copy of this log ends here: [Errno 28] No space left on device\ntwo\n"
    assert good.getvalue() == b"one\ntwo\n"
    assert not tee.isatty()
