"""One failing manifest per rule, with the exact text a user reads. UPDATE_GOLDEN=1 rewrites the texts."""

import os
import pickle
from pathlib import Path

import pytest

from rljob_api.errors import SpecInvalidError
from rljob_api.supported import UNSUPPORTED
from rljob_api.validation import check

FOLDER = Path(__file__).parents[2] / "golden" / "invalid"
MANIFESTS = sorted(FOLDER.glob("*.yaml"))


def problems(manifest: Path) -> SpecInvalidError:
    with pytest.raises(SpecInvalidError) as caught:
        check(manifest.read_text(encoding="utf-8"))
    return caught.value


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_the_message_is_the_golden_one(manifest: Path) -> None:
    error = problems(manifest)
    text = "".join(f"{problem.line or '-'}: {problem}\n" for problem in error.errors)
    golden = manifest.with_suffix(".txt")
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_no_text_without_a_manifest() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == {path.stem for path in MANIFESTS}


def test_every_unsupported_field_has_a_manifest() -> None:
    reported = {
        "".join("[]" if part.isdigit() else part for part in problem.path.replace("[", "\0").replace("]", "\0").split("\0"))
        for manifest in FOLDER.glob("unsupported-*.yaml")
        for problem in problems(manifest).errors
    }
    missing = {f"spec.{row.path}" for row in UNSUPPORTED} - reported
    assert missing == set()
