"""Layer: the real driver loop over scripted workers; its process, workers, disks and syncs fail at random moments."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.chaos.loop_attempt import END, ENGINE_KINDS, FAULTS, ON_CALL, REFUSED, TRAINED, Case, rows
from bench.chaos.outcome import FAILED, RECOVERED, WRONG, Outcome
from rljob_runtime.loop.checkpointing import CheckpointStore

LAYER = "driver loop, scripted workers"
KINDS = (
    *ENGINE_KINDS, *ON_CALL, "driver killed", "driver killed", "driver killed", "trainer process lost", "journal's disk fails",
    "pod of the trainer drained", "driver asked to end", "another driver takes over",
)  # fmt: skip
ENDS = {"disk full at a checkpoint": "CheckpointError"}
"""Kinds that end a job permanently, for a restart cannot repair them, and the error that says so."""
HANG_S = 40.0
"""Bound of one attempt."""
START_S = 300.0
"""Bound of the imports, on a machine that may be busy."""
MAX_FAULTS = 4
Say = Callable[[int], None]


def make_case(seed: int, kinds: Sequence[str]) -> Case:
    """A job with one to four faults."""
    rng = random.Random(seed)
    steps, engines = rng.randint(4, 9), rng.randint(1, 3)
    faults: list[tuple[str, int, int, int]] = []
    free = rng.sample(range(engines), engines)
    for _ in range(rng.randint(1, MAX_FAULTS)):
        kind = rng.choice(list(kinds))
        if kind in ENGINE_KINDS and not free:
            continue  # one that is lost twice waits seconds before it starts again
        index = free.pop() if kind in ENGINE_KINDS else 0
        faults.append((kind, rng.randint(0, steps - 1), rng.randint(0, 120), index))
    return Case(
        seed=seed, steps=steps, batch=rng.randint(1, 4), lag=rng.choice([0, 0, 0.5, 1, 2]), engines=engines, every=rng.randint(0, 4),
        faults=tuple(faults) or (("driver killed", 1, 0, 0),),
    )  # fmt: skip


class Server:
    """A process that forks attempts."""

    async def __aenter__(self) -> Server:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.chaos.loop_attempt", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdout is not None
        await asyncio.wait_for(self._process.stdout.readline(), START_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def attempt(self, root: Path, case: Case, number: int) -> int | str:
        """Exit code, or "hang"."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        given = {"root": str(root), "case": asdict(case), "attempt": number, "deadline_s": HANG_S}
        self._process.stdin.write(json.dumps(given).encode() + b"\n")
        await self._process.stdin.drain()
        return json.loads(await asyncio.wait_for(self._process.stdout.readline(), HANG_S + 30))["exit"]


async def run_case(server: Server, case: Case, root: Path) -> list[Outcome]:
    """All attempts of a job, as an operator makes them, and what became of its faults."""
    end: dict[str, Any] = {}
    problem, starts = "", list[int]()
    for number in range(len(case.faults) + 2):
        newest = CheckpointStore(root / "run" / "checkpoints", keep=2).choose({"seed": "f"}).folder
        starts.append(int(newest.name.split("-")[1]) if newest else 0)
        (root / END).unlink(missing_ok=True)
        code = await server.attempt(root, case, number)
        end = json.loads((root / END).read_text()) if (root / END).exists() else {}
        if code == 0:
            break
        if code not in (-9, 10, 11):
            problem = f"attempt {number} ended with {code}: {end}"
            break
        if end and not end["retryable"] and end["error"] != "SupersededError":
            break
    else:
        problem = f"not over after {len(starts)} attempts: {end}"
    injected = rows(root / FAULTS)
    failed = not problem and "error" in end
    if failed:
        wanted = [ENDS.get(row["kind"]) for row in injected]
        problem = "" if end["error"] in wanted else f"failed for a cause that was not there: {end}"
    problem = problem or check(case, root, starts, over=not failed) or (_updates(case, end) if not failed else "")
    trained = [row["at_s"] for row in rows(root / TRAINED)]
    found = []
    for row in injected:
        after = [at_s for at_s in trained if at_s > row["at_s"]]
        result = WRONG if problem else FAILED if failed and ENDS.get(row["kind"]) == end["error"] else RECOVERED
        detail = f"seed {case.seed}: {problem}; {case}" if problem else ""
        found.append(
            Outcome(
                layer=LAYER, kind=row["kind"], result=result, recovery_s=min(after) - row["at_s"] if after else None, detail=detail
            )
        )  # fmt: skip
    return found


def _updates(case: Case, end: dict[str, Any]) -> str:
    return "" if end["updates"] == case.steps else f"{end['updates']} updates instead of {case.steps}"


def timeline(trained: Sequence[dict[str, Any]], starts: Sequence[int]) -> dict[int, list[int]]:
    """Step -> prompts of the trainings that count: an attempt begins at a checkpoint, which ends what came after it."""
    steps: dict[int, list[int]] = {}
    for number, start in enumerate(starts):
        steps = {step: prompts for step, prompts in steps.items() if step < start}
        steps |= {row["step"]: row["prompts"] for row in trained if row["attempt"] == number}
    return steps


def check(case: Case, root: Path, starts: Sequence[int], *, over: bool) -> str:
    """ONCE, FENCE and COMPLETE by the files of all attempts; empty where all is well.

    Args:
        case: of the job.
        root: of its files.
        starts: step of the checkpoint that each attempt began with.
        over: whether every step is to be there.
    """
    trained = rows(root / TRAINED)
    steps = timeline(trained, starts)
    if sorted(steps) != list(range(len(steps))) or (over and len(steps) != case.steps):
        return f"steps {sorted(steps)} instead of {case.steps}"
    within = Counter((row["attempt"], row["step"]) for row in trained)
    if twice := [key for key, count in within.items() if count > 1]:
        return f"trained twice in one attempt: {twice}"
    counts = Counter(prompt for prompts in steps.values() for prompt in prompts)
    samples = 2
    if wrong := {prompt: count for prompt, count in counts.items() if count != samples}:
        return f"prompts trained another number of times than {samples}: {wrong}"
    if any(len(prompts) != case.batch * samples for prompts in steps.values()):
        return f"a step of another size than {case.batch} groups: {steps}"
    metrics = rows(root / "run" / "metrics.jsonl")
    if over and [row["step"] for row in metrics] != list(range(1, case.steps + 1)):
        return f"rows of steps {[row['step'] for row in metrics]}"
    return _lost(case, root, set(counts)) if over else ""


def _lost(case: Case, root: Path, trained: set[int]) -> str:
    """Prompts that the last checkpoint calls done, and that nobody trained or refused."""
    store = CheckpointStore(root / "run" / "checkpoints", keep=2)
    state = store.choose({"seed": "f"}).state
    if state is None:
        return "no checkpoint at the end"
    refused = {prompt for row in rows(root / REFUSED) for prompt in row}
    stale = sum(row["rollout/groups_dropped"] for row in rows(root / "run" / "metrics.jsonl"))
    missing = (set(range(state.first_prompt)) | set(state.done)) - trained - refused
    if len(missing) > stale:
        return f"prompts {sorted(missing)} are done, not trained, and only {stale:.0f} were counted as dropped"
    return ""


async def run(seed: int, count: int, only: str | None, say: Say, servers: int = 2) -> list[Outcome]:
    """So many faults, or a few more.

    Args:
        seed: of the first job; the others count on.
        count: faults.
        only: one kind.
        say: called with how many are done.
        servers: attempts at the same time.
    """
    kinds = [kind for kind in KINDS if only is None or kind == only]
    found: list[Outcome] = []
    seeds = iter(range(seed, seed + 100 * count + 100))

    async def work(folder: Path) -> None:
        async with Server() as server:
            while len(found) < count:
                case = make_case(next(seeds), kinds)
                root = folder / str(case.seed)
                root.mkdir()
                found.extend(await run_case(server, case, root))
                say(len(found))

    with tempfile.TemporaryDirectory(prefix="bench-chaos-", ignore_cleanup_errors=True) as folder:
        await asyncio.gather(*(work(Path(folder)) for _ in range(servers)))
    return found
