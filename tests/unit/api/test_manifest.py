import json
import pickle

import pytest

from rljob_api import errors, paths
from rljob_api.errors import FieldError, SpecInvalidError
from rljob_api.naming import rayjob_name, worker_name
from rljob_api.reading import manifest, yaml_text
from rljob_api.validation import check
from tests.unit.api.manifests import manifest as job


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1.5", 1.5),
        (".5", 0.5),
        ("-3", -3),
        ("+3", 3),
        ("0", 0),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("0-3", "0-3"),
        ("0,2", "0,2"),
        ("0:0", "0:0"),
        ("0-3:0-7", "0-3:0-7"),
        ("all", "all"),
        ("'010'", "010"),
        ('"no"', "no"),
        ("|\n  no\n", "no\n"),
        ("1.2.3", "1.2.3"),
        ("512Gi", "512Gi"),
        ("=", "="),
    ],
)
def test_plain_values_mean_what_they_look_like(text: str, value: object) -> None:
    (document,) = yaml_text.load(f"a: {text}\n")
    assert document.data == {"a": value}
    assert type(document.data["a"]) is type(value)
    assert not document.errors


@pytest.mark.parametrize(
    "text", ["010", "1:0", "1_0", "0x10", "0b1", "0o7", "no", "On", "yes", "2024-01-01", ".inf", "-.inf", ".nan", "1:0.5", "01.5"]
)
def test_values_that_only_look_like_it_are_reported(text: str) -> None:
    (document,) = yaml_text.load(f"a: {text}\n")
    assert [(error.path, error.value, error.line) for error in document.errors] == [("a", text, 1)]


def test_json_reads_the_same() -> None:
    assert manifest.read(json.dumps(job())).data == job()
    assert check(json.dumps(job())).job == check(job()).job


def test_anchors_and_merges_are_expanded() -> None:
    (document,) = yaml_text.load("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: {<<: [{x: 7}, *a]}\n")
    assert document.data == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 7, "y": 2}}


def test_other_kinds_are_passed_over_and_jobs_chosen_by_name() -> None:
    first, second = json.dumps(job()), json.dumps({**job(), "metadata": {"name": "other"}})
    text = f"apiVersion: v1\nkind: ConfigMap\n---\n{first}\n---\n{second}\n---\n"
    assert check(text, name="other").job.metadata.name == "other"
    assert json.loads(manifest.select_text(text, "case")) == job()
    with pytest.raises(SpecInvalidError, match="2 RLJobs: case, other"):
        check(text)
    with pytest.raises(SpecInvalidError, match="no RLJob called third, only case, other"):
        check(text, name="third")


def test_what_kubectl_prints_can_be_read_back() -> None:
    document = job()
    document["metadata"] |= {"uid": "x", "generation": 3, "annotations": {"a/b": "c"}, "managedFields": [{"fieldsV1": {"f:spec": {}}}]}
    document["status"] = {"conditions": [{"type": "Accepted"}]}
    assert check(document).job.metadata.name == "case"


def test_a_file_that_is_too_large_is_not_parsed() -> None:
    with pytest.raises(SpecInvalidError, match="more than 1048576"):
        yaml_text.load("a: " + "x" * 2_000_000)


def test_control_characters_are_named() -> None:
    with pytest.raises(SpecInvalidError, match="not YAML"):
        yaml_text.load("a: \x07\n")


def test_errors_come_in_the_order_of_the_file() -> None:
    text = "spec:\n  seed: -1\n  rewards: 3\nkind: RLJob\nmetadata: {name: A}\napiVersion: rljob.dev/v1alpha1\n"
    with pytest.raises(SpecInvalidError) as caught:
        check(text)
    assert [(error.line, error.path) for error in caught.value.errors] == [
        (2, "spec.seed"),
        (3, "spec.rewards"),
        (1, "spec.nodeGroups"),
        (1, "spec.components"),
        (1, "spec.model"),
        (5, "metadata.name"),
    ]


@pytest.mark.parametrize("parts", [("spec",), ("a", 0, "b"), ("a", "b.c", 1), ("a", 'q"[1]', "x y"), ("m", "ray.io/x")])
def test_paths_split_what_they_join(parts: paths.Parts) -> None:
    assert paths.split(paths.join(parts)) == parts


ERRORS = [
    SpecInvalidError([FieldError(path="spec.seed", value="-1", problem="must be >= 0", remedy="use 0", line=3)]),
    errors.PlacementError("P5", "selects no rank", 'write "all"'),
    errors.SchemaError("spec.x: list without a maximum length"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_pickle_and_share_one_root(error: errors.ApiError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))
    assert isinstance(error, errors.ApiError)
    assert (type(error).__doc__ or "").startswith("Raised when")


def test_field_error_text() -> None:
    assert str(ERRORS[0]) == "spec.seed: -1: must be >= 0; use 0"
    with pytest.raises(ValueError, match="at least one"):
        SpecInvalidError([])


def test_derived_names() -> None:
    assert rayjob_name("x" * 43, 99) == "x" * 43 + "-a99"
    assert worker_name("actor_train", 3) == "actor_train-3"
    for name, attempt in (("x" * 43, 100), ("x", 0)):
        with pytest.raises(ValueError, match="cannot name a RayJob"):
            rayjob_name(name, attempt)


def test_an_unknown_key_in_a_section_that_an_alias_repeats_is_one_problem_a_place() -> None:
    text = json.dumps(job()).replace('{"ranks": "0"}', "&there {ranks: '0', rank: '5'}").replace('{"ranks": "1"}', "*there")
    with pytest.raises(SpecInvalidError) as caught:
        check(text)
    unknown = [error.path for error in caught.value.errors if error.problem == manifest.UNKNOWN_FIELD]
    assert unknown == ["spec.components[0].placement.rank", "spec.components[1].placement.rank"]


def test_unknown_keys_alone_make_a_job_invalid() -> None:
    document = job()
    document["spec"]["color"] = "red"
    for check_it in (check, lambda data: check(data, runnable=False), lambda data: manifest.to_job(manifest.Document(data=data))):
        with pytest.raises(SpecInvalidError) as caught:
            check_it(document)
        assert [error.path for error in caught.value.errors] == ["spec.color"]
    assert document["spec"]["color"] == "red"
