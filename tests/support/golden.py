"""Texts that tests compare with files under tests/golden. `pytest --update-goldens` writes the files instead; review the diff."""

from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

SWITCH = "--update-goldens"


@dataclass(frozen=True, kw_only=True, slots=True)
class Golden:
    """Compares a text with its golden file, or writes the file."""

    updating: bool

    def differences(self, path: Path, text: str) -> str:
        """How the text differs from the file, and what to do about it; empty where it does not."""
        if self.updating:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        if not path.exists():
            return f"{path} is missing: run this test with {SWITCH} and review the file"
        stored = path.read_text(encoding="utf-8")
        if text == stored:
            return ""
        diff = "".join(unified_diff(stored.splitlines(keepends=True), text.splitlines(keepends=True), "golden file", "this text"))
        return f"{path} holds another text; {SWITCH} rewrites it\n{diff}"
