"""Which pages there are: of the documentation, by its navigation, and those that the command line writes about runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.measure import ROOT

SITE = ROOT / "build" / "site"
RLJOB = (sys.executable, "-c", "from rljob_runtime.commands.cli import app; app()")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page and what it is called in records and pictures."""

    name: str
    file: Path


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags for Python objects mean nothing here."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def site_pages(site: Path = SITE, config: Path = ROOT / "mkdocs.yml") -> Iterator[Page]:
    """Every page of the navigation, in its order.

    Raises:
        FileNotFoundError: a page of the navigation is in docs/ and not in the built site.
    """
    docs = config.parent / "docs"
    navigation = yaml.load(config.read_text(encoding="utf-8"), _Loader)["nav"]
    for source in dict.fromkeys(_sources(navigation)):
        file = site / Path(source).with_suffix(".html")
        if file.exists():
            yield Page(name=f"docs-{file.relative_to(site).with_suffix('').as_posix().replace('/', '-')}", file=file)
        elif (docs / source).exists():
            raise FileNotFoundError(f"{file}: page {source} of {config.name} is not built, or only an older site is; run: make docs")


def _sources(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for item in entry.values() if isinstance(entry, dict) else entry:
            yield from _sources(item)


def run_pages(runs: Sequence[Path], work: Path) -> Iterator[Page]:
    """Report, timeline and plan of each run, and the comparison of all."""
    for run in runs:
        yield Page(name=f"report-{run.name}", file=run / "report.html")
        yield _written(f"timeline-{run.name}", ["timeline", run, "--html"], work)
        yield _written(f"plan-{run.name}", ["plan", run / "spec.yaml", "--html"], work)
    if len(runs) > 1:
        yield _written("compare", ["compare", *runs, "--html"], work)


def _written(name: str, command: Sequence[str | Path], work: Path) -> Page:
    file = work / f"{name}.html"
    subprocess.run([*RLJOB, *command, file], cwd=ROOT, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return Page(name=name, file=file)
