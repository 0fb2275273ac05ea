"""A job's workers over fakes, for tests of the loop: components as launch makes them, with leases that are written down."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rljob_api.v1alpha1.components import Role
from rljob_runtime.job.roles import ROLES
from rljob_runtime.loop.workers import Component, JobWorkers
from rljob_runtime.offload.worker_group import WorkerGroup


class LoggedGroup(WorkerGroup):
    """Shares devices as reported, and writes down when its leases begin and end."""

    def __init__(self, name: str, workers: Sequence[Any], log: list[str], leased: Sequence[int]) -> None:
        super().__init__(name, workers, timeout_s=10.0)
        self._log = log
        self._leased = tuple(leased)

    @property
    def shares_devices(self) -> bool:
        return bool(self._leased)

    @property
    def leased_ranks(self) -> tuple[int, ...]:
        return self._leased

    @asynccontextmanager
    async def resident(self, kinds: Any = None, *, what: str | None = None, **options: Any) -> AsyncIterator[None]:
        self._log.append(f"{self.name}: {what} begins")
        try:
            yield
        finally:
            self._log.append(f"{self.name}: {what} ends")


def make_job_workers(
    *,
    log: list[str] | None = None,
    leased_engines: Sequence[int] = (),
    judges_displace_engines: bool = False,
    ranks_per_share: Mapping[Role, int] | None = None,
    trainer_scores: Sequence[str] = (),
    names: Mapping[Role, str] | None = None,
    more: Sequence[Component] = (),
    **by_role: Sequence[Any],
) -> JobWorkers:
    """Workers by role, such as ``trainer=[...], rollout=[...]``; roles without workers have no component.

    Args:
        log: takes the beginning and end of every lease.
        leased_engines: ranks of rollout workers that share devices; judges always do.
        judges_displace_engines: with engines.
        ranks_per_share: of those not listed it is 1.
        trainer_scores: results of the passes that the trainer makes over a step before its update.
        names: of components; those not listed are called as their role.
        more: further components.
        by_role: workers by the role's name in lower case.

    Raises:
        TypeError: there is no such role.
    """
    roles = [role.value.lower() for role in ROLES]
    unknown = sorted(by_role.keys() - set(roles))
    if unknown:
        raise TypeError(f"make_job_workers got {', '.join(unknown)}; its roles are {', '.join(roles)}, other keywords are in its signature")
    components = []
    for role, description in ROLES.items():
        workers = by_role.get(role.value.lower(), ())
        if not workers:
            continue
        leased = {Role.ROLLOUT: leased_engines, Role.JUDGE: range(len(workers))}.get(role, ())
        name = (names or {}).get(role, role.value.lower())
        components.append(
            Component(
                role=role,
                group=LoggedGroup(name, workers, [] if log is None else log, leased),
                phase=description.phase,
                scorings=tuple(s for s in description.scorings if role is not Role.TRAINER or s.result in trainer_scores),
                ranks_per_share=(ranks_per_share or {}).get(role, 1),
                checkpoint_folder=description.checkpoint_folder,
                survivable=description.replaceable,
            )
        )
    return JobWorkers(components=(*components, *more), judges_displace_engines=judges_displace_engines)
