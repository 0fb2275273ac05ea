"""Run by SGLang's interpreter, which has nothing of RLJob: asks the server's own parser about arguments; JSON on stdin and stdout."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import sys


def main() -> None:
    """Answer one question: for each argument its name and the words of the command line."""
    question = json.load(sys.stdin)
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    ServerArgs.add_cli_args(parser)
    known = [field.name for field in dataclasses.fields(ServerArgs)]
    problems: dict[str, str | None] = {}
    for argument in question:
        if argument["name"] not in known:
            problems[argument["name"]] = None
            continue
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                parser.parse_args(["--model-path", "model", *argument["words"]])
        except SystemExit:
            problems[argument["name"]] = said.getvalue().strip().splitlines()[-1].split("error: ", 1)[-1]
    sys.stdout.write(json.dumps({"known": known, "problems": problems}) + "\n")


if __name__ == "__main__":
    main()
