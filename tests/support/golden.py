"""Texts that tests compare with files under tests/golden. `pytest --update-goldens` writes the files instead; review the diff."""

from dataclasses import dataclass
from pathlib import Path

import pytest

SWITCH = "--update-goldens"


@dataclass(frozen=True, kw_only=True, slots=True)
class Golden:
    """Compares a text with its golden file, or writes the file."""

    updating: bool

    def __call__(self, path: Path, text: str) -> None:
        """Fails where the file does not hold this text."""
        if self.updating:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        if not path.exists():
            pytest.fail(f"{path} is missing: run this test with {SWITCH} and review the file")
        assert text == path.read_text(encoding="utf-8"), f"{path} holds another text; {SWITCH} rewrites it"
