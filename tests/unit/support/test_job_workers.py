"""The job's workers over fakes."""

from __future__ import annotations

import pytest

from tests.support.job_workers import make_job_workers


def test_a_role_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match=r"make_job_workers got engine, trainers; its roles are .*trainer"):
        make_job_workers(trainers=[object()], engine=[object()])
    assert [component.role for component in make_job_workers(trainer=[object()]).components] == ["Trainer"]
