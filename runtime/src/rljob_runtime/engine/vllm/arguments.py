"""``engine.extraArgs`` through vLLM's own parser: names of ``EngineArgs``, values as its command line takes them.

As a program (``python -m``) it serves processes that must not import vLLM: arguments as JSON on stdin, problems as JSON on stdout.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rljob_api.errors import FieldError, field_error

CHILD_TIMEOUT_S = 300.0
"""Importing vLLM takes seconds, on a busy machine with a cold disk minutes."""


def parse(path: str, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[FieldError]]:
    """Values as ``EngineArgs`` holds them, by name, and what is wrong with the others. Imports vLLM.

    Args:
        path: of the arguments in the spec.
        arguments: plain JSON values by the names of ``EngineArgs``.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False, add_help=False, allow_abbrev=False))
    known = [each.name for each in dataclasses.fields(EngineArgs)]
    values: dict[str, Any] = {}
    problems: list[FieldError] = []
    for name, value in arguments.items():
        if name not in known:
            near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
            remedy = f"did you mean {near[0]}?" if near else "remove it"
            problems.append(field_error(f"{path}.{name}", value, "is not an argument of vLLM", remedy))
            continue
        try:
            values[name] = getattr(parser.parse_args(_command_line(name, value)), name)
        except argparse.ArgumentError as error:
            problems.append(field_error(f"{path}.{name}", value, f"is refused by vLLM: {error}", "write a value that it takes"))
        except SystemExit:  # how the parser says that an option has no such form, for example a flag with a value
            problem = "is not a value that vLLM takes for it"
            problems.append(field_error(f"{path}.{name}", value, problem, f"see --{name.replace('_', '-')} in vLLM's documentation"))
    return values, problems


def problems_in_child(path: str, arguments: Mapping[str, Any]) -> Sequence[FieldError]:
    """The problems that :func:`parse` finds, from a child process.

    None where vLLM does not answer in time or is not there: the engine's start reports them then.
    """
    command = [sys.executable, "-m", __name__]
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    question = json.dumps({"path": path, "arguments": arguments})
    try:
        done = subprocess.run(command, input=question, env=environment, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return ()
    return tuple(FieldError(**problem) for problem in json.loads(done.stdout.splitlines()[-1]))


def _command_line(name: str, value: Any) -> list[str]:
    """The value as vLLM's command line has it."""
    option = f"--{name.replace('_', '-')}"
    match value:
        case bool():
            return [option if value else option.replace("--", "--no-", 1)]
        case list():
            return [option, *(entry if isinstance(entry, str) else json.dumps(entry) for entry in value)]
        case dict():
            return [f"{option}={json.dumps(value)}"]
        case _:
            return [f"{option}={value}"]


def main() -> None:
    """Answer one question."""
    question = json.load(sys.stdin)
    _, problems = parse(question["path"], question["arguments"])
    sys.stdout.write(json.dumps([dataclasses.asdict(problem) for problem in problems]) + "\n")


if __name__ == "__main__":
    main()
