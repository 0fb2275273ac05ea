"""``python -m bench.upstream --roll CHECKOUT --rlinf CHECKOUT``: every example through convert, validate and plan."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.measure import machine, write_results
from bench.upstream import corpus, peer, report
from bench.upstream.outcome import Outcome, examine


def main() -> int:
    """Returns 1 when an example crashed the converter, or a file that must be refused was accepted."""
    parser = argparse.ArgumentParser(prog="python -m bench.upstream", description=__doc__)
    parser.add_argument("--roll", type=Path, help="checkout or bare repository of ROLL")
    parser.add_argument("--rlinf", type=Path, help="checkout or bare repository of RLinf")
    parser.add_argument("--write", action="store_true", help="write bench/results/upstream.md and .json instead of only printing")
    parser.add_argument("--show", metavar="TEXT", help="print what became of the examples whose path or kind holds this")
    arguments = parser.parse_args()
    sources = {name: source for name in ("roll", "rlinf") if (source := getattr(arguments, name)) is not None}
    if not sources:
        parser.error("give --roll or --rlinf: the files are read there, none is shipped with RLJob")
    outcomes, composed = _outcomes(sources)
    figures = report.data(outcomes, {report.NAMES[name]: _version(source) for name, source in sources.items()}, composed)
    text = report.markdown(figures)
    sys.stdout.write(text)
    for outcome in outcomes:
        if arguments.show is not None and arguments.show in f"{outcome.example.name} {outcome.example.kind}":
            why = outcome.crashed or outcome.refused or "; ".join(outcome.problems) or "valid"
            sys.stdout.write(f"{outcome.example.name} [{', '.join(outcome.owners)}]: {why}\n")
    if arguments.write:
        write_results("upstream", {"machine": machine(("pydantic",)), **figures}, text)
    return 1 if report.wrongly_accepted(outcomes) or any(outcome.crashed for outcome in outcomes) else 0


def _outcomes(sources: dict[str, Path]) -> tuple[list[Outcome], dict[str, int] | None]:
    outcomes: list[Outcome] = []
    composed = None
    with tempfile.TemporaryDirectory() as scratch:
        for name, source in sources.items():
            root = corpus.checkout(source, Path(scratch) / name)
            found, environment = list(corpus.examples(name, root)), corpus.variables(root)
            outcomes += [examine(example, environment) for example in found]
            if name == "rlinf":
                composed = peer.compare(found, environment)
    return outcomes, composed


def _version(source: Path) -> str:
    """The commit, where the source is under version control."""
    for options in (["--git-dir", str(source)], ["-C", str(source)]):
        found = subprocess.run(["git", *options, "rev-parse", "--short=10", "HEAD"], check=False, capture_output=True, text=True)
        if found.returncode == 0:
            return found.stdout.strip()
    return "an unknown commit"


if __name__ == "__main__":
    sys.exit(main())
