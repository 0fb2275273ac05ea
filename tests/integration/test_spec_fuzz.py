"""A slice of `python -m bench.specs`, which has 10,000: whatever the spec, one of the three refuses it with a path, or it runs."""

from __future__ import annotations

import asyncio
from collections import Counter

from bench.operator.api import Api
from bench.specs.__main__ import verdicts_of
from bench.specs.mutants import mutants
from tests.integration.kube_api import ApiServer

COUNT = 300


def test_random_specs_are_refused_with_a_path_or_run(api_server: ApiServer, namespace: str):
    async def run():
        async with Api(api_server.kubeconfig) as api:
            return await verdicts_of(api, namespace, mutants(7, COUNT))

    verdicts = asyncio.run(run())
    assert [(finding, document) for document, verdict in verdicts for finding in verdict.findings] == []
    outcomes = Counter(verdict.outcome for _, verdict in verdicts)
    assert all(outcomes[outcome] >= COUNT / 50 for outcome in ("accepted", "refused by the planner", "refused by the schema")), outcomes
