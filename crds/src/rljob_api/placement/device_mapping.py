"""ROLL's device_mapping expressions, parsed by a small grammar and never evaluated.

::

    EXPR  = LIST | "list" "(" RANGE ")" | EXPR "+" EXPR | EXPR "*" INT | INT "*" EXPR | "(" EXPR ")"
    LIST  = "[" [ INT { "," INT } ] "]"
    RANGE = "range" "(" INT [ "," INT [ "," INT ] ] ")"       a bare RANGE counts as a list, as in list(range(0,8))
    INT   = one to nine of 0-9, with a minus only inside a RANGE

Checks: R1 the text is a mapping, R2 it selects a device, R3 every rank exists, R4 none is given twice, R5 bounds of the text.

Only the tokens above reach Python's ``ast``, and only the node types above are accepted from it: no text can run code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import NoReturn

from rljob_api.errors import PlacementError, show
from rljob_api.placement.assignment import available_ranks

MAX_DEVICES = 1_000_000
"""Entries a mapping may have, checked before any list is made."""
MAX_TEXT = 4096
"""Characters of a mapping; the schema has the same bound."""
MAX_DEPTH = 50
_TOKEN = re.compile(r"\w+|\S")
_ALLOWED = re.compile(r"list|range|[0-9]{1,9}|[()\[\],+*-]")
_REMEDY = 'write for example "list(range(0,8))", "[0, 2]" or "list(range(0,4)) + list(range(8,12))"'


def parse(text: str, num_available: int) -> tuple[int, ...]:
    """Device ranks in written order, each in ``0 .. num_available - 1`` and none twice.

    Raises:
        PlacementError: the text is not a mapping, too large, or names a device twice or one that does not exist.
    """
    ranks = tuple(_List(text).value)
    if not ranks:
        raise PlacementError("R2", "selects no device", _REMEDY)
    seen: set[int] = set()
    for rank in ranks:
        if rank < 0 or rank >= num_available:
            there = available_ranks(num_available) if num_available else "there are no devices"
            raise PlacementError(
                "R3",
                f"device rank {rank} does not exist, {there}",
                "use existing ranks, or ask for more nodes or devicesPerNode",
            )
        if rank in seen:
            raise PlacementError("R4", f"device rank {rank} is given twice", "list every rank once")
        seen.add(rank)
    return ranks


def format_ranks(ranks: Sequence[int]) -> str:
    """The mapping of these ranks as text; :func:`parse` gives the same ranks back."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > 2 and step > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
        return f"list(range({ranks[0]},{ranks[-1] + 1}{'' if step == 1 else f',{step}'}))"
    return f"[{', '.join(map(str, ranks))}]"


class _List:
    """One walk over one expression; ``value`` is the list it denotes."""

    def __init__(self, text: str) -> None:
        self._text = text.strip()
        self.value = self._expression(self._tree())

    def _tree(self) -> ast.expr:
        if len(self._text) > MAX_TEXT:
            raise PlacementError(
                "R5", f"has {len(self._text)} characters, more than {MAX_TEXT}", "use list(range(..)) instead of single numbers"
            )
        for token in _TOKEN.findall(self._text):
            if not _ALLOWED.fullmatch(token):
                raise PlacementError(
                    "R1", f"contains {show(token)}; only list, range, whole numbers and ( ) [ ] , + * - are allowed", _REMEDY
                )
        # Counted before ast.parse, whose own recursion deep nesting would exhaust.
        if any(self._text.count(sign) > MAX_DEPTH for sign in "([-+*"):
            raise PlacementError("R5", f"has more than {MAX_DEPTH} brackets or signs of one kind", _REMEDY)
        try:
            return ast.parse(self._text, mode="eval").body
        except SyntaxError:
            raise PlacementError("R1", "is not an expression", _REMEDY) from None

    def _source(self, node: ast.AST) -> str:
        return show(ast.get_source_segment(self._text, node) or type(node).__name__)

    def _reject(self, node: ast.AST, why: str) -> NoReturn:
        raise PlacementError("R1", f"{self._source(node)} {why}", _REMEDY)

    def _expression(self, node: ast.expr) -> Sequence[int]:
        if isinstance(node, ast.List):
            return [self._integer(item) for item in node.elts]
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.BinOp):
            return self._operation(node)
        self._reject(node, "is not a list of device ranks")

    def _call(self, node: ast.Call) -> Sequence[int]:
        name = node.func.id if isinstance(node.func, ast.Name) else None
        if name not in ("list", "range") or node.keywords:
            self._reject(node, "is not allowed, only list(..) and range(..) are")
        if name == "list":
            if len(node.args) != 1:
                self._reject(node, f"has {len(node.args)} arguments, list takes one")
            return self._expression(node.args[0])
        if not 1 <= len(node.args) <= 3:
            self._reject(node, f"has {len(node.args)} arguments, range takes one to three")
        numbers = [self._integer(argument, signed=True) for argument in node.args]
        if len(numbers) == 3 and numbers[2] == 0:
            self._reject(node, "has step 0")
        result = range(*numbers)
        self._check_length(node, len(result))
        return result

    def _operation(self, node: ast.BinOp) -> Sequence[int]:
        if isinstance(node.op, ast.Add):
            left, right = self._expression(node.left), self._expression(node.right)
            self._check_length(node, len(left) + len(right))
            return [*left, *right]
        if not isinstance(node.op, ast.Mult):
            self._reject(node, "uses an operator other than + and *")
        is_left_number = isinstance(node.left, ast.Constant)
        times = self._integer(node.left if is_left_number else node.right)
        items = self._expression(node.right if is_left_number else node.left)
        self._check_length(node, len(items) * times)
        return list(items) * times

    def _check_length(self, node: ast.AST, length: int) -> None:
        if length > MAX_DEVICES:
            self._reject(node, f"has {length} entries, more than {MAX_DEVICES}")

    def _integer(self, node: ast.expr, *, signed: bool = False) -> int:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            if not signed:
                self._reject(node, "is negative, device ranks count from 0")
            return -self._integer(node.operand)
        if not isinstance(node, ast.Constant) or type(node.value) is not int:
            self._reject(node, "is not a whole number")
        return node.value
