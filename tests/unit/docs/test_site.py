"""The site is built without a warning, and its pages ask no other host for anything."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.layout.tree import ROOT
from tests.support.pace import HANG_S

LOADED = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?(?:https?:)?//|<link[^>]*rel=[\"']?(?:stylesheet|preconnect|preload|icon)[^>]*href=[\"']?(?:https?:)?//"
)


def test_it_is_built_strictly_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.html")}
    assert {Path("index.html"), Path("tutorial/index.html"), Path("migrate/verl.html"), Path("reference/rljob.html")} <= set(pages)
    assert [str(path) for path, text in pages.items() if LOADED.search(text)] == []
    conditions = pages[Path("reference/conditions.html")]
    assert "<td><code>Startup<wbr>Deadline<wbr>Exceeded</code></td>" in conditions, "long names in tables break between words"
    assert "<td><code>ClusterReady</code></td>" in conditions


def test_what_another_host_would_serve_is_noticed() -> None:
    assert LOADED.search('<script async src="https://cdn.example/a.js">')
    assert LOADED.search('<link rel="stylesheet" href="//fonts.example/a.css">')
    assert not LOADED.search('<script src="assets/a.js"></script><a href="https://kueue.sigs.k8s.io">')
