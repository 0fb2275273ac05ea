"""Run by SGLang's interpreter, which has nothing of RLJob: asks the server's own parser about arguments; JSON on stdin and stdout."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys


def main() -> None:
    """Answer one question: for each argument its name, the words of the command line, whether it is false."""
    question = json.load(sys.stdin)
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    ServerArgs.add_cli_args(parser)
    defaults = vars(parser.parse_args(["--model-path", "model"]))
    problems: dict[str, str | None] = {}
    for argument in question:
        if argument["off"]:
            if argument["name"] not in defaults:
                problems[argument["name"]] = None
            elif defaults[argument["name"]] is not False:
                problems[argument["name"]] = "it is no switch that is off by itself, and its command line has no form for false"
            continue
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                parser.parse_args(["--model-path", "model", *argument["words"]])
        except SystemExit:
            text = said.getvalue().strip().splitlines()[-1].split("error: ", 1)[-1]
            problems[argument["name"]] = None if text.startswith("unrecognized arguments") else text
    sys.stdout.write(json.dumps({"known": sorted(defaults), "problems": problems}) + "\n")


if __name__ == "__main__":
    main()
