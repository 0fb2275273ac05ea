import copy
import json
from pathlib import Path
from typing import Annotated

import jsonschema
import pytest
import yaml
from pydantic import Field

from rljob_api import __main__ as command
from rljob_api import generate
from rljob_api.crd import reference, schema
from rljob_api.errors import SchemaError
from rljob_api.v1alpha1 import RLJob
from rljob_api.v1alpha1.base import SpecModel
from rljob_api.v1alpha1.conditions import ConditionType
from rljob_api.vocabulary import Reason
from tests.unit.api.manifests import manifest
from tests.unit.api.structural import RESOLVED, beyond, violations, with_defaults

ROOT = Path(__file__).parents[3]


def test_the_schema_is_structural() -> None:
    assert list(violations(schema.job_schema())) == []


def test_the_checker_notices() -> None:
    broken = copy.deepcopy(schema.job_schema())
    spec = broken["properties"]["spec"]["properties"]
    del spec["nodeGroups"]["maxItems"]
    spec["seed"]["default"] = -1
    spec["model"]["additionalProperties"] = False
    spec["image"]["anyOf"] = [{"type": "null"}]
    assert {text.split(":")[0] for text in violations(broken)} == {".spec.nodeGroups", ".spec.seed", ".spec.model", ".spec.image"}


def test_generated_files_are_up_to_date() -> None:
    assert generate.sync(generate.files(), ROOT, check=True) == [], "run: python -m rljob_api generate"


def test_check_fails_with_the_command_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["generate", "--out", str(tmp_path)]) == 0
    assert command.main(["generate", "--check", "--out", str(tmp_path)]) == 0
    (tmp_path / "docs" / "reference" / "rljob.md").write_text("old\n")
    assert command.main(["generate", "--check", "--out", str(tmp_path)]) == 1
    assert "run: python -m rljob_api generate" in capsys.readouterr().err


def test_defaults_of_the_server_equal_those_of_the_models() -> None:
    stored = with_defaults(schema.job_schema(), manifest())
    dumped = RLJob.model_validate_json(json.dumps(manifest())).model_dump(mode="json", by_alias=True, exclude_none=True)
    assert RLJob.model_validate_json(json.dumps(stored)).model_dump(mode="json", by_alias=True, exclude_none=True) == dumped
    resolved = {path: keys & RESOLVED[path] for path, keys in beyond(dumped, stored)}
    assert set(resolved) == set(RESOLVED)
    assert dict(beyond(dumped, stored)) == resolved


def test_every_top_level_field_is_immutable_or_listed_as_mutable() -> None:
    spec = schema.job_schema()["properties"]["spec"]
    frozen = {
        key
        for key, child in spec["properties"].items()
        if any(r["rule"] == "self == oldSelf" for r in child.get("x-kubernetes-validations", ()))
    }
    assert set(spec["properties"]) - frozen == schema.MUTABLE_SPEC_FIELDS | set(schema.MUTABLE_BELOW)
    for section, mutable in schema.MUTABLE_BELOW.items():
        fields = spec["properties"][section]["properties"]
        assert {key for key, child in fields.items() if "x-kubernetes-validations" not in child} == mutable
    presence = {rule["rule"] for rule in spec["x-kubernetes-validations"]}
    for key in frozen - set(spec["required"]):
        assert "default" in spec["properties"][key] or f"has(self.{key}) == has(oldSelf.{key})" in presence


def test_rules_and_list_keys_name_fields_that_exist() -> None:
    known = {"", *reference.index(), *(f"{path}[]" for path in reference.index())}
    assert set(schema.CEL_RULES) <= known
    assert set(schema.LIST_MAP_KEYS) <= known


def test_names_columns_and_status() -> None:
    crd = schema.crd()
    assert crd["metadata"]["name"] == "rljobs.rljob.dev"
    assert crd["spec"]["names"]["shortNames"] == ["rlj"]
    (version,) = crd["spec"]["versions"]
    assert version["subresources"] == {"status": {}}
    assert [column["name"] for column in version["additionalPrinterColumns"]] == ["Status", "Step", "Reward", "Attempt", "Nodes", "Age"]
    conditions = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["conditions"]
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]
    assert conditions["items"]["properties"]["reason"]["enum"] == [reason.value for reason in Reason]


def test_status_has_no_floats() -> None:
    assert [doc.path for doc in reference.index().values() if doc.path.startswith("status") and doc.type == "number"] == []


def test_the_fields_are_frozen() -> None:
    """A renamed or removed field breaks users: UPDATE the golden list on purpose."""
    golden = ROOT / "tests" / "golden" / "schema" / "fields.txt"
    assert "".join(f"{path}\n" for path in reference.index()) == golden.read_text()


def test_the_json_schema_accepts_the_examples_and_refuses_unknown_fields() -> None:
    validator = jsonschema.Draft202012Validator(schema.json_schema())
    for path in sorted((ROOT / "examples").glob("*.yaml")):
        from rljob_api.reading.manifest import read

        validator.validate(read(path.read_text()).data)
    document = manifest()
    document["spec"]["rollout"] = {"promptPerStep": 3}
    with pytest.raises(jsonschema.ValidationError, match="promptPerStep"):
        validator.validate(document)


def test_every_condition_and_reason_is_documented() -> None:
    page = reference.conditions_page()
    assert all(f"| `{member.value}` | " in page for member in [*ConditionType, *Reason])


def test_the_crd_file_is_plain_yaml() -> None:
    assert yaml.load((ROOT / "crds" / "rljobs.rljob.dev.yaml").read_text(), yaml.CSafeLoader) == schema.crd()


class Unbounded(SpecModel):
    """A model with a text without bound."""

    name: str
    """A name."""


class Undocumented(SpecModel):
    """A model with a field nobody explains."""

    name: Annotated[str, Field(max_length=3)]


class Union(SpecModel):
    """A model with two types in one field."""

    name: Annotated[str, Field(max_length=3)] | int
    """Text or number."""


@pytest.mark.parametrize(
    ("model", "message"),
    [(Unbounded, "x.name: text without a maximum length"), (Undocumented, "no docstring"), (Union, "a union of 2 types")],
)
def test_the_generator_refuses(model: type[SpecModel], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = {} if model is Undocumented else {"name": "Text."}
    monkeypatch.setattr(schema, "attribute_docs", lambda cls: docs)
    with pytest.raises(SchemaError, match=message):
        schema.structural(model, "x")
