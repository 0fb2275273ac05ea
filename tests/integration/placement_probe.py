"""A worker that says where it runs: the stand-in for engines and trainers in the tests of placement."""

import os
import sys

import ray


class Probe:
    """Answers what only the process itself and Ray know."""

    def where(self) -> tuple[str, str, dict[str, str]]:
        """Ray's id of the node, the interpreter, the environment."""
        node: str = ray.get_runtime_context().get_node_id()
        return node, sys.executable, dict(os.environ)
