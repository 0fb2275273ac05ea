"""The short form of `make chaos`: faults of every kind at random moments in the driver's loop, and some of the operator among live jobs."""

import asyncio
from pathlib import Path

import pytest

from bench.chaos import loop, operator_faults, webhooks
from bench.chaos.outcome import WRONG, Outcome
from bench.operator.api import Api
from tests.integration.kube_api import ApiServer


def wrong(found: list[Outcome]) -> list[str]:
    return [f"{outcome.kind}: {outcome.detail}" for outcome in found if outcome.result == WRONG]


def test_a_driver_whose_processes_disks_and_syncs_fail_trains_every_step_once_or_says_why_not() -> None:
    found = asyncio.run(loop.run(seed=100_000, count=40, only=None, say=lambda done: None))
    assert wrong(found) == []
    assert len(found) >= 40
    assert len({outcome.kind for outcome in found}) >= 10


@pytest.mark.slow
def test_jobs_end_as_they_should_while_the_operator_and_its_api_server_fail(api_server: ApiServer, namespace: str, tmp_path: Path) -> None:
    async def faults() -> list[Outcome]:
        async with Api(api_server.kubeconfig) as api:
            kinds = [kind for kind in operator_faults.KINDS if kind not in operator_faults.LONG_KINDS]
            return await operator_faults.run_on(api, api_server.kubeconfig, tmp_path, namespace, seed=0, count=14, only=kinds)

    found = asyncio.run(faults())
    assert wrong(found) == []
    assert {outcome.kind for outcome in found} & set(operator_faults.OPERATOR_KINDS)


@pytest.mark.slow
def test_webhooks_that_are_down_and_a_slow_etcd_hold_up_what_they_must_and_nothing_else(
    api_server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    kinds = (*webhooks.SHORT_KINDS, "etcd slowed")

    async def faults() -> list[Outcome]:
        async with Api(api_server.kubeconfig) as api:
            return await operator_faults.run_on(api, api_server.kubeconfig, tmp_path, namespace, seed=0, count=len(kinds), only=kinds)

    found = asyncio.run(faults())
    assert wrong(found) == []
    assert {outcome.kind for outcome in found} == set(kinds)
