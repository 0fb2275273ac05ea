"""tools/screenshots: which pages it looks at, what of them it reports, and the record."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.screens import __main__ as command
from bench.screens import browser as driver
from bench.screens.browser import Browser, BrowserError, View
from bench.screens.pages import Page, site_pages
from tests.layout.tree import ROOT

FAKE = Path(__file__).with_name("fake_browser.py")
NARROW = View(width_px=390, height_px=800, is_dark=True)


def opened(behavior: str, tmp_path: Path) -> Browser:
    return Browser([sys.executable, str(FAKE), behavior], tmp_path / "profile")


def test_a_page_without_a_problem_is_pictured(tmp_path: Path) -> None:
    with opened("fine", tmp_path) as browser:
        assert browser.look(ROOT / "README.md", tmp_path / "a.png", NARROW) == []
        assert browser.version == "Chromium 1.2"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_everything_wrong_with_a_page_is_reported_once(tmp_path: Path) -> None:
    with opened("wrong", tmp_path) as browser:
        assert browser.look(ROOT / "README.md", tmp_path / "a.png", NARROW) == [
            "request failed: file:///missing.js: net::ERR_FILE_NOT_FOUND",
            "asks another host: https://cdn.example/a.css",
            "console: no data 3",
            "exception: TypeError: x",
            "is 512 pixels wide in a window of 390: table.plan",
            "has the colors default of the site instead of slate",
            "contrast 1.2 of 'gray' (td.note)",
        ]


@pytest.mark.parametrize(("behavior", "message"), [("refuses", "Page.navigate: Cannot navigate"), ("dies", "the browser ended")])
def test_a_browser_that_fails_is_an_error(behavior: str, message: str, tmp_path: Path) -> None:
    with opened(behavior, tmp_path) as browser, pytest.raises(BrowserError, match=message):
        browser.look(ROOT / "README.md", tmp_path / "a.png", NARROW)


def test_an_answer_that_does_not_come_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened("silent", tmp_path) as browser:
        monkeypatch.setattr(driver, "ANSWER_TIMEOUT_S", 0.0)
        with pytest.raises(BrowserError, match=r"waited 0 s for an answer to Browser\.getVersion"):
            assert browser.version


def test_all_pages_of_the_navigation_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "mkdocs.yml").write_text(
        "markdown_extensions: [{toc: {slugify: !!python/object/apply:some.function {kwds: {}}}}]\n"
        "nav:\n- index.md\n- Use:\n  - how/index.md\n  - Again: index.md\n  - Optional: missing.md\n"
    )
    for name in ("docs/index.md", "docs/how/index.md", "site/index.html", "site/how/index.html"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = list(site_pages(tmp_path / "site", tmp_path / "mkdocs.yml"))
    assert [page.name for page in found] == ["docs-index", "docs-how-index"]
    (tmp_path / "site" / "how" / "index.html").unlink()
    with pytest.raises(FileNotFoundError, match="run: make docs"):
        list(site_pages(tmp_path / "site", tmp_path / "mkdocs.yml"))


def test_the_navigation_of_this_project_is_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"index\.html"):
        list(site_pages(tmp_path))


@pytest.mark.parametrize(("behavior", "exit_code"), [("fine", 0), ("wrong", 1)])
def test_the_record_has_a_line_per_page(
    behavior: str, exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[str] = []
    monkeypatch.setattr(command, "site_pages", lambda: [Page(name="docs-a", file=FAKE), Page(name="docs-b", file=FAKE)])
    monkeypatch.setattr(command, "Browser", lambda executable, profile: opened(behavior, tmp_path))
    monkeypatch.setattr(command, "write_results", lambda name, values, text: written.append(text))
    monkeypatch.setattr(command.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert command.main(["--out", str(tmp_path / "out"), "--write", "--only", "docs-a"]) == exit_code
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(f"docs-a-{view}.png" for view in command.VIEWS)
    rows = [line for line in written[0].splitlines() if line.startswith("| docs-")]
    assert len(rows) == 1
    assert ("none" in rows[0]) == (behavior == "fine")
    assert f"1 pages in 4 views: {exit_code} with a problem" in capsys.readouterr().out


def test_without_a_browser_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit):
        command.main([])
    assert "apt-get install chromium" in capsys.readouterr().err
