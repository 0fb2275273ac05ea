"""The figures that pages quote are those of the results, the results name their commit, and no measured number is without a result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from bench import figure_values, figures
from bench.figures import BLOCKS, NOT_MEASURED, QUOTES, README, UNCLEAN, Block, Quote, QuoteMissingError
from bench.measure import RESULTS
from tests.layout.tree import ROOT

TEXT = (ROOT / README).read_text()


@pytest.mark.parametrize("quote", QUOTES, ids=lambda quote: f"{quote.page}-{quote.stem}")
def test_a_quoted_figure_is_the_recorded_one(quote: Quote) -> None:
    differing = [
        f"{quote.page}:{one.line}: {one.printed}, but {quote.stem}.json has {one.recorded} (in {quote.text!r})"
        for one in figures.found(quote, (ROOT / quote.page).read_text())
        if one.printed != one.recorded
    ]
    assert not differing, f"remedy: python -m bench.figures --write\n{differing}"


def test_the_blocks_are_those_of_the_results() -> None:
    for page in {block.page for block in BLOCKS}:
        text = (ROOT / page).read_text()
        assert figures.rewritten(page, text) == text, "remedy: python -m bench.figures --write"


@pytest.mark.parametrize("stem", sorted(file.stem for file in RESULTS.glob("*.json")))
def test_a_result_names_its_date_and_a_commit_without_local_changes(stem: str) -> None:
    date, commit = figures.origin(stem)
    if stem in UNCLEAN:
        assert figures.unclean(stem), f"{stem}.json has the commit {commit}: remove it from UNCLEAN in bench/figures.py"
    else:
        assert not figures.unclean(stem), f"{stem}.json: date {date!r}, commit {commit!r}: measure it on a commit without local changes"


def test_the_readme_quotes_results_of_a_known_state_of_the_code() -> None:
    assert {quote.stem for quote in QUOTES if quote.page == README} & UNCLEAN == set()


def test_the_exceptions_are_results() -> None:
    assert {stem for stem in UNCLEAN if not (RESULTS / f"{stem}.json").is_file()} == set()


def test_every_measured_number_of_the_readme_has_a_result() -> None:
    missing = [f"{README}:{line}: {text!r}" for line, text in figures.unexplained(TEXT)]
    assert not missing, f"remedy: add them to QUOTES or NOT_MEASURED in bench/figures.py\n{missing}"
    assert [passage for passage in NOT_MEASURED if " ".join(passage.split()) not in " ".join(TEXT.split())] == [], "not in README.md"


@pytest.mark.parametrize("number", ["7 times", "12 %", "3.5 GB", "40 s", "2 of 3", "1.5 to 2.5", "4 minutes"])
def test_a_number_with_a_unit_is_seen(number: str) -> None:
    (at, text), *_ = figures.unexplained(f"{TEXT}\nIt takes {number} of it.\n")
    assert (at, text.startswith(number.split()[0])) == (TEXT.count("\n") + 2, True)


def test_numbers_in_code_are_not_figures() -> None:
    assert figures.unexplained(f"{TEXT}\nSee `sleep 40 s` and\n\n```\n40 s\n```\n") == []


def half(values: Mapping[str, Any]) -> list[str]:
    return [str(values["n"] / 2), "1.0e-6"]


def test_writing_replaces_the_figures_and_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    page = "A 3 is\n 3.5 times, or 2e-5.\n<!-- figures: rows -->\nold\n<!-- /figures -->\nend 3.5\n"
    quotes = (Quote(page="p.md", stem="s", text="is {} times, or {}.", values=half),)
    blocks = (
        Block(page="p.md", name="rows", stem="s", lines=lambda values: ["new"]),
        Block(page="p.md", name="later", stem="s", lines=lambda values: []),
    )
    monkeypatch.setattr(figures, "QUOTES", quotes)
    monkeypatch.setattr(figures, "BLOCKS", blocks)
    monkeypatch.setattr(figures, "result", lambda stem: {"n": 9})
    assert figures.rewritten("p.md", page) == ("A 3 is\n 4.5 times, or 1.0e-6.\n<!-- figures: rows -->\nnew\n<!-- /figures -->\nend 3.5\n")
    assert [(one.line, one.printed, one.recorded) for one in figures.found(quotes[0], page)] == [(2, "3.5", "4.5"), (2, "2e-5", "1.0e-6")]
    with pytest.raises(QuoteMissingError, match=r"p\.md: found 2 times"):
        list(figures.found(quotes[0], page + page))
    with pytest.raises(QuoteMissingError, match="figures: rows"):
        figures.rewritten("p.md", "is 1 times, or 2.")
    with pytest.raises(ValueError, match=r"has 1 figures, s\.json gives 2"):
        list(figures.found(Quote(page="p.md", stem="s", text="is {} times", values=half), page))


def test_a_result_without_a_clean_commit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "result", lambda stem: {"machine": {"measured_at": "2026-11-26 00:43 UTC", "commit": stem}})
    assert [figures.unclean(commit) for commit in ("95be48e", "95be48e+", "unknown", "")] == [False, True, True, True]
    monkeypatch.setattr(figures, "result", lambda stem: {"machine": {"commit": stem}})
    assert figures.unclean("95be48e")


def test_the_readme_counts_the_scenarios() -> None:
    scenarios = sum(file.read_text().count("\ndef test_") for file in (ROOT / "e2e").glob("test_*.py"))
    assert f"{scenarios} scenarios on a real cluster" in TEXT


def test_the_transcript_of_a_cluster_is_shortened_and_has_its_times() -> None:
    rows = ["NAME STATUS STEP", "q Starting", "q Starting", *(f"q Running {step}" for step in range(0, 200, 5)), "q Completed 200"]
    way = {"name": "to a job on a cluster", "total_s": 90.0, "transcript": rows, "foreign_load": 0.1}
    way["steps"] = [{"what": "clone", "seconds": 0.2}, {"what": "cluster", "seconds": 60.0}]
    lines = figure_values.cluster_transcript({"ways": [way]})
    assert lines[:4] == ["```", "NAME STATUS STEP", "q Starting", "q Starting"]
    assert lines[4] == "q Running 0"
    assert lines[9:12] == ["q Completed 200", "```", ""]
    assert lines[-2].endswith("it took [1.5 minutes](bench/results/newcomer.md):")
    assert lines[-1] == "Kubernetes built from source and started 60 s."
    assert figure_values.cluster_transcript({"ways": [{"name": "from a clone"}]}) == []
    assert figure_values.thinned(rows[:3]) == rows[:3]
