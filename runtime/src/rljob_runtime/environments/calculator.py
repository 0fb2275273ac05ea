"""Arithmetic for a policy: a walk over the syntax tree, never ``eval``, bounded so that no expression takes longer than milliseconds."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping

MAX_CHARACTERS = 1000
_MAX_BITS = 4096
"""Of an integer result."""
_MAX_FACTORIAL = 500

_MAX_DIGITS = 400
"""Of ``round``: more than a float has before its point, or behind it."""


class CalculatorError(ValueError):
    """Raised for what cannot be calculated, with a message for the policy."""


def _round(value: float, digits: float = 0) -> float:
    """Python computes 10 to the power of ``-digits``, however large."""
    if digits != int(digits) or abs(digits) > _MAX_DIGITS:
        raise CalculatorError(f"round takes a whole number of digits from -{_MAX_DIGITS} to {_MAX_DIGITS}")
    return round(value, int(digits)) if digits else round(value)


_BINARY: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: Mapping[str, Callable[..., float]] = {
    "abs": abs, "min": min, "max": max, "round": _round, "floor": math.floor, "ceil": math.ceil, "sqrt": math.sqrt, "exp": math.exp,
    "log": math.log, "log2": math.log2, "log10": math.log10, "sin": math.sin, "cos": math.cos, "tan": math.tan, "asin": math.asin,
    "acos": math.acos, "atan": math.atan, "degrees": math.degrees, "radians": math.radians, "gcd": math.gcd,
}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "e": math.e}


def calculate(expression: str) -> str:
    """The value of an expression such as ``(3 + 4) * sqrt(2)``; ``^`` is a power, as ``**``, and × ÷ − are read, too.

    Raises:
        CalculatorError: it is no arithmetic, too large, or undefined.
    """
    if len(expression) > MAX_CHARACTERS:
        raise CalculatorError(f"the expression has {len(expression)} characters; {MAX_CHARACTERS} are allowed")
    text = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/").replace("−", "-")
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        if isinstance(error, CalculatorError):
            raise
        raise CalculatorError(f"no arithmetic expression: {type(error).__name__}") from error
    except (ArithmeticError, TypeError) as error:
        raise CalculatorError(f"{error}") from error
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            return _bounded(_BINARY[type(sign)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id="factorial"), args=[argument], keywords=[]):
            return _factorial(_value(argument))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*[_value(argument) for argument in arguments]))
    known = ", ".join((*_FUNCTIONS, "factorial", *_CONSTANTS))
    raise CalculatorError(f"only numbers, + - * / // % **, parentheses and {known} can be calculated")


def _power(base: float, exponent: float) -> float:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > _MAX_BITS:
        raise CalculatorError("the power is too large")
    value = base**exponent
    if isinstance(value, complex):
        raise CalculatorError("the power is no real number")
    return _bounded(value)


def _factorial(value: float) -> float:
    if value != int(value) or not 0 <= value <= _MAX_FACTORIAL:
        raise CalculatorError(f"factorial takes a whole number from 0 to {_MAX_FACTORIAL}")
    return math.factorial(int(value))


def _bounded(value: float) -> float:
    if isinstance(value, int) and value.bit_length() > 2 * _MAX_BITS:
        raise CalculatorError("the number is too large")
    if isinstance(value, float) and not math.isfinite(value):
        raise CalculatorError(f"the result is {value}")
    return value
