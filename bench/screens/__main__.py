"""Pictures of every page that RLJob makes: documentation, report, timeline, plan, comparison; light and dark, wide and narrow.

    make docs && tools/screenshots runs/a runs/b    into build/screenshots, to be looked at; --only placement, --write
    tools/screenshots runs/a --image                also docs/images/report.png, the picture in README and tutorial

Needs Chromium, and two finished runs for the comparison. Exit code 1 when a page writes an error to the browser's console, a request fails
or leaves this machine, the page is wider than its window, or text has too little contrast. --write records it in bench/results/screens.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.measure import ROOT, machine, write_results
from bench.screens.browser import Browser, View
from bench.screens.pages import Page, run_pages, site_pages

WIDE_PX, NARROW_PX, HEIGHT_PX = 1280, 390, 1800
VIEWS = tuple(View(width_px=width, height_px=HEIGHT_PX, is_dark=dark) for width in (WIDE_PX, NARROW_PX) for dark in (False, True))
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
IMAGE = ROOT / "docs" / "images" / "report.png"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; the browser's path is among the options."""
    parser = argparse.ArgumentParser(prog="tools/screenshots", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="folders of finished runs")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "screenshots", help="folder for the pictures")
    parser.add_argument("--only", metavar="TEXT", default="", help="pages whose name contains this")
    parser.add_argument("--image", action="store_true", help="write docs/images/report.png from the first run")
    parser.add_argument("--write", action="store_true", help="write bench/results/screens.md and .json")
    options = parser.parse_args(arguments)
    options.browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if options.browser is None:
        parser.error(f"none of {', '.join(BROWSERS)} is installed; Debian: apt-get install chromium")
    if options.image and not options.runs:
        parser.error("--image needs a run, whose report is pictured")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 when something is wrong with a page."""
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rljob-screenshots-", ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        with Browser([options.browser], work / "profile") as browser:
            pages = (*site_pages(), *run_pages([run.resolve() for run in options.runs], work))
            found = [look(browser, page, options.out) for page in pages if options.only in page.name]
            if options.image:
                browser.look(options.runs[0].resolve() / "report.html", IMAGE, View(width_px=WIDE_PX, height_px=1100, is_dark=False))
            values = {"machine": machine(()), "browser": browser.version, "views": [str(view) for view in VIEWS], "pages": found}
    values["headline"] = headline(found)
    if options.write:
        write_results("screens", values, markdown(values))
    sys.stdout.write(f"{values['headline']}\n")
    return 1 if any(page["problems"] for page in found) else 0


def look(browser: Browser, page: Page, out: Path) -> dict[str, Any]:
    """A page in every view: its name, and problem -> views."""
    problems: dict[str, list[str]] = {}
    for view in VIEWS:
        for problem in browser.look(page.file, out / f"{page.name}-{view}.png", view):
            problems.setdefault(problem, []).append(str(view))
    sys.stdout.write(f"{'FAIL' if problems else 'ok  '} {page.name}\n")
    for problem, views in problems.items():
        sys.stdout.write(f"     {problem} [{', '.join(views)}]\n")
    sys.stdout.flush()
    return {"name": page.name, "problems": problems}


def headline(pages: Sequence[dict[str, Any]]) -> str:
    """One line."""
    wrong = sum(bool(page["problems"]) for page in pages)
    return f"{len(pages)} pages in {len(VIEWS)} views: {wrong} with a problem"


def markdown(values: dict[str, Any]) -> str:
    """The record."""
    about = values["machine"]
    lines = [
        "# Pages in a browser",
        "",
        f"Written by `tools/screenshots --write` on {about['measured_at']}, commit {about['commit']}, {values['browser']}. Every page in "
        f"the views {', '.join(values['views'])} (pixels, color scheme). Problems are errors on the console, failed requests, requests to "
        "other hosts, content wider than the window, and text with a contrast below 3.",
        "",
        f"{values['headline']}.",
        "",
        "| page | problems |",
        "|---|---|",
    ]
    for page in values["pages"]:
        problems = [f"{_cell(problem)} ({', '.join(views)})" for problem, views in page["problems"].items()]
        lines.append(f"| {page['name']} | {'<br>'.join(problems) or 'none'} |")
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace(str(ROOT), ".")


if __name__ == "__main__":
    sys.exit(main())
