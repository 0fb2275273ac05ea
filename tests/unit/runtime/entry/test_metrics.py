"""The endpoint around an attempt: on, off, and where the port is taken."""

import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import yaml

from rljob_api.validation import check
from rljob_runtime.entry import metrics
from rljob_runtime.entry.attempt import Attempt
from rljob_runtime.loop.checkpointing import Chosen
from rljob_runtime.report import Displays, PlainDisplay, RunFolder
from tests.integration.jobs import job
from tests.support.ports import free_port
from tests.support.report_fakes import FakeClock, make_record


def attempt(tmp_path: Path) -> Attempt:
    checked = check(yaml.safe_dump(job(Path("m"), steps=3, activeDeadlineSeconds=60)))
    store: Any = SimpleNamespace(kept=False)
    folder = RunFolder(tmp_path)
    return Attempt(checked=checked, folder=folder, store=store, model_folder=None, chosen=Chosen(), job_folder=None, notes=("first",))


def test_steps_that_are_shown_are_served_until_the_end(tmp_path: Path, capsys: Any) -> None:
    own, port = attempt(tmp_path), free_port()
    facts = metrics.facts_of(own.checked, namespace="team", attempt=4)
    assert (facts.target_steps, facts.active_deadline_s, facts.staleness_bound) == (3, 60, 0)
    plain = PlainDisplay(sys.stdout, clock=FakeClock())
    with metrics.served(own, plain, facts, metrics.LOOPBACK, port) as (noted, display):
        assert noted is own
        assert isinstance(display, Displays)
        display.step(make_record(2))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    assert f'rljob_train_step{{attempt="4",job="{facts.job}",namespace="team"}} 2.0' in text


def test_a_port_in_use_is_a_note_of_the_run_and_no_port_is_nothing(tmp_path: Path) -> None:
    own, port, plain = attempt(tmp_path), free_port(), cast(Any, object())
    facts = metrics.facts_of(own.checked, namespace="", attempt=1)
    with metrics.served(own, plain, facts, metrics.LOOPBACK, None) as off:
        assert off == (own, plain)
    with metrics.served(own, cast(Any, SimpleNamespace()), facts, metrics.LOOPBACK, port):
        with metrics.served(own, plain, facts, metrics.LOOPBACK, port) as (noted, display):
            assert display is plain
    assert noted.notes[0] == "first"
    assert f"metrics are not served: port {port} of 127.0.0.1: Address already in use" in noted.notes[1]
