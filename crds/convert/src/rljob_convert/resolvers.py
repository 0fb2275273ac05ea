"""What ``${name:arguments}`` computes: OmegaConf's own resolvers that files use, and RLinf's.

Sources: https://omegaconf.readthedocs.io/en/2.3_branch/custom_resolvers.html and RLinf 0.3.0, rlinf/utils/omega_resolver.py. Own code, not
omegaconf: that resolves a value without saying which other keys it came from, and the account of a conversion needs them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rljob_api.errors import SpecInvalidError, show
from rljob_api.reading import yaml_text
from rljob_convert.notes import is_secret_key

CALL = re.compile(r"(subtract|multiply|int_div|not|oc\.env|oc\.decode):(.*)", re.DOTALL)
"""A call with its arguments, which hold no more references."""


class UnresolvedError(Exception):
    """Carries why a reference has no value."""


class UnsetError(UnresolvedError):
    """An environment variable without a value: no fault of the file."""


def called(name: str, arguments: str, environment: Mapping[str, str]) -> object:
    """The value of a call whose arguments are filled in.

    Raises:
        UnresolvedError: the arguments do not fit.
        UnsetError: an environment variable that is not set and has no default.
    """
    if name == "oc.env":
        return _variable(arguments, environment)
    if name == "oc.decode":
        return _decoded(arguments)
    words = [word.strip() for word in arguments.split(",")]
    if name == "not" and len(words) == 1 and words[0].lower() in ("true", "false", "none", "null", ""):
        return words[0].lower() != "true"
    if name == "not" or len(words) != 2 or not all(re.fullmatch(r"-?[0-9]{1,12}", word) for word in words):
        raise UnresolvedError(f"{name} needs {'true or false' if name == 'not' else 'two whole numbers'}, not {show(arguments)}")
    left, right = int(words[0]), int(words[1])
    if name == "int_div":
        if right == 0:
            raise UnresolvedError("it divides by 0")
        return left // right
    return left - right if name == "subtract" else left * right


def _variable(arguments: str, environment: Mapping[str, str]) -> str | None:
    name, comma, default = (part.strip() for part in arguments.partition(","))
    if is_secret_key(name):
        raise UnresolvedError(f"environment variable {name} promises a secret, and everyone who may read a job reads its manifest")
    if name in environment:
        return environment[name]
    if not comma:
        raise UnsetError(f"environment variable {name} is not set and has no default")
    text = default.strip("'\"")
    return None if default.lower() == "null" else text


def _decoded(text: str) -> object:
    """A text as YAML reads it."""
    try:
        documents = yaml_text.load(text.strip("'\" "))
    except SpecInvalidError as error:
        raise UnresolvedError(f"oc.decode cannot read {show(text)}") from error
    return documents[0].data if documents else None
