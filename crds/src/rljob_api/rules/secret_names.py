"""Which environment variables look like secrets: everyone who may read a job reads its manifest."""

from __future__ import annotations

import itertools

from rljob_api.errors import FieldError, field_error

_WORDS = frozenset({"TOKEN", "SECRET", "PASSWORD", "PASSWD", "APIKEY", "CREDENTIAL", "CREDENTIALS"})
_PAIRS = frozenset({("API", "KEY"), ("PRIVATE", "KEY"), ("ACCESS", "KEY")})
_PLACES = frozenset({"FILE", "PATH", "DIR", "FOLDER", "NAME", "ID", "TYPE"})
"""A name that ends so says where a secret is or of what kind, not what it is."""
_FILES = frozenset({"GOOGLE_APPLICATION_CREDENTIALS"})
"""Names of files by convention."""


def looks_secret(name: str) -> bool:
    """Whether the words of a variable's name, separated by underscores, promise a secret."""
    words = name.upper().split("_")
    if name.upper() in _FILES or words[-1] in _PLACES:
        return False
    return not _WORDS.isdisjoint(words) or not _PAIRS.isdisjoint(itertools.pairwise(words))


def secret_problem(path: str, name: str, remedy: str) -> FieldError:
    """The refusal of a literal value; it never shows the value."""
    problem = f"{name} looks like a secret, and a literal value is shown to everyone who may read the job"
    return field_error(path, None, problem, f"put it into a Secret and write {remedy}")
