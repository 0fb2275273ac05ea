"""RLJob's losses and advantages against numbers of TRL and verl, stored by ``python -m bench.fidelity --write-expected``."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from bench.fidelity import ours, report
from bench.fidelity.__main__ import compare
from bench.fidelity.batches import KINDS, SHARED, make
from bench.fidelity.cases import Case
from bench.fidelity.compare import TOLERANCE, difference, digest, digests_apart
from bench.fidelity.differences import differences
from bench.fidelity.expected import EXPECTED, SEED
from bench.fidelity.shared import PPO, cases, loss
from rljob_api.v1alpha1.policy_loss import PPOLoss

STORED = json.loads(EXPECTED.read_text())
BATCHES = {kind: make(kind, SEED) for kind in KINDS}
RENEW = "renew it with python -m bench.fidelity --write-expected"
PAIRS = [pytest.param(case, peer, id=f"{peer}: {case.name}") for case in cases() for peer in case.peers]


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_the_stored_numbers(kind):
    made = digest(BATCHES[kind])
    assert made.keys() == STORED["batches"][kind].keys(), RENEW
    for name, numbers in made.items():
        assert digests_apart(numbers, STORED["batches"][kind][name]) < 1e-7, f"{kind} {name}: {RENEW}"


def test_the_stored_table_has_every_shared_case_and_no_other():
    for peer in ("trl", "verl"):
        assert STORED["peers"][peer].keys() == {case.name for case in cases() if peer in case.peers}, RENEW
        assert STORED["versions"][peer][peer]


@pytest.mark.parametrize(("case", "peer"), PAIRS)
def test_a_shared_variant_agrees_with_the_peer(case, peer):
    for kind, theirs in STORED["peers"][peer][case.name].items():
        mine = digest(ours.run(case, BATCHES[kind]))
        common = mine.keys() & theirs.keys()
        assert common, f"{kind}: ours {sorted(mine)}, {peer}'s {sorted(theirs)}"
        assert {"loss", "value_loss", "advantages", "d_logits"} & common
        for name in common:
            assert digests_apart(mine[name], theirs[name]) <= TOLERANCE, f"{kind}, {name}"


def test_the_stored_numbers_would_show_a_changed_formula():
    (case,) = [case for case in cases() if case.name == "PPO"]
    assert case.loss is not None
    for changed in (PPOLoss(clipLow=0.2, clipHigh=0.2001, dualClip=0.0), PPOLoss(clipLow=0.2, clipHigh=0.2, dualClip=3.0)):
        other = replace(case, loss=replace(case.loss, policy=changed))
        apart = [
            digests_apart(digest(ours.run(other, BATCHES[kind]))[name], numbers)
            for kind, stored in STORED["peers"]["verl"]["PPO"].items()
            for name, numbers in stored.items()
        ]
        assert max(apart) > TOLERANCE


def test_cases_that_differ_say_why_and_shared_ones_do_not():
    assert all(case.why and len(case.peers) == 1 for case in differences())
    assert all(not case.why and case.peers and set(case.batches) <= set(SHARED) for case in cases())
    names = [case.name for case in (*cases(), *differences())]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("theirs", "expected"), [([1.0, 2.0], 0.0), ([1.0, 2.5], 0.2), ([0.0, 2.0], 1.0), ([np.nan, 2.0], np.inf), ([np.inf, 2.0], np.inf)]
)
def test_difference_is_absolute_up_to_one_and_relative_above(theirs, expected):
    case = Case(name="c", loss=loss(PPO))
    found = difference(case, {"d_logprobs": np.array([1.0, 2.0])}, {"d_logprobs": np.array(theirs)})
    assert found.value == pytest.approx(expected)


def test_sides_without_a_common_result_are_an_error():
    with pytest.raises(ValueError, match="no result in common"):
        difference(Case(name="c"), {"loss": np.array(1.0)}, {"advantages": np.array(1.0)})


def test_the_bench_reports_shared_variants_that_differ_and_differences_that_do_not():
    same, different = cases()[:3], differences()[:3]
    batches = {f"{kind} 0": BATCHES[kind] for kind in KINDS}
    own = {(case.name, f"{kind} 0"): ours.run(case, BATCHES[kind]) for case in (*same, *different) for kind in case.batches}
    values = compare(same, different, batches, {"trl": own, "verl": own})
    assert len(values["problems"]) == len(different)
    assert all("agrees with" in problem for problem in values["problems"])
    worse = {key: {name: array * 1.01 + 0.01 for name, array in result.items()} for key, result in own.items()}
    values = compare(same, different, batches, {"trl": worse, "verl": worse})
    assert len(values["problems"]) == values["compared"]
    assert values["agree"] == 0
    values |= {"machine": {"measured_at": "now", "versions": {"torch": "2"}}, "versions": {"verl": {"verl": "9", "torch": "2"}}, "seeds": 1}
    text = report.markdown(values)
    assert all(case.name in text for case in (*same, *different))
    assert text.count("**") >= 2 * values["compared"]
