"""What somebody meant who wrote another kind of value: an amount with a unit, ranks as a list, an algorithm by the name of its paper.

Only words for messages: nothing here makes a wrong value a right one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from rljob_api import paths, quantities
from rljob_api.errors import MAX_SHOWN_VALUE

_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"(\d{1,9})\s*(s|sec|m|min|h|d)")
_SCALED = re.compile(r".*(k|M|G|T|P|E|[KMGTPE]i)B?")
"""Texts that count by thousands; the other suffixes of quantities are fractions."""
_AMOUNT = re.compile(r"(\d{1,12}(?:\.\d{1,3})?)\s*([kmgtp]i?)b?", re.ASCII | re.IGNORECASE)
_ESTIMATOR, _VARIANT = "algorithm.advantage.estimator", "algorithm.policyLoss.variant"
_DAPO = "algorithm.policyLoss.clipHigh: 0.28 and rollout.groupFilter: {minStd: 0}, see docs/algorithms.md"
_ESTIMATORS = {
    "drgrpo": "write GRPO, with algorithm.advantage.normalizeStd: false and algorithm.policyLoss.aggregation: SeqMeanTokenSumNorm",
    "dapo": f"write GRPO, with {_DAPO}",
    "ppo": f"write GAE and add a component with role: Critic; the loss is {_VARIANT}: PPO",
    "reinforce++": "did you mean ReinforcePlusPlus?",
    "reinforcepp": "did you mean ReinforcePlusPlus?",
    "reinforce++baseline": "did you mean ReinforcePlusPlus?",
    **{name.lower(): f"it is a loss: write {_VARIANT}: {name}, and GRPO here" for name in ("GSPO", "CISPO", "TOPR", "TIS", "Kimi15")},
}
_VARIANTS = {
    "drgrpo": f"write PPO with algorithm.policyLoss.aggregation: SeqMeanTokenSumNorm, and {_ESTIMATOR}: GRPO with normalizeStd: false",
    "dapo": f"write PPO, with {_DAPO}",
    "reinforce": f"write Vanilla, and {_ESTIMATOR}: Reinforce",
    "reinforce++": f"write PPO, and {_ESTIMATOR}: ReinforcePlusPlus",
    **{name.lower(): f"it is an estimator: write {_ESTIMATOR}: {name}, and PPO here" for name in ("GRPO", "RLOO", "GAE", "GiGPO")},
}
_NAMES = {"advantage.estimator": _ESTIMATORS, "policyLoss.variant": _VARIANTS}


def unit_of(field: str) -> str:
    """What a number of a field counts, where its name says so: ``bytes`` or ``seconds``, else nothing."""
    return next((unit for unit in ("bytes", "seconds") if field.lower().endswith(unit)), "")


def number(field: str, value: object) -> int | None:
    """The whole number that a text with a unit stands for: 4294967296 for ``4Gi``, of seconds 300 for ``5m``; None if it is none."""
    if not isinstance(value, str):
        return None
    text = value.strip()
    if unit_of(field) == "seconds":
        found = _DURATION.fullmatch(text)
        return int(found[1]) * _SECONDS[found[2]] if found is not None else None
    if _SCALED.fullmatch(text) is None:
        return None
    try:
        exact = quantities.parse(text.removesuffix("B").replace(" ", ""))
    except ValueError:
        return None
    return int(exact) if exact.denominator == 1 else None


def quantity(text: str) -> str | None:
    """How to write an amount with another unit, such as 512Mi for ``512 MiB``; None of a text that is no amount."""
    found = _AMOUNT.fullmatch(text.strip())
    if found is None:
        return None
    number, prefix = found[1], found[2][0].upper()
    binary = f"{number}{prefix}i"
    return binary if len(found[2]) > 1 else f"{number}{prefix.replace('K', 'k')}, or {binary} for powers of 1024"


def text_of_list(field: str, value: Sequence[object]) -> str | None:
    """A list of ranks in the grammar of the field, quoted, or an example of it where that is long; None for other fields and lists."""
    if not value or not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in value):
        return None
    ranks = [one for one in value if isinstance(one, int)]
    runs = _runs(ranks)
    if field == "deviceMapping":
        as_ranges = " + ".join(f"list(range({first},{last + 1}))" for first, last in runs)
        texts = [json.dumps(ranks), as_ranges]
        example = 'the same list in quotes, or ranges such as "list(range(0,8)) + list(range(16,24))"'
    elif field == "ranks":
        texts = [",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)]
        example = 'the same ranks in quotes, without spaces and brackets, such as "0-3,6"'
    else:
        return None
    return next((json.dumps(text) for text in texts if len(text) <= MAX_SHOWN_VALUE), example)


def _runs(ranks: Sequence[int]) -> list[list[int]]:
    """[[0, 3], [6, 6]] for [0, 1, 2, 3, 6]: neighbors that ascend by one are joined."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return runs


def algorithm(parts: paths.Parts, value: str) -> str | None:
    """How an algorithm is written here that a choice was given the name of; None where the name is no such one."""
    names = _NAMES.get(paths.join(parts[-2:]), {})
    return names.get(re.sub(r"[\s_.-]", "", value).lower())
