"""The loop over scripted workers: which versions are validated, and with which step they are reported."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rljob_runtime.errors import Interrupted
from rljob_runtime.loop import validating
from rljob_runtime.loop.validating import Validating
from rljob_runtime.records import GenerationRequest
from tests.support.fake_workers import ServingEngine
from tests.unit.runtime.loop.driver_runs import BATCH, STEPS, VALIDATION, Run


@pytest.mark.parametrize(("judges", "leased", "lag"), [("engines", (0,), 0), ("engines", (0,), 1), ("others", (0,), 0), ("others", (), 1)])
def test_a_validation_is_scored_wherever_judges_are(tmp_path: Path, judges: str, leased: tuple[int, ...], lag: float) -> None:
    validation = replace(VALIDATION, every_steps=1)
    others = [ServingEngine("engine-1", seed=3)] if leased and lag else []
    run = Run(tmp_path, leased_engines=leased, judges=judges, lag=lag, validation=validation, others=others)
    run.drive()
    assert [m["validation/prompts"] for m in run.metrics()] == [3.0] * STEPS
    assert all(0 <= m["staleness/max"] <= lag for m in run.metrics())


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("pauses", [False, True])
def test_each_due_version_is_validated_whole_and_reported_with_the_step_that_follows_it(tmp_path: Path, pauses: bool, lag: float) -> None:
    run = Run(tmp_path, lag=lag, validation=replace(VALIDATION, pauses=pauses))
    run.drive()
    reported = {m["step"]: m["validation/version"] for m in run.metrics() if "validation/version" in m}
    assert reported == {1: 0, 3: 2, 4: 4}  # the last version is reported with the step that made it
    asked = [r.request_id for r in run.engine.seen if r.sampling.temperature == 0]
    assert sorted(asked) == sorted(f"v{version}/{prompt}/0" for version in (0, 2, 4) for prompt in range(3))
    assert all(m["validation/prompts"] == 3 for m in run.metrics() if "validation/version" in m)
    trained = [r for r in run.engine.seen if r.sampling.temperature > 0]
    assert len({(r.seed) for r in trained}) == STEPS * BATCH * 2


def test_validation_changes_nothing_of_the_training(tmp_path: Path) -> None:
    plain, validated = Run(tmp_path / "plain"), Run(tmp_path / "validated", validation=VALIDATION)
    plain.drive()
    validated.drive()
    assert [r.seed for r in validated.engine.seen if r.sampling.temperature > 0] == [r.seed for r in plain.engine.seen]


def test_the_version_before_the_last_is_reported_even_where_both_are_due(tmp_path: Path) -> None:
    run = Run(tmp_path, validation=replace(VALIDATION, every_steps=1))
    run.drive()
    assert [m["validation/version"] for m in run.metrics()] == [0, 1, 2, 4]
    events = (tmp_path / "run" / "logs" / "events.jsonl").read_text()
    assert "validation before the last step" in events
    assert "validation/version 3" in events


def test_a_run_that_is_to_stop_gives_its_validation_up_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drained pod has two minutes, and a validation may take an hour."""
    run = Run(tmp_path, lag=1, validation=VALIDATION)
    submit, end, held = run.engine.submit, Validating.end, list[GenerationRequest]()

    def hold_back(requests: Sequence[GenerationRequest]) -> None:
        held.extend(r for r in requests if r.request_id.startswith("v2/"))
        submit([r for r in requests if r not in held])

    async def ended(self: Validating) -> dict[str, float] | None:
        if held:  # the loop waits for what never comes
            run.stop.set()
        return await end(self)

    run.engine.submit = hold_back  # type: ignore[method-assign]
    monkeypatch.setattr(Validating, "end", ended)
    monkeypatch.setattr(validating, "LOOK_S", 0.01)
    with pytest.raises(Interrupted):
        run.drive()
    assert "the validation under way is given up: the run is to stop" in (tmp_path / "run" / "logs" / "events.jsonl").read_text()
    state = run.store.choose({"seed": "f"}).state
    assert state is not None
    assert state.step == run.metrics()[-1]["step"] == 3


def test_a_validation_that_no_engine_can_end_is_given_up(tmp_path: Path) -> None:
    run = Run(tmp_path, lag=1, validation=replace(VALIDATION, every_steps=1), restarts=1)
    submit = run.engine.submit

    def hold_back(requests: Sequence[GenerationRequest]) -> None:
        submit([r for r in requests if r.sampling.temperature > 0 or run.restarted])

    def fail(step: int) -> None:
        run.engine.failed = step == 1

    run.engine.submit = hold_back  # type: ignore[method-assign]
    run.trainer.on_step = fail
    run.drive()
    assert [m["step"] for m in run.metrics()] == [1, 2, 3, 4]
    assert "validation under way is given up" in (tmp_path / "run" / "logs" / "events.jsonl").read_text()
