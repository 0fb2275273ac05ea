"""An Environment worker on a real Ray cluster that is stopped in the middle of an episode, in a process of its own as all of Ray in tests.

``python -m tests.integration.stuck_worker_child FOLDER TOKENIZER`` writes one line of JSON to FOLDER/found.json.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import psutil

from rljob_api.planner import plan
from rljob_runtime.cluster.embedded import EmbeddedCluster
from rljob_runtime.cluster.host import START_WORD
from rljob_runtime.cluster.protocol import WorkerSpec
from rljob_runtime.cluster.replaceable import ReplaceableWorker
from rljob_runtime.environments.config import WorkerConfig
from rljob_runtime.environments.messages import EpisodeAction, EpisodeReply, EpisodeStart
from rljob_runtime.loop.environment_replacer import EnvironmentReplacer
from rljob_runtime.loop.replacement import ReplacementLimits
from rljob_runtime.overlap import environment_router
from tests.support.environments import environment_config, plain_prompt
from tests.support.pace import HANG_S
from tests.unit.api.manifests import spec

CALL_TIMEOUT_S = 4.0
"""Of the driver's calls; longer than a busy machine holds up a healthy worker."""
NAME = "games-0"
GAME = "lake"


class Player:
    """Two turns of one episode, which begins again when it is lost."""

    def __init__(self) -> None:
        self.replies: asyncio.Queue[EpisodeReply] = asyncio.Queue()
        self.lost: asyncio.Queue[str] = asyncio.Queue()

    def on_replies(self, replies: list[EpisodeReply]) -> None:
        for reply in replies:
            self.replies.put_nowait(reply)

    def on_lost(self, episode_ids: list[str]) -> None:
        for episode_id in episode_ids:
            self.lost.put_nowait(episode_id)


def pids(log_file: str) -> list[int]:
    """Of the processes that were the worker, from the first lines that each wrote to its log."""
    return [int(line.split("pid ")[1].split()[0]) for line in Path(log_file).read_text().splitlines() if f" {START_WORD} " in line]


async def play(router: environment_router.EnvironmentRouter, player: Player, worker: ReplaceableWorker) -> dict[str, object]:
    """Stop the worker's process between two turns; what the episode's first prompt was, and what again."""
    router.start(EpisodeStart(episode_id="e", environment=GAME, seed=3), player)
    first = await player.replies.get()
    (pid,) = pids(worker.log_file)
    stopped = psutil.Process(pid)
    os.kill(pid, signal.SIGSTOP)
    router.act(EpisodeAction(episode_id="e", token_ids=np.array([1], dtype=np.int32), finish_reason="stop"))
    lost = await player.lost.get()
    router.start(EpisodeStart(episode_id="again", environment=GAME, seed=3), player)
    again = await player.replies.get()
    _, alive = psutil.wait_procs([stopped], timeout=HANG_S)
    return {
        "lost": lost,
        "same": first.token_ids.tolist() == again.token_ids.tolist(),
        "processes": len(pids(worker.log_file)),
        "alive": len(alive),
    }


async def run(folder: Path, tokenizer: str) -> dict[str, object]:
    """One worker, and what replaces it."""
    lines: list[str] = []
    cluster = EmbeddedCluster(folder, {"games": 1}, {"games": {}})
    config = WorkerConfig(
        environments=(environment_config(GAME, prompt=plain_prompt()),), tokenizer_path=tokenizer, log_dir=folder / "games"
    )
    started = WorkerSpec(
        name=NAME,
        factory="rljob_runtime.environments.worker:EnvironmentWorker",
        kwargs={"config": config},
        node_rank=0,
        concurrency=4,
    )
    try:
        planned = plan(spec([{"name": "games"}], [{"name": "games", "role": "Environment", "placement": {"workers": 1}}]))
        await cluster.start(planned, HANG_S, lambda _: None)
        (worker,) = await cluster.start_workers([started], HANG_S)
        replaceable = ReplaceableWorker(worker, started, cluster)
        replacer = EnvironmentReplacer(
            [NAME],
            start=lambda index, timeout_s: replaceable.restart(timeout_s),
            end=lambda index: replaceable.end(),
            limits=ReplacementLimits(max_restarts=3, start_timeout_s=HANG_S),
            notify=lines.append,
        )
        router = environment_router.EnvironmentRouter([replaceable], timeouts_s={GAME: HANG_S}, replace=replacer.replace)
        serving = asyncio.ensure_future(router.run())
        async with asyncio.timeout(2 * HANG_S):
            found = await play(router, Player(), replaceable)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        return found | {"lines": lines, "metrics": replacer.take_metrics()}
    finally:
        await cluster.stop()


if __name__ == "__main__":
    out = Path(sys.argv[1])
    with patch.object(environment_router, "CALL_TIMEOUT_S", CALL_TIMEOUT_S):
        (out / "found.json").write_text(json.dumps(asyncio.run(run(out, sys.argv[2]))))
