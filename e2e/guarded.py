"""One job for the scenarios of security and of upgrades: it trains, with a secret in its environment, until one of them deletes it."""

from __future__ import annotations

from e2e.jobs import unhurried
from e2e.kubectl import Kubectl
from e2e.test_training import STARTS_S

NAME = "guarded"
SECRET = "s3cr3t-value-of-the-test"


class Guarded:
    """Begun by the first scenario that asks for it."""

    def __init__(self, kubectl: Kubectl) -> None:
        self._kubectl = kubectl

    def trains(self, steps: int) -> str:
        """The name of the job, once it has trained so many steps."""
        if not self._kubectl.exists("rljob", NAME):
            self._begin()
        self._kubectl.until(f"{steps} steps", lambda: self._kubectl.step(NAME) >= steps, STARTS_S, job=NAME)
        return NAME

    def _begin(self) -> None:
        variable = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}, "stringData": {"token": SECRET}}
        code, job = unhurried(NAME)
        for place in (*job["spec"]["nodeGroups"], job["spec"].setdefault("head", {})):
            place["env"] = [variable]
        self._kubectl.apply(secret, code, job)

    def delete(self) -> None:
        """Unless a scenario has done so."""
        self._kubectl("delete", "rljob", NAME, "--ignore-not-found")
