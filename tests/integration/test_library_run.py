"""``rljob.run`` and worker groups with real Ray, vLLM and reward processes, in one process as a notebook does it: cell after cell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.jobs import COMMAND_TIMEOUT_S, FORKING, job
from tests.unit.library.test_python_api_page import program

pytestmark = pytest.mark.slow

NOTEBOOK = """
import asyncio, gc, json, signal, sys

import rljob

GOAL = 8
reported = []


def digits(prompt, response, answer, metadata):
    return sum(c.isdigit() for c in response) / GOAL


class Notes(rljob.Callback):
    def on_step(self, step, control):
        reported.append(["step", step.step])
        if step.step == 3:
            control.stop("three are enough")

    def on_checkpoint(self, checkpoint, control):
        assert (checkpoint.folder / "COMPLETE").exists(), list(checkpoint.folder.iterdir())
        reported.append(["checkpoint", checkpoint.step])


class Broken(rljob.Callback):
    def on_step(self, step, control):
        raise ValueError("mine")


manifest = json.loads(sys.argv[1])
before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), gc.get_threshold(), sys.getswitchinterval()


async def cell():  # a notebook's loop runs in its main thread
    first = rljob.run(manifest, rewards=digits, callbacks=[Notes()], run_dir="run", progress=False)
    assert (first.outcome, first.stop_reason) == ("stopped", "three are enough"), first
    assert first.steps == (1, 2, 3) == tuple(n for what, n in reported if what == "step"), reported
    assert ["checkpoint", 2] in reported and ["checkpoint", 3] in reported, reported
    assert (first.model / "model.safetensors").stat().st_size > 0
    assert all(0 <= value <= 1 for value in first.metrics["reward/mean"])
    second = rljob.run(manifest, rewards=digits, run_dir="run", resume=True, progress=False)
    assert (second.outcome, second.steps) == ("succeeded", (1, 2, 3, 4, 5)), second
    try:
        rljob.run(manifest, rewards=digits, callbacks=[Broken()], run_dir="run", overwrite=True, progress=False)
    except rljob.CallbackError as error:
        assert "Broken.on_step raised at step 1: ValueError: mine" in str(error)
    else:
        raise AssertionError("the callback's error was lost")


asyncio.run(cell())
assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), gc.get_threshold(), sys.getswitchinterval())
print("all held")
"""


def script(source: str, folder: Path, *arguments: str) -> str:
    (folder / "program.py").write_text(source)
    command = [sys.executable, "program.py", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_runs_follow_each_other_in_a_notebook(model: Path, tmp_path: Path) -> None:
    manifest = job(model, steps=5)
    del manifest["spec"]["rewards"]
    assert script(FORKING + NOTEBOOK, tmp_path, json.dumps(manifest)).endswith("all held\n")


def test_the_collocated_program_of_the_page_in_processes_of_ray(tmp_path: Path) -> None:
    source, expected = program("collocated")
    assert script(source, tmp_path) == expected
