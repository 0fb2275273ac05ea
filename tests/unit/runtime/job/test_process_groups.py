"""Process groups are formed as soon as their own workers are constructed, those on shared devices when all are."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_runtime.errors import CallDeadlineError, StartupDeadlineError
from rljob_runtime.job.process_groups import ProcessGroups

NAMES = {"actor": ["actor-0", "actor-1"], "shared": ["shared-0"]}
COMPONENTS: dict[str, Any] = {
    "actor": SimpleNamespace(shares_devices_with=()),
    "shared": SimpleNamespace(shares_devices_with=("infer",)),
}


class Rank:
    """A worker whose setup is done when the test says so."""

    def __init__(self, name: str, calls: list[Any]) -> None:
        self.name = name
        self.log_file = ""
        self._calls = calls
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def address(self, timeout_s: float) -> tuple[str, int]:
        return "host", len(self.name)

    def start(self, method: str, *args: Any) -> Rank:
        self._calls.append((self.name, method, *args))
        return self

    async def result(self, timeout_s: float) -> None:
        await self.done


async def until_idle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def groups_of() -> ProcessGroups:
    return ProcessGroups(COMPONENTS, NAMES, lambda: 7.0, timeout_s=600.0)


def test_a_group_is_formed_beside_workers_that_are_still_constructed_and_one_on_shared_devices_behind_them() -> None:
    async def run() -> None:
        calls: list[Any] = []
        ranks = {name: Rank(name, calls) for name in ("actor-0", "actor-1", "shared-0", "infer-0")}
        async with groups_of() as groups:
            for name in ("shared-0", "infer-0", "actor-1"):
                groups.add(ranks[name])  # type: ignore[arg-type]
            await until_idle()
            assert calls == []
            groups.add(ranks["actor-0"])  # type: ignore[arg-type]
            await until_idle()
            actors = [("actor-0", "setup", "host", 7, 600.0), ("actor-1", "setup", "host", 7, 600.0)]
            assert calls == actors
            forming = asyncio.ensure_future(groups.formed())
            await until_idle()
            assert calls == [*actors, ("shared-0", "setup", "host", 8, 600.0)]
            assert not forming.done()
            for rank in ranks.values():
                rank.done.set_result(None)
            await forming

    asyncio.run(run())


def test_a_group_that_does_not_form_in_time_is_an_error_that_names_the_field_and_leaves_no_wait() -> None:
    async def starting() -> None:
        async with groups_of() as groups:
            ranks = [Rank(name, []) for name in ("actor-0", "actor-1", "shared-0")]
            for rank in ranks:
                groups.add(rank)  # type: ignore[arg-type]
            ranks[1].done.set_exception(CallDeadlineError("actor-1", "setup", "7 s", "log"))
            await groups.formed()

    async def run() -> None:
        with pytest.raises(StartupDeadlineError, match=r"actor-1.*spec\.startupDeadlineSeconds"):
            await starting()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_a_group_is_given_up_when_another_worker_cannot_be_constructed() -> None:
    async def starting() -> None:
        async with groups_of() as groups:
            for name in NAMES["actor"]:
                groups.add(Rank(name, []))  # type: ignore[arg-type]
            await until_idle()
            raise ValueError("no engine")

    async def run() -> None:
        with pytest.raises(ValueError, match="no engine"):
            await starting()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
