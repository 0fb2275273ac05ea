"""Kubernetes quantities: the grammar of its core API, exact."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.errors import SpecInvalidError
from rljob_api.quantities import parse, rounded_down, rounded_up
from rljob_api.validation import check
from tests.unit.api.manifests import manifest

SCALES = {"n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "": Fraction(1)}
SCALES |= {letter: Fraction(1000**power) for letter, power in zip("kMGTPE", range(1, 7), strict=True)}
SCALES |= {f"{letter}i": Fraction(1024**power) for letter, power in zip("KMGTPE", range(1, 7), strict=True)}


@given(whole=st.integers(0, 10**9), decimals=st.integers(0, 999), suffix=st.sampled_from(sorted(SCALES)))
def test_a_number_times_its_scale(whole: int, decimals: int, suffix: str) -> None:
    assert parse(f"{whole}.{decimals:03}{suffix}") == (whole + Fraction(decimals, 1000)) * SCALES[suffix]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[("64", 64), ("500m", 1), ("15500m", 16), ("0.1", 1), (".5", 1), ("5.", 5), ("2k", 2000), ("1Ki", 1024), ("0", 0), ("+3", 3)],
        *[("1e3", 1000), ("1.5E3", 1500), ("12e-1", 2), ("2E", 2 * 10**18), ("1Ei", 2**60), ("1n", 1)],
    ],
)
def test_rounded_up(text: str, expected: int) -> None:
    assert rounded_up(text) == expected


def test_rounded_down() -> None:
    expected = {"80Gi": 80 * 2**30, "1.5Gi": 3 * 2**29, "64": 64, "500m": 0, "1500m": 1, "3Ti": 3 * 2**40, "0.1P": 10**14}
    assert {text: rounded_down(text) for text in expected} == expected


@pytest.mark.parametrize("text", ["", "x", "1x", "-1", "1.5.2", "1iK", "1K", ".", "e3", "1e", "1 Gi"])
def test_other_text_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse(text)


def test_a_manifest_takes_whole_numbers_as_kubernetes_does() -> None:
    document = manifest()
    document["spec"]["nodeGroups"][0]["resources"] = {"cpu": 4, "memory": "8Gi", "limits": {"ephemeral-storage": "1e11"}}
    resources = check(document).job.spec.node_groups[0].resources
    assert (resources.cpu, resources.cpu_request, resources.limits) == ("4", "4", {"ephemeral-storage": "1e11"})
    document["spec"]["nodeGroups"][0]["resources"] = {"cpu": True, "memory": 1.5, "requests": {"cpu": "4 cores"}}
    with pytest.raises(SpecInvalidError) as caught:
        check(document)
    assert [error.path.removeprefix("spec.nodeGroups[0].resources.") for error in caught.value.errors] == ["cpu", "memory", "requests.cpu"]
