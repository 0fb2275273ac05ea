"""From an agentic job's spec and running environment workers to what its episodes are played in."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.vocabulary import PromptHistory
from rljob_runtime.environments.messages import EpisodeEnd, EpisodeReply, EpisodeStart
from rljob_runtime.environments.templates import TemplateClass
from rljob_runtime.errors import DeadlineError, EnvironmentSetupError
from rljob_runtime.job import supervision, worker_settings
from rljob_runtime.loop.saving import IO_TIMEOUT_S
from rljob_runtime.loop.workers import JobWorkers
from rljob_runtime.overlap.environment_router import EnvironmentRouter
from rljob_runtime.overlap.episodes import SEED, Environments
from rljob_runtime.overlap.tasks import TRAINING, VALIDATION, TaskOrder
from rljob_runtime.records import Prompt
from rljob_runtime.report import Level, Reporter

if TYPE_CHECKING:  # imports what environment workers need, which is more than all of the driver
    from rljob_runtime.environments.worker import EnvironmentDescription

COLLECT_WAIT_S = 1.0


async def environments(spec: RLJobSpec, workers: JobWorkers, reporter: Reporter) -> Environments | None:
    """What episodes are played in; None where the job has none. Says what keeps classes of the user's in."""
    if not spec.environments:
        return None
    described: list[EnvironmentDescription] = await workers.environments[0].call("describe", timeout_s=IO_TIMEOUT_S)
    stops = {found.name: found.stop_token_ids for found in described}
    keeps = {e.name for e in spec.environments if e.prompt.history is PromptHistory.KEEP}
    for found in described:
        if found.sandbox:
            reporter.event(f"environment {found.name}: its processes are sandboxed by {found.sandbox}")
        if found.template_class is TemplateClass.REWRITES_HISTORY and found.name in keeps:
            reporter.event(
                f"environment {found.name}: the model's chat template would rewrite earlier turns, such as their reasoning; episodes keep "
                "them as they were sampled, and so are trained",
                Level.WARNING,
            )

    replacer = supervision.environment_replacer(spec, workers, reporter)
    router = EnvironmentRouter(
        workers.environments,
        timeouts_s={e.name: e.episode_timeout_seconds for e in spec.environments},
        places={found.name: found.max_episodes for found in described if found.max_episodes is not None},
        replace=replacer.replace,
    )
    rules = {e.name: worker_settings.environment_rules(e, stops[e.name]) for e in spec.environments}
    return Environments(router=router, rules=rules, take_metrics=replacer.take_metrics)


def training_tasks(spec: RLJobSpec) -> TaskOrder:
    """The order of the training's tasks."""
    return TaskOrder({e.name: e.share for e in spec.environments}, seed=spec.seed, purpose=TRAINING)


def validation_tasks(spec: RLJobSpec) -> list[Prompt]:
    """The tasks of every validation."""
    shares = {e.name: e.validation_share for e in spec.environments}
    return TaskOrder(shares, seed=spec.seed, purpose=VALIDATION).next(spec.validation.max_prompts)


async def first_prompts(workers: JobWorkers, tasks: Sequence[Prompt]) -> list[Prompt]:
    """The tasks with what their environments show first; for probes, before the first episode is played.

    Raises:
        EnvironmentSetupError: an environment cannot begin an episode.
        DeadlineError: it took too long.
    """
    worker = workers.environments[0]
    keys = [f"first/{task.index}" for task in tasks]
    starts = [EpisodeStart(episode_id=k, environment=t.source, seed=int(str(t.metadata[SEED]))) for k, t in zip(keys, tasks, strict=True)]
    await worker.call("submit", starts, timeout_s=IO_TIMEOUT_S)
    replies: dict[str, EpisodeReply] = {}
    deadline = time.monotonic() + IO_TIMEOUT_S
    while len(replies) < len(keys):
        if time.monotonic() > deadline:
            raise DeadlineError(f"{worker.name} began {len(replies)} of {len(keys)} episodes within {IO_TIMEOUT_S:.0f} s")
        found: list[EpisodeReply] = await worker.call("collect", COLLECT_WAIT_S, timeout_s=IO_TIMEOUT_S)
        replies |= {reply.episode_id: reply for reply in found}
        # At once: others may wait for its process, of which there may be one only.
        begun = [EpisodeEnd(episode_id=reply.episode_id) for reply in found if not reply.done]
        if begun:
            await worker.call("submit", begun, timeout_s=IO_TIMEOUT_S)
    failed = next((reply for reply in replies.values() if reply.done), None)
    if failed is not None:
        why = failed.error or f"the episode ended ({failed.stop}) before its first action"
        raise EnvironmentSetupError(f"{why}; log: {worker.log_file}")
    return [_with_prompt(task, replies[key]) for task, key in zip(tasks, keys, strict=True)]


def _with_prompt(task: Prompt, reply: EpisodeReply) -> Prompt:
    return Prompt(
        index=task.index,
        text=reply.observation,
        token_ids=reply.token_ids,
        answer=task.answer,
        source=task.source,
        metadata=task.metadata,
    )
