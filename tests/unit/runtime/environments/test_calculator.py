import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_runtime.environments.calculator import CalculatorError, calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3 + 4) * 2", "14"),
        ("7 / 2", "3.5"),
        ("2^10", "1024"),
        ("-3 ** 2", "-9"),
        ("10 // 3 + 10 % 3", "4"),
        ("6 × 7 ÷ 2 − 1", "20"),
        ("sqrt(2)", "1.4142135623731"),
        ("max(1, 2, min(9, 8))", "8"),
        ("factorial(20)", "2432902008176640000"),
        ("0.1 + 0.2", "0.3"),
        ("round(2.5 * pi, 2)", "7.85"),
        ("round(1250, -2)", "1200"),
        ("round(7.5)", "8"),
    ],
)
def test_arithmetic(expression, value) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("__import__('os').getcwd()", "only numbers"),
        ("(1).real", "only numbers"),
        ("'a' * 3", "only numbers"),
        ("True", "only numbers"),
        ("9 ** 9 ** 9", "the power is too large"),
        ("(-8) ** 0.5", "no real number"),
        ("1e308 * 10", "the result is inf"),
        ("1 / 0", "division by zero"),
        ("log(-1)", "no arithmetic expression|domain"),
        ("factorial(10000)", "from 0 to 500"),
        ("round(5, -30000000)", "from -400 to 400"),  # 221 s in Python
        ("round(5, 0.5)", "from -400 to 400"),
        ("sqrt(1, 2)", "exactly one argument"),
        ("2 +", "no arithmetic expression"),
        ("(" * 900, "no arithmetic expression"),
        ("1+" * 600 + "1", "has 1201 characters; 1000 are allowed"),
    ],
)
def test_what_is_no_arithmetic_is_refused(expression, message) -> None:
    with pytest.raises(CalculatorError, match=message):
        calculate(expression)


@given(st.text(alphabet="0123456789.+-*/%^()e, sqrtpimax", max_size=60))
def test_no_expression_raises_anything_else(expression) -> None:
    try:
        calculate(expression)
    except CalculatorError:
        pass
