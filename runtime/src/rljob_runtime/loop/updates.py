"""What one step changes: the critic's update and the policy's, each on the workers of its role."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rljob_runtime.cluster.protocol import Pending, gather_all
from rljob_runtime.loop.batch_builder import Prepared
from rljob_runtime.loop.workers import Component, JobWorkers


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """Trains on prepared batches; the policy's update is awaited under the lease of its devices, which is the caller's."""

    workers: JobWorkers
    step_timeout_s: float
    """Bound of one update."""
    critic_warmup_steps: int
    """First steps that train the critic alone."""

    async def begin_critic(self, prepared: Prepared, version: int) -> asyncio.Future[list[Any]] | None:
        """Begin the critic's update; ended already where it computes on devices that the trainer uses, too."""
        critic = self.workers.critic
        if critic is None or not prepared.critic[0]:
            return None
        async with critic.leased(version + 1):
            update = asyncio.ensure_future(gather_all(_begin(critic, prepared.critic, version), self.step_timeout_s))
            if critic.group.shares_devices:
                await update
        return update

    async def train(self, prepared: Prepared, critic: asyncio.Future[list[Any]] | None, version: int) -> dict[str, float]:
        """Train the policy beside the critic; metrics of both. Nothing is trained where everything was left out."""
        metrics: dict[str, float] = {}
        done = version - self.critic_warmup_steps  # the policy's own steps: its learning rate warms up from its first update on
        if prepared.policy[0] and done >= 0:
            metrics |= (await gather_all(_begin(self.workers.trainer, prepared.policy, done), self.step_timeout_s))[0]
        if critic is not None:
            metrics |= (await critic)[0]
        return metrics


def _begin(component: Component, shares: Sequence[Any], step: int) -> list[Pending]:
    """Begin the update of every rank; ranks that compute together are given the same share."""
    return [worker.start("train_step", shares[rank // component.ranks_per_share], step) for rank, worker in enumerate(component.workers)]
