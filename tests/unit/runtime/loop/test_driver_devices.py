"""The loop over scripted workers: who leases shared devices when."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rljob_runtime.records import GenerationRequest
from tests.support.fake_workers import ScriptedRewards, ServingEngine
from tests.unit.runtime.loop.driver_runs import STEPS, Run


def test_engines_on_the_trainers_devices_release_them_while_it_works_and_the_others_go_on(tmp_path: Path) -> None:
    other = ServingEngine("engine-1", seed=3)
    run = Run(tmp_path, leased_engines=(0,), others=[other], lag=1)
    asked: dict[str, set[str]] = {"engine-0": set(), "engine-1": set()}

    def ask(engine: ServingEngine, requests: Sequence[GenerationRequest]) -> None:
        asked[engine.name].add(run.leases[-1] if run.leases else "")
        ServingEngine.submit(engine, requests)

    for engine in (run.engine, other):
        engine.submit = partial(ask, engine)  # type: ignore[method-assign]
    run.drive()

    def lease(group: str, what: str) -> list[str]:
        return [f"{group}: {what} begins", f"{group}: {what} ends"]

    def sync(step: int) -> list[str]:
        outer, inner = lease("trainer", f"weight sync after step {step}"), lease("rollout", f"weight sync after step {step}")
        return [outer[0], *inner, outer[1]]

    steps = [
        [*lease("rollout", f"generation for step {n}"), *lease("trainer", f"training of step {n}"), *sync(n)] for n in range(1, STEPS + 1)
    ]
    last = [*lease("rollout", f"generation for step {STEPS + 1}"), *lease("trainer", f"training of step {STEPS}")]
    assert run.leases == [*sync(0), *(what for step in steps for what in step), *last]
    assert {what.split(" for ")[0] for what in asked["engine-0"]} == {"rollout: generation"}
    assert len(asked["engine-1"]) >= 1
    assert all(0 <= m["staleness/max"] <= 1 for m in run.metrics())
    assert all(m["time/engine_pause_s"] >= 0 for m in run.metrics())


def inner(leases: list[str], name: str) -> list[list[str]]:
    """What happened inside each lease of a group for scoring or generation."""
    found: list[list[str]] = []
    for entry in leases:
        if entry.startswith(f"{name}: ") and entry.endswith(" begins"):
            found.append([])
        elif entry.startswith(f"{name}: ") and entry.endswith(" ends"):
            found.append(["end"])
        elif found:
            found[-1].append(entry)
    return [entries for entries in found if entries[:1] != ["end"]]


def phases(leases: list[str]) -> list[str]:
    """Leases in the order of their beginnings, without their steps, and scores."""
    begun = [entry.removesuffix(" begins") for entry in leases if not entry.endswith(" ends")]
    return [entry.split(" for ")[0].split(" of ")[0].split(" after ")[0] for entry in begun]


GENERATION, SCORES, TRAINING = "rollout: generation", "judge: scores", "trainer: training"
SYNC = ["trainer: weight sync", "rollout: weight sync"]


def test_judges_on_the_engines_devices_score_when_all_is_generated(tmp_path: Path) -> None:
    run = Run(tmp_path, leased_engines=(0,), judges="engines")
    run.drive()
    found = phases(run.leases)
    assert set(found[: found.index(GENERATION)]) == set(SYNC)
    step = [GENERATION, SCORES, *["scores"] * found[: found.index(TRAINING)].count("scores"), TRAINING, *SYNC]
    assert found == [*SYNC, *step * STEPS, GENERATION, TRAINING]
    assert all("rollout" not in entry for entries in inner(run.leases, "judge") for entry in entries[: entries.index("scores")])
    assert len(run.metrics()) == STEPS


def test_judges_on_the_engines_devices_come_again_for_what_replaces_a_dropped_group(tmp_path: Path) -> None:
    """The engines have dropped their weights for the judge, so that these are sent once more."""
    run = Run(tmp_path, leased_engines=(0,), judges="engines", scores=ScriptedRewards(lambda name: name.startswith("1/")))
    run.drive()
    found = [entry for entry in phases(run.leases) if entry != "scores"]
    again = [GENERATION, SCORES, *SYNC, GENERATION, SCORES, TRAINING]
    assert found[len(SYNC) : len(SYNC) + len(again)] == again
    assert len(run.metrics()) == STEPS
    assert sum(m["rollout/groups_dropped"] for m in run.metrics()) == 1


def test_judges_beside_the_engines_score_while_these_generate(tmp_path: Path) -> None:
    run = Run(tmp_path, leased_engines=(0,), judges="others")
    run.drive()
    found = [entry for entry in phases(run.leases) if entry != "scores"]
    assert found == [*SYNC, *[GENERATION, SCORES, TRAINING, *SYNC] * STEPS, GENERATION, SCORES, TRAINING]
    held = ""
    for entry in run.leases:
        assert entry != "scores" or held == "judge"
        held = entry.split(":")[0] if entry.endswith("begins") else "" if entry.startswith("judge") else held
