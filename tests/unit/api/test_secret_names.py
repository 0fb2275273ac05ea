import pytest

from rljob_api.errors import SpecInvalidError
from rljob_api.rules.secret_names import looks_secret
from rljob_api.validation import check
from rljob_api.vocabulary import Reason
from tests.unit.api.manifests import manifest

SECRET = ["HF_TOKEN", "token", "WANDB_API_KEY", "APIKEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "SSH_PRIVATE_KEY", "MY_CREDENTIALS"]
PLAIN = [
    "TOKENIZERS_PARALLELISM",
    "MAX_TOKENS",
    "KEY",
    "API_URL",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_ACCESS_KEY_ID",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "PASSWORDLESS",
    "moe_token_dispatcher_type",
    "_",
]


@pytest.mark.parametrize("name", SECRET)
def test_looks_secret(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize("name", PLAIN)
def test_looks_plain(name: str) -> None:
    assert not looks_secret(name)


@pytest.mark.parametrize("place", ["group", "template"])
def test_the_refusal_never_shows_the_value(place: str) -> None:
    document = manifest()
    variable = {"name": "HF_TOKEN", "value": "hf_abcdef"}
    if place == "group":
        document["spec"]["nodeGroups"][0]["env"] = [variable]
    else:
        document["spec"]["podTemplate"] = {"spec": {"containers": [{"name": "ray", "env": [variable]}]}}
    with pytest.raises(SpecInvalidError) as caught:
        check(document)
    assert "HF_TOKEN looks like a secret" in str(caught.value)
    assert "hf_abcdef" not in str(caught.value) + repr(caught.value.errors)


def test_an_empty_value_is_no_secret() -> None:
    document = manifest()
    document["spec"]["nodeGroups"][0]["env"] = [{"name": "HF_TOKEN", "value": ""}]
    assert check(document).job.spec.node_groups[0].env[0].value == ""


def test_reasons_that_restart_are_reasons_that_end_an_attempt() -> None:
    assert all(reason.ends_attempt for reason in Reason if reason.is_machine_failure)
    assert not Reason.COMPLETED.ends_attempt
    assert not Reason.ACTIVE_DEADLINE_EXCEEDED.ends_attempt
