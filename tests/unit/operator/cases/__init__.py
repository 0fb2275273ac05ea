"""Tables of observations and expected decisions. test_decide.py runs every row; together they cover all reasons but the driver's own."""

from __future__ import annotations

from tests.unit.operator.cases.attempts import ATTEMPTS
from tests.unit.operator.cases.interruptions import INTERRUPTIONS
from tests.unit.operator.cases.isolation import ISOLATION

CASES = [*ATTEMPTS, *INTERRUPTIONS, *ISOLATION]
